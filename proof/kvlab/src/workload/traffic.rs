//! Traffic: requests that arrive while others are being answered, and the times of their answers.

use std::time::{Duration, Instant};

use kvengine::{Answer, AnswerEvent, Engine, PromptTokens, Request, Step, StepTimes};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use super::{ClientReport, ClientTally, TrafficPrompts, cpu_seconds};
use crate::error::{Error, Result};

/// A request in a trace. Its prompt is drawn at random, and its answer has exactly the given number of
/// tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// Arrival time, in seconds since the start.
    pub at: f64,
    /// The number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// The number of tokens in the answer.
    pub answer_tokens: usize,
}

/// Settings of a trace with Poisson arrivals. The lengths of prompts and answers range from half to one and a
/// half times their means.
///
/// ```
/// use kvlab::Traffic;
/// let trace = Traffic { requests: 100, rate: Some(5.0), ..Traffic::default() }.draw()?;
/// assert_eq!(trace.len(), 100);
/// assert!(trace.windows(2).all(|pair| pair[0].at <= pair[1].at));
/// # Ok::<(), kvlab::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Traffic {
    /// The number of requests.
    pub requests: usize,
    /// Requests per second; `None` if all arrive at the start.
    pub rate: Option<f64>,
    /// The mean number of tokens per prompt.
    pub prompt_tokens: usize,
    /// The mean number of tokens per answer.
    pub answer_tokens: usize,
    /// Random seed.
    pub seed: u64,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { requests: 64, rate: None, prompt_tokens: 256, answer_tokens: 64, seed: 0 }
    }
}

impl Traffic {
    /// Draws the requests, in order of arrival.
    ///
    /// # Errors
    /// Returns [`Error::Workload`] if there are no requests, a length is 0, a count is above its limit, or the
    /// rate is not positive.
    pub fn draw(&self) -> Result<Vec<Arrival>> {
        if self.requests == 0 || self.prompt_tokens == 0 || self.answer_tokens == 0 {
            return Err(Error::Workload("requests, prompts and answers need at least one".to_owned()));
        }
        super::check_counts(&[
            ("requests", self.requests, super::MOST_REQUESTS),
            ("prompt tokens", self.prompt_tokens, super::MOST_TOKENS),
            ("answer tokens", self.answer_tokens, super::MOST_TOKENS),
        ])?;
        if self.rate.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
            return Err(Error::Workload("the rate must be above 0".to_owned()));
        }
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut at = 0.0;
        let arrivals = (0..self.requests).map(|_| {
            if let Some(rate) = self.rate {
                at -= (1.0 - rng.random::<f64>()).ln() / rate;
            }
            let mut around = |mean: usize| rng.random_range(mean.div_ceil(2)..=mean + mean / 2);
            Arrival {
                at,
                prompt_tokens: around(self.prompt_tokens),
                answer_tokens: around(self.answer_tokens),
            }
        });
        Ok(arrivals.collect())
    }
}

/// Tokens at the start of all prompts in a trace, such as instructions. Each prompt's own tokens follow them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SharedPrefix {
    /// The number of tokens.
    pub tokens: usize,
    /// True to compute the tokens before the first request and never evict them.
    pub pinned: bool,
}

/// Times and counts for a trace that an engine has answered.
#[derive(Debug, Clone, Serialize)]
pub struct TrafficReport {
    /// The times and counts that a client sees.
    #[serde(flatten)]
    pub client: ClientReport,
    /// The number of forward passes.
    pub steps: usize,
    /// The mean number of tokens per pass.
    pub tokens_per_step: f64,
    /// The share of the steps' time that the engine itself took: everything but the model.
    pub engine_share: f64,
    /// The number of preemptions. A preempted request gives its blocks to other requests.
    pub preemptions: u64,
    /// The number of preemptions that moved the request's blocks to host memory.
    pub swaps: u64,
}

/// A request that is being answered.
struct Asked {
    /// The answer, or `None` if the request has failed.
    answer: Option<Answer>,
    at: Duration,
    first: Option<Duration>,
    last: Duration,
}

/// The times and counts of a trace so far.
struct Tally {
    client: ClientTally,
    first_failure: Option<kvengine::Error>,
}

impl Tally {
    fn fail(&mut self, error: kvengine::Error) {
        self.client.failed += 1;
        self.first_failure.get_or_insert(error);
    }

    /// Reads what has arrived of a request's answer by the time `now`.
    fn read(&mut self, request: &mut Asked, arrival: &Arrival, now: Duration) {
        while let Some(event) = request.answer.as_mut().and_then(Answer::try_next) {
            match event {
                Ok(AnswerEvent::Token { .. }) => {
                    self.client.answer_tokens += 1;
                    if request.first.is_some() {
                        self.client.between.push(now.saturating_sub(request.last));
                    }
                    request.first.get_or_insert(now.saturating_sub(request.at));
                    request.last = now;
                }
                Ok(AnswerEvent::End { generation, .. }) => {
                    self.client.cached_tokens += generation.cached_tokens;
                    self.client.shortened += usize::from(generation.tokens.len() < arrival.answer_tokens);
                    self.client.whole.push(now.saturating_sub(request.at));
                }
                Err(error) => {
                    self.fail(error);
                    request.answer = None;
                }
            }
        }
    }
}

/// Plays a trace: submits each request at its time, and runs engine steps while there is work. Calls
/// `progress` with the number of requests answered so far and the total.
///
/// A request that fails is counted, and the others go on.
///
/// # Errors
/// Returns the first request's error if all requests fail, and the errors of the engine that are not about a
/// request.
pub fn play(
    engine: &mut Engine,
    trace: &[Arrival],
    shared: SharedPrefix,
    seed: u64,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<TrafficReport> {
    let (vocabulary, limit) =
        (engine.model().config().vocab_size as u32, engine.model().config().max_positions);
    super::check_counts(&[("tokens of the shared prefix", shared.tokens, limit)])?;
    let mut prompts = TrafficPrompts::new(vocabulary, shared.tokens, seed);
    let pinned = (shared.pinned && shared.tokens > 0).then(|| {
        let alone =
            Request { max_new_tokens: 1, ..Request::new(PromptTokens::Plain(prompts.prefix().to_vec())) };
        engine.generate(&alone, &mut ())?;
        engine.pin(&alone)
    });
    let _pinned = pinned.transpose()?;
    let mut request = |arrival: &Arrival| {
        let prompt = prompts.draw(arrival);
        let max_new_tokens = arrival.answer_tokens;
        Request { max_new_tokens, ignore_end: true, ..Request::new(PromptTokens::Plain(prompt)) }
    };
    let (cpu, before, started) = (cpu_seconds(), engine.step_times(), Instant::now());
    let mut asked: Vec<Asked> = Vec::with_capacity(trace.len());
    let mut tally = Tally { client: ClientTally::new(trace, shared.tokens), first_failure: None };
    let (mut steps, mut computed) = (0, 0);
    let mut last = Step::default();
    while tally.client.ended() < trace.len() {
        let now = started.elapsed();
        while let Some(arrival) = trace.get(asked.len()) {
            let at = Duration::try_from_secs_f64(arrival.at).unwrap_or_default();
            if at > now {
                break;
            }
            // A prompt that cannot be answered is not drawn, because it may not fit into memory.
            let tokens = shared.tokens.saturating_add(arrival.prompt_tokens);
            let too_long = kvchunk::Error::TooLong { largest: tokens as i64 - 1, limit };
            let request = if tokens > limit { Err(too_long.into()) } else { Ok(request(arrival)) };
            let submitted = request.and_then(|request| engine.submit(request));
            let answer = submitted.map_err(|error| tally.fail(error)).ok();
            asked.push(Asked { answer, at, first: None, last: at });
        }
        let step = engine.step()?;
        if step.is_idle() && asked.len() < trace.len() {
            let next = Duration::try_from_secs_f64(trace[asked.len()].at).unwrap_or_default();
            std::thread::sleep(next.saturating_sub(started.elapsed()));
        }
        steps += usize::from(step.tokens > 0);
        computed += step.tokens;
        last = step;
        let now = started.elapsed();
        let ended = tally.client.ended();
        for (request, arrival) in asked.iter_mut().zip(trace) {
            tally.read(request, arrival, now);
        }
        if tally.client.ended() > ended {
            progress(tally.client.ended(), trace.len());
        }
    }
    if let Some(error) = tally.first_failure.take_if(|_| tally.client.whole.is_empty()) {
        return Err(error.into());
    }
    let mut client = tally.client;
    client.ttft = asked.iter().filter_map(|request| request.first).collect();
    client.first_failure = tally.first_failure.map(|error| error.to_string());
    let seconds = started.elapsed().as_secs_f64();
    let after = engine.step_times();
    let spent = |of: fn(&StepTimes) -> Duration| of(&after).saturating_sub(of(&before)).as_secs_f64();
    let (own, model) = (spent(|times| times.engine), spent(|times| times.model));
    let engine_share = own / (own + model).max(f64::MIN_POSITIVE);
    let cpu_seconds = cpu.zip(cpu_seconds()).map(|(before, after)| after - before);
    Ok(TrafficReport {
        client: client.report(seconds, cpu_seconds),
        steps,
        engine_share,
        tokens_per_step: computed as f64 / steps.max(1) as f64,
        preemptions: last.preemptions,
        swaps: last.swaps,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_around_their_means_and_arrivals_have_their_rate() {
        let traffic = Traffic { requests: 2000, rate: Some(10.0), ..Traffic::default() };
        let trace = traffic.draw().unwrap();
        let mean = |of: fn(&Arrival) -> usize| trace.iter().map(of).sum::<usize>() as f64 / 2000.0;
        assert!((mean(|a| a.prompt_tokens) - 256.0).abs() < 8.0);
        assert!((mean(|a| a.answer_tokens) - 64.0).abs() < 2.0);
        assert!((trace[1999].at / 200.0 - 1.0).abs() < 0.1, "{}", trace[1999].at);
        assert!(trace.iter().all(|a| (128..=384).contains(&a.prompt_tokens)));
        assert_eq!(trace, traffic.draw().unwrap());
        assert!(Traffic { rate: None, ..traffic }.draw().unwrap().iter().all(|a| a.at == 0.0));
        for wrong in [
            Traffic { rate: Some(0.0), ..traffic },
            Traffic { requests: 0, ..traffic },
            Traffic { answer_tokens: 0, ..traffic },
            Traffic { answer_tokens: usize::MAX, ..traffic },
            Traffic { prompt_tokens: usize::MAX, ..traffic },
            Traffic { requests: usize::MAX, ..traffic },
        ] {
            assert!(matches!(wrong.draw(), Err(Error::Workload(_))));
        }
    }
}
