//! The counts and times that the client of an engine or a server sees of a trace.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::{Arrival, Times};

/// The prompts of a trace, in order of arrival. The same seed draws the same prompts.
#[derive(Debug)]
pub struct TrafficPrompts {
    rng: StdRng,
    vocabulary: u32,
    prefix: Vec<u32>,
}

impl TrafficPrompts {
    /// Draws the tokens that all prompts begin with, from a vocabulary of the given size.
    pub fn new(vocabulary: u32, prefix_tokens: usize, seed: u64) -> Self {
        let (mut rng, vocabulary) = (StdRng::seed_from_u64(seed), vocabulary.max(1));
        let prefix = (0..prefix_tokens).map(|_| rng.random_range(0..vocabulary)).collect();
        Self { rng, vocabulary, prefix }
    }

    /// Returns the tokens that all prompts begin with.
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Draws the prompt of the next request.
    pub fn draw(&mut self, arrival: &Arrival) -> Vec<u32> {
        let Self { rng, vocabulary, prefix } = self;
        let own = (0..arrival.prompt_tokens).map(|_| rng.random_range(0..*vocabulary));
        prefix.iter().copied().chain(own).collect()
    }
}

/// Times and counts of a trace so far, as its client sees them.
#[derive(Debug, Clone, Default)]
pub struct ClientTally {
    /// The times from arrival to the first token, in order of arrival, of the requests that got a token.
    pub ttft: Vec<Duration>,
    /// The times between successive tokens of an answer.
    pub between: Vec<Duration>,
    /// The times from arrival to the last token, of the answers that ended.
    pub whole: Vec<Duration>,
    /// The total number of prompt tokens of all requests.
    pub prompt_tokens: usize,
    /// The number of answer tokens.
    pub answer_tokens: usize,
    /// The number of prompt tokens that were found in the cache.
    pub cached_tokens: usize,
    /// The number of answers that have fewer tokens than the trace asks for.
    pub shortened: usize,
    /// The number of requests that ended with an error.
    pub failed: usize,
    /// The error of the first such request.
    pub first_failure: Option<String>,
}

/// Times and counts of a whole trace, as its client sees them.
#[derive(Debug, Clone, Serialize)]
pub struct ClientReport {
    /// The number of requests.
    pub requests: usize,
    /// The number of requests that ended with an error.
    pub failed: usize,
    /// The error of the first such request.
    pub first_failure: Option<String>,
    /// The number of answers that ended early because they outgrew the pool.
    pub shortened: usize,
    /// The total number of prompt tokens.
    pub prompt_tokens: usize,
    /// The number of prompt tokens whose keys and values were found in the cache.
    pub cached_tokens: usize,
    /// The total number of answer tokens.
    pub answer_tokens: usize,
    /// Seconds from the start to the last token.
    pub seconds: f64,
    /// Processor time in seconds, over all threads of this process, if the system reports it.
    pub cpu_seconds: Option<f64>,
    /// The part of it that the client of a server has used, if the client has a thread of its own.
    pub client_cpu_seconds: Option<f64>,
    /// Answer tokens per second.
    pub answer_tokens_per_second: f64,
    /// Prompt and answer tokens per second.
    pub tokens_per_second: f64,
    /// Times from arrival to the first token.
    pub ttft: Times,
    /// Times between successive tokens of an answer.
    pub between_tokens: Times,
    /// Times from arrival to the last token.
    pub whole: Times,
    /// Times to first token in milliseconds, in order of arrival, of the requests that got a token.
    pub ttft_ms: Vec<f64>,
}

impl ClientTally {
    /// Creates a tally of a trace whose prompts all begin with the same number of tokens.
    pub fn new(trace: &[Arrival], prefix_tokens: usize) -> Self {
        let prompt_tokens = trace.iter().map(|arrival| prefix_tokens.saturating_add(arrival.prompt_tokens));
        Self { prompt_tokens: prompt_tokens.fold(0, usize::saturating_add), ..Self::default() }
    }

    /// Returns the number of requests that have ended.
    pub fn ended(&self) -> usize {
        self.whole.len() + self.failed
    }

    /// Returns the report of a trace that took so many seconds. `cpu_seconds` is the processor time from then to now, if
    /// the system reports it.
    pub fn report(self, seconds: f64, cpu_seconds: Option<f64>) -> ClientReport {
        ClientReport {
            requests: self.ended(),
            failed: self.failed,
            shortened: self.shortened,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            answer_tokens: self.answer_tokens,
            seconds,
            cpu_seconds,
            client_cpu_seconds: None,
            answer_tokens_per_second: self.answer_tokens as f64 / seconds,
            tokens_per_second: self.prompt_tokens.saturating_add(self.answer_tokens) as f64 / seconds,
            ttft: Times::of(&self.ttft),
            between_tokens: Times::of(&self.between),
            whole: Times::of(&self.whole),
            ttft_ms: self.ttft.iter().map(|time| time.as_secs_f64() * 1e3).collect(),
            first_failure: self.first_failure,
        }
    }
}

/// Returns this process's processor time in seconds, if the system reports it. Linux counts it in hundredths of a second.
pub fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name, in brackets, may contain spaces.
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_whitespace().skip(11);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) / 100.0)
}

/// Returns the processor time of the calling thread in seconds, if the system reports it.
pub fn thread_cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: f64 = stat.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same_prompts_behind_one_beginning() {
        let arrival = |prompt_tokens| Arrival { at: 0.0, prompt_tokens, answer_tokens: 1 };
        let drawn = |seed| {
            let mut prompts = TrafficPrompts::new(50, 3, seed);
            let drawn = [4, 6].map(|tokens| prompts.draw(&arrival(tokens)));
            assert!(drawn.iter().all(|prompt| prompt.starts_with(prompts.prefix())));
            drawn
        };
        assert_eq!(drawn(1).each_ref().map(Vec::len), [7, 9]);
        assert!(drawn(1).iter().flatten().all(|&token| token < 50));
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_processor_time_of_a_thread_is_its_own() {
        let before = thread_cpu_seconds().unwrap();
        let other = std::thread::spawn(|| {
            let begun = std::time::Instant::now();
            while begun.elapsed() < Duration::from_millis(50) {}
            thread_cpu_seconds().unwrap()
        });
        let (other, own) = (other.join().unwrap(), thread_cpu_seconds().unwrap() - before);
        assert!(own < other, "waiting takes no processor time: {own} s beside {other} s");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn processor_time_grows_with_work() {
        let before = cpu_seconds().unwrap();
        // Reading the file fifty thousand times takes longer than a hundredth of a second, the unit of the
        // count.
        let grown = (0..50_000).any(|_| cpu_seconds().unwrap() > before);
        assert!(grown);
    }
}
