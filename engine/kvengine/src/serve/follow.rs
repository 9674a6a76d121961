//! Beam search: finds the likeliest whole answers by following the likeliest beginnings in parallel.
//!
//! The search works like the one in transformers. Of the continuations of all beams, the `2 * width`
//! likeliest are considered, or more if the model has several end tokens. Continuations that end an answer
//! are kept, with a score: the sum of the log-probabilities, divided by the length raised to the power of
//! `length_penalty`. The `width` likeliest other continuations become the next beams. The search ends when no
//! beam can replace a kept answer, or at the token limit.

use super::answer::AnswerEvent;
use super::beams::{Continuation, EndedBeam, score};
use super::live::LiveRequest;
use crate::error::Result;
use crate::request::{BeamSearch, FinishReason, Sampling};
use crate::runner::Runner;
use crate::sampling::{Sampler, likeliest};

/// Returns the number of continuations to consider. It is large enough for `width` beams to continue even if
/// each beam can end with each end token.
fn considered(runner: &Runner, search: BeamSearch) -> usize {
    (1 + runner.model.config().eos.len()).max(2) * search.width
}

impl LiveRequest {
    /// Records the logits after a branch's last token. Once the logits of all branches are known, chooses the
    /// next beams.
    pub(super) fn follow(&mut self, runner: &mut Runner, branch: usize, logits: &[f32]) -> Result<()> {
        let (search, count) = (self.request.beams.unwrap_or_default(), self.branches.len());
        let beams = self.beams.get_or_insert_default();
        beams.sums.resize(count, 0.0);
        beams.next.resize(count, None);
        beams.next[branch] = Some(likeliest(logits, considered(runner, search)));
        let complete = beams.next.iter().all(Option::is_some);
        self.branches[branch].ttft.get_or_insert_with(|| self.submitted.elapsed());
        if self.request.max_new_tokens == 0 {
            let empty = || EndedBeam { tokens: Vec::new(), score: 0.0, finish: FinishReason::Length };
            let ended = std::iter::repeat_with(empty).take(self.request.samples).collect();
            self.end_beams(runner, ended);
            return Ok(());
        }
        if complete { self.choose_beams(runner, search) } else { Ok(()) }
    }

    /// Chooses the next token of every beam.
    fn choose_beams(&mut self, runner: &mut Runner, search: BeamSearch) -> Result<()> {
        let Some(beams) = &mut self.beams else { return Ok(()) };
        let length = self.branches[0].answer().len() + 1;
        let ended = |next: &Continuation, last: Option<u32>, finish| {
            let tokens = self.branches[next.branch].answer().iter().copied().chain(last).collect();
            EndedBeam { tokens, score: score(next.sum, length, search), finish }
        };
        let mut on: Vec<Continuation> = Vec::with_capacity(search.width);
        for (rank, next) in beams.take_continuations(considered(runner, search)).into_iter().enumerate() {
            if !self.request.ignore_end && runner.model.config().eos.contains(&next.token) {
                if rank < search.width {
                    beams.add(ended(&next, None, FinishReason::Stop), search.width);
                }
            } else if on.len() < search.width {
                on.push(next);
            }
        }
        let best = on.first().map_or(f32::NEG_INFINITY, |next| next.sum);
        let last =
            length == self.request.max_new_tokens || self.branches[0].end() + 1 > runner.longest() as i64;
        if last {
            for next in &on {
                beams.add(ended(next, Some(next.token), FinishReason::Length), search.width);
            }
        }
        if last || beams.is_done(best, length, search) {
            let ended = std::mem::take(&mut beams.ended);
            self.beams = None;
            self.end_beams(runner, ended);
            return Ok(());
        }
        beams.sums = on.iter().map(|next| next.sum).collect();
        beams.next = vec![None; on.len()];
        self.branch_out(runner, &on)
    }

    /// Ends the search with the answers that are complete and the beams so far.
    pub(super) fn cut_beams(&mut self, runner: &mut Runner) {
        let (search, mut beams) =
            (self.request.beams.unwrap_or_default(), self.beams.take().unwrap_or_default());
        let sums = std::mem::take(&mut beams.sums);
        for (branch, sum) in self.branches.iter().zip(sums) {
            let tokens = branch.answer().to_vec();
            let score = score(sum, tokens.len(), search);
            beams.add(EndedBeam { tokens, score, finish: FinishReason::Length }, search.width);
        }
        self.end_beams(runner, beams.ended);
    }

    /// Turns each continuation into a branch. The first continuation of an old branch keeps that branch's
    /// sequence; the branch's other continuations get forks of the sequence.
    fn branch_out(&mut self, runner: &mut Runner, on: &[Continuation]) -> Result<()> {
        let (mut sequences, mut forks) = (Vec::with_capacity(on.len()), Vec::new());
        for (i, next) in on.iter().enumerate() {
            let again = on[..i].iter().any(|other| other.branch == next.branch);
            let sequence = self.branches[next.branch].sequence;
            sequences.push(match sequence {
                Some(sequence) if again => match runner.caches.sequences.grouped()?.fork(sequence) {
                    Ok(fork) => {
                        forks.push(fork);
                        Some(fork)
                    }
                    Err(error) => {
                        for fork in forks {
                            drop(runner.caches.sequences.free(fork));
                        }
                        return Err(error.into());
                    }
                },
                _ => sequence,
            });
        }
        let old = std::mem::take(&mut self.branches);
        for (i, branch) in old.iter().enumerate().filter(|(i, _)| !on.iter().any(|next| next.branch == *i)) {
            if let Some(sequence) = old[i].sequence {
                drop(runner.caches.sequences.free(sequence));
            }
            debug_assert!(!branch.over, "a beam ends with all others");
        }
        for (next, sequence) in on.iter().zip(sequences) {
            let mut beam = old[next.branch].twin(sequence, Sampler::new(Sampling::default()));
            beam.tokens.push(next.token);
            self.branches.push(beam);
        }
        Ok(())
    }

    /// Sends the best answers as samples, and ends the request.
    fn end_beams(&mut self, runner: &mut Runner, ended: Vec<EndedBeam>) {
        let mut old = std::mem::take(&mut self.branches);
        for (sample, ended) in ended.into_iter().take(self.request.samples).enumerate() {
            let mut beam = old[0].twin(None, Sampler::new(Sampling::default()));
            beam.sample = sample;
            beam.tokens.truncate(beam.prompt);
            beam.tokens.extend_from_slice(&ended.tokens);
            beam.score = Some(ended.score);
            for &token in &ended.tokens {
                self.sender.send(AnswerEvent::Token { sample, token, logprobs: None });
            }
            self.branches.push(beam);
            self.end(sample, ended.finish);
        }
        for branch in &mut old {
            branch.withdraw(runner);
        }
    }
}
