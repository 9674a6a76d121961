//! Beams: the likeliest answers as a whole, found by following the likeliest beginnings side by side.
//!
//! As transformers does it: of the beams' continuations the `2 * width` likeliest are looked at, or more where the model has several end
//! tokens. Those that end are kept, each with the sum of its log-probabilities over its length to the power of `length_penalty`; the
//! `width` likeliest others go on. The search is over when no beam can come before the worst that is kept, or at the token limit.

use std::cmp::Ordering;

use super::answer::AnswerEvent;
use super::live::{Branch, Live};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::request::{FinishReason, Request};
use crate::sample::{Sampler, Sampling};

/// The settings of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSearch {
    /// The number of beginnings that are followed.
    pub width: usize,
    /// Exponent of the length by which the log-probability of an answer is divided: above 0, longer answers come first.
    pub length_penalty: f32,
}

impl Default for BeamSearch {
    /// Returns four beams whose log-probability is taken per token.
    fn default() -> Self {
        Self { width: 4, length_penalty: 1.0 }
    }
}

impl BeamSearch {
    /// Checks that a request leaves its tokens to a beam search.
    ///
    /// # Errors
    /// Returns [`Error::Beams`] for no beam, for fewer beams than answers, for settings of sampling, and for logits that are to be kept.
    pub(super) fn check(&self, request: &Request) -> Result<()> {
        let plain = Sampling { seed: request.sampling.seed, ..Sampling::default() } == request.sampling;
        let reason = match request {
            _ if self.width == 0 => "the width must be at least 1",
            _ if !self.length_penalty.is_finite() => "the length penalty must be a finite number",
            _ if request.samples > self.width => "there are fewer beams than answers to give",
            _ if !plain || !request.logit_bias.is_empty() => {
                "beams take the likeliest tokens: leave temperature, top-k, top-p, min-p, penalties and biases as they are"
            }
            _ if request.logprobs.is_some() || request.keep_logits => {
                "beams keep no logits and log-probabilities of tokens"
            }
            _ => return Ok(()),
        };
        Err(Error::Beams(reason))
    }
}

/// The beams of a request.
#[derive(Debug, Default)]
pub(super) struct Beams {
    /// The sum of log-probabilities of each branch.
    sums: Vec<f32>,
    /// The likeliest continuations of each branch, once its logits are there.
    next: Vec<Option<Vec<(u32, f32)>>>,
    /// Answers that have ended, the best first.
    ended: Vec<Ended>,
}

/// An answer that has ended.
#[derive(Debug)]
struct Ended {
    tokens: Vec<u32>,
    score: f32,
    finish: FinishReason,
}

impl Beams {
    /// Forgets logits that have come, when the sequences behind them are gone.
    pub(super) fn forget(&mut self) {
        self.next.iter_mut().for_each(|next| *next = None);
    }

    fn add(&mut self, ended: Ended, width: usize) {
        let at = self.ended.partition_point(|known| known.score >= ended.score);
        self.ended.insert(at, ended);
        self.ended.truncate(width);
    }

    /// Returns whether no answer of `length` tokens or more, whose sum is at most `best`, comes before the worst that is kept.
    fn is_done(&self, best: f32, length: usize, search: BeamSearch) -> bool {
        self.ended.len() >= search.width
            && self.ended.last().is_some_and(|worst| worst.score >= score(best, length, search))
    }
}

fn score(sum: f32, length: usize, search: BeamSearch) -> f32 {
    sum / (length.max(1) as f32).powf(search.length_penalty)
}

impl Engine {
    /// Takes the logits behind a branch. When those of all branches are there, the beams go on.
    pub(super) fn follow(&mut self, live: &mut Live, branch: usize, logits: &[f32]) -> Result<()> {
        let (search, count) = (live.request.beams.unwrap_or_default(), live.branches.len());
        let beams = live.beams.get_or_insert_with(Box::default);
        beams.sums.resize(count, 0.0);
        beams.next.resize(count, None);
        beams.next[branch] = Some(likeliest(logits, self.looked_at(search)));
        live.branches[branch].ttft.get_or_insert_with(|| live.submitted.elapsed());
        if live.request.max_new_tokens == 0 {
            let nothing = || Ended { tokens: Vec::new(), score: 0.0, finish: FinishReason::Length };
            let ended = std::iter::repeat_with(nothing).take(live.request.samples).collect();
            self.answer_with(live, ended);
            return Ok(());
        }
        if beams.next.iter().all(Option::is_some) { self.go_on(live, search) } else { Ok(()) }
    }

    /// Returns the number of continuations that are looked at: enough that `width` go on if each beam can end in each way.
    fn looked_at(&self, search: BeamSearch) -> usize {
        (1 + self.model.config().eos.len()).max(2) * search.width
    }

    /// Chooses the next token of every beam.
    fn go_on(&mut self, live: &mut Live, search: BeamSearch) -> Result<()> {
        let Some(mut beams) = live.beams.take() else { return Ok(()) };
        let mut all: Vec<(usize, u32, f32)> = Vec::new();
        for (branch, next) in beams.next.iter_mut().enumerate() {
            let sum = beams.sums[branch];
            all.extend(
                next.take().unwrap_or_default().into_iter().map(|(token, p)| (branch, token, sum + p)),
            );
        }
        all.sort_by(|a, b| b.2.total_cmp(&a.2));
        all.truncate(self.looked_at(search));
        let length = live.branches[0].answer().len() + 1;
        let mut on = Vec::with_capacity(search.width);
        for (rank, (branch, token, sum)) in all.into_iter().enumerate() {
            if !live.request.ignore_end && self.model.config().eos.contains(&token) {
                if rank < search.width {
                    let tokens = live.branches[branch].answer().to_vec();
                    let ended =
                        Ended { tokens, score: score(sum, length, search), finish: FinishReason::Stop };
                    beams.add(ended, search.width);
                }
            } else if on.len() < search.width {
                on.push((branch, token, sum));
            }
        }
        let best = on.first().map_or(f32::NEG_INFINITY, |&(.., sum)| sum);
        let it = &live.branches[0];
        let last = length == live.request.max_new_tokens
            || it.start.position + it.tokens.len() as i64 + 1 > self.longest() as i64;
        if last || beams.is_done(best, length, search) {
            if last {
                for (branch, token, sum) in on {
                    let mut tokens = live.branches[branch].answer().to_vec();
                    tokens.push(token);
                    let ended =
                        Ended { tokens, score: score(sum, length, search), finish: FinishReason::Length };
                    beams.add(ended, search.width);
                }
            }
            self.answer_with(live, beams.ended);
            return Ok(());
        }
        self.branch_out(live, &on)?;
        beams.sums = on.iter().map(|&(.., sum)| sum).collect();
        beams.next = vec![None; on.len()];
        live.beams = Some(beams);
        Ok(())
    }

    /// Makes each beam a branch of its own: the first of a branch goes on in its sequence, the others in forks.
    fn branch_out(&mut self, live: &mut Live, on: &[(usize, u32, f32)]) -> Result<()> {
        let (mut forks, mut made) = (Vec::with_capacity(on.len()), Vec::new());
        for (i, &(branch, ..)) in on.iter().enumerate() {
            let again = on[..i].iter().any(|&(other, ..)| other == branch);
            let own = live.branches[branch].own;
            forks.push(match own {
                Some(own) if again => match self.caches.fork(own) {
                    Ok(fork) => {
                        made.extend(fork);
                        fork
                    }
                    Err(error) => {
                        for fork in made {
                            drop(self.caches.free(fork));
                        }
                        return Err(error);
                    }
                },
                _ => own,
            });
        }
        let old = std::mem::take(&mut live.branches);
        for (i, branch) in old.iter().enumerate().filter(|(i, _)| !on.iter().any(|(on, ..)| on == i)) {
            if let Some(own) = old[i].own {
                drop(self.caches.free(own));
            }
            debug_assert!(!branch.over, "a beam ends with all others");
        }
        for (&(branch, token, _), own) in on.iter().zip(forks) {
            let from = &old[branch];
            let mut beam = from.twin(own);
            beam.tokens.push(token);
            live.branches.push(beam);
        }
        Ok(())
    }

    /// Gives the best answers, each as a sample.
    fn answer_with(&mut self, live: &mut Live, ended: Vec<Ended>) {
        let mut old = std::mem::take(&mut live.branches);
        for (sample, ended) in ended.into_iter().take(live.request.samples).enumerate() {
            let mut beam = old[0].twin(None);
            beam.sample = sample;
            beam.tokens.truncate(beam.prompt);
            beam.tokens.extend_from_slice(&ended.tokens);
            beam.score = Some(ended.score);
            for &token in &ended.tokens {
                live.sender.send(AnswerEvent::Token { sample, token, logprobs: None });
            }
            live.branches.push(beam);
            live.end(sample, ended.finish);
        }
        for branch in &mut old {
            self.withdraw_branch(branch);
        }
    }
}

impl Branch {
    /// Returns a branch with the same tokens in the sequence `own`.
    fn twin(&self, own: Option<kvcore::SequenceId>) -> Self {
        Self {
            own,
            start: self.start,
            prompt: self.prompt,
            computed: self.computed,
            keys: self.keys.clone(),
            ttft: self.ttft,
            ..Self::new(self.tokens.clone(), Sampler::new(Sampling::default()))
        }
    }
}

/// Returns the likeliest tokens with their log-probabilities, the likeliest first.
fn likeliest(logits: &[f32], most: usize) -> Vec<(u32, f32)> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let whole = f64::from(largest) + logits.iter().map(|x| f64::from(x - largest).exp()).sum::<f64>().ln();
    let descending = |a: &(u32, f32), b: &(u32, f32)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let most = most.min(all.len());
    if most < all.len() && most > 0 {
        all.select_nth_unstable_by(most - 1, descending);
    }
    all.truncate(most);
    all.sort_unstable_by(descending);
    all.into_iter().map(|(token, logit)| (token, (f64::from(logit) - whole) as f32)).collect()
}
