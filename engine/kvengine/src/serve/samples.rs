//! Manages the samples of a request: creates and frees their sequences, and chooses their tokens.

use std::ops::Range;

use kvcore::{SequenceInput, SequenceStart, WriteSlots};
use kvmodel::LogitRows;

use super::answer::AnswerEvent;
use super::constrained::{forked, next_tokens};
use super::feed::Feed;
use super::live::{Branch, LiveRequest};
use super::numbers::are_numbers;
use crate::constraint::NextTokens;
use crate::error::{Error, Result};
use crate::request::{FinishReason, Sampling};
use crate::runner::Runner;
use crate::sampling::{Sampler, token_logprobs};

impl Branch {
    /// Frees the sample's sequence, and marks its tokens as not computed.
    pub(super) fn withdraw(&mut self, runner: &mut Runner) {
        if let Some(sequence) = self.sequence.take() {
            // This cannot fail, because nothing else frees the sequence.
            drop(runner.caches.sequences.free(sequence));
        }
        self.forget();
    }

    /// Frees the blocks that none of the sample's later tokens will attend to, in each group of layers with a
    /// window.
    pub(super) fn free_before_window(&self, runner: &mut Runner) -> Result<()> {
        self.sequence.map_or(Ok(()), |sequence| runner.caches.sequences.free_before(sequence, self.computed))
    }
}

impl LiveRequest {
    /// Creates a branch's sequence, if it has none, with the cached part of its tokens.
    pub(super) fn begin_branch(&mut self, runner: &mut Runner, branch: usize) -> Result<()> {
        if self.branches[branch].sequence.is_some() {
            return Ok(());
        }
        let (root, caches) = (self.prompt.sequence_root(&self.request), &mut runner.caches);
        let it = &mut self.branches[branch];
        let (sequence, cached) = if let Some(root) = root {
            let block_size = caches.sequences.block_size();
            caches.sequences.create_with_prefix(it.prompt_keys(root, block_size))?
        } else {
            (caches.sequences.create(SequenceStart::default())?, 0)
        };
        self.begun(branch, sequence, cached);
        Ok(())
    }

    /// Creates the sequence of an ordinary request's branch, with the cached part of its tokens and slots for
    /// up to `most` more tokens. Changes nothing on failure.
    pub(super) fn admit_branch(
        &mut self,
        runner: &mut Runner,
        branch: usize,
        most: usize,
    ) -> Result<Vec<WriteSlots>> {
        let root = *self.prompt.keys().root();
        let keys = self.branches[branch].prompt_keys(root, runner.caches.sequences.block_size());
        let (sequence, cached, slots) = runner.caches.sequences.admit(keys, most)?;
        self.begun(branch, sequence, cached);
        self.branches[branch].computed += slots[0].len();
        Ok(slots)
    }

    /// Frees all of the request's blocks. The request's tokens are kept.
    pub(super) fn withdraw(&mut self, runner: &mut Runner) {
        for branch in &mut self.branches {
            branch.withdraw(runner);
        }
        self.prompt.withdraw(runner);
        if let Some(beams) = &mut self.beams {
            beams.forget();
        }
    }

    /// Records the tokens that a pass has computed for this request. If there are logits after the last one, chooses the
    /// next token.
    pub(super) fn after(
        &mut self,
        runner: &mut Runner,
        feed: &Feed,
        input: SequenceInput,
        logits: Option<(&LogitRows, Range<usize>)>,
    ) -> Result<()> {
        let Some(branch) = feed.branch else {
            self.prompt.add_done(feed.tokens);
            return Ok(());
        };
        if self.prompt.is_missing() {
            // The documents were computed in the same pass. Later passes use the documents' stored segments.
            self.prompt.advance(runner, &self.request)?;
        }
        let it = &mut self.branches[branch];
        if let Some((rows, range)) = logits.clone().filter(|_| !it.draft.is_empty()) {
            return self.verify(runner, branch, rows, range);
        }
        if let Some(sequence) = it.sequence {
            runner.caches.sequences.commit(sequence, &input.tokens)?;
        }
        it.input = Some(input).filter(|input| input.tokens.len() == 1);
        it.free_before_window(runner)?;
        // Within a prompt, logits only show that what was computed are numbers.
        let is_within = it.left() > 0 && (it.forced.is_none() || it.computed <= it.prompt);
        let Some((rows, range)) = logits.filter(|_| !is_within) else { return Ok(()) };
        if it.forced.is_some() {
            for logits in range.filter_map(|row| rows.row(row)) {
                self.record_forced(branch, logits);
            }
            if self.branches[branch].left() == 0 {
                self.end_forced(branch);
            }
            return Ok(());
        }
        match rows.row(range.start) {
            Some(logits) if self.request.beams.is_some() => self.follow(runner, branch, logits),
            Some(logits) => self.take_logits(runner, branch, logits),
            None => Ok(()),
        }
    }

    /// Adopts the question's sequence, which a blend has computed, and starts the answer from `logits`, the
    /// logits after the question.
    pub(super) fn take_blended(&mut self, runner: &mut Runner, logits: &[f32]) -> Result<()> {
        if !are_numbers(logits) {
            return Err(Error::NotNumbers { layer: None });
        }
        let question = self.prompt.take_question();
        let branch = &mut self.branches[0];
        (branch.sequence, branch.computed) = (question, branch.prompt);
        if branch.over || branch.left() > 0 {
            return Ok(());
        }
        self.take_logits(runner, 0, logits)
    }

    /// Starts the answer from the logits after the prompt.
    pub(super) fn begin_answer(&mut self, runner: &mut Runner, logits: &[f32]) -> Result<()> {
        if let Some((retention, sequence)) = self.request.retention.zip(self.branches[0].sequence) {
            runner.caches.sequences.retain(sequence, retention)?;
        }
        if self.request.beams.is_some() {
            return self.follow(runner, 0, logits);
        }
        if self.request.forced.is_none() || self.request.max_new_tokens == 0 {
            return self.fork(runner, logits);
        }
        self.force(runner.longest(), logits);
        Ok(())
    }

    /// Chooses a branch's next token from its logits, and ends the branch if this token is the last. If the request
    /// has a constraint, the tokens that may follow must be known.
    ///
    /// # Errors
    /// Returns [`Error::Constraint`] if none of the tokens that may follow can be chosen.
    pub(super) fn choose(&mut self, runner: &Runner, branch: usize, logits: &[f32]) -> Result<()> {
        if self.request.max_new_tokens == 0 {
            self.end(branch, FinishReason::Length);
            return Ok(());
        }
        let it = &mut self.branches[branch];
        let token = match it.constraint.as_ref().map(next_tokens).transpose()? {
            None => it.sampler.sample(logits),
            Some(NextTokens::OneOf(mask)) => it.sampler.sample_among(logits, mask).ok_or_else(|| {
                let reason = "logit_bias excludes every token that may follow; leave some of them";
                Error::Constraint(reason.to_owned())
            })?,
            Some(NextTokens::Complete) => {
                it.ttft.get_or_insert_with(|| self.submitted.elapsed());
                self.end(branch, FinishReason::Stop);
                return Ok(());
            }
        };
        it.ttft.get_or_insert_with(|| self.submitted.elapsed());
        if self.request.keep_logits {
            it.logits.push(logits.to_vec());
        }
        if !self.request.ignore_end && runner.model.config().eos.contains(&token) {
            self.end(branch, FinishReason::Stop);
            return Ok(());
        }
        it.tokens.push(token);
        it.sampler.chose(token);
        if let Some(constraint) = &mut it.constraint {
            constraint.advance(token);
        }
        let logprobs = self.request.logprobs.map(|most| token_logprobs(logits, token, most));
        it.logprobs.extend(logprobs.clone());
        let logprobs = logprobs.map(Box::new);
        self.sender.send(AnswerEvent::Token { sample: it.sample, token, logprobs });
        if it.answer().len() == self.request.max_new_tokens || it.end() > runner.longest() as i64 {
            self.end(branch, FinishReason::Length);
        }
        Ok(())
    }

    /// Chooses the first token of every sample from the logits after the prompt. The samples share the
    /// prompt's blocks.
    fn fork(&mut self, runner: &mut Runner, logits: &[f32]) -> Result<()> {
        for sample in 1..self.request.samples {
            let first = &self.branches[0];
            let Some(sequence) = first.sequence else { break };
            let constraint = first.constraint.as_ref().map(forked).transpose()?;
            let twin = runner.caches.sequences.grouped()?.fork(sequence)?;
            let sampling = self.request.sampling;
            let seed = sampling.seed.wrapping_add(sample as u64);
            let bias = self.request.logit_bias.clone();
            let mut sampler = Sampler::new(Sampling { seed, ..sampling }).with_bias(bias);
            sampler.see(self.request.prompt.iter());
            let branch = Branch { sample, constraint, ..first.twin(Some(twin), sampler) };
            self.branches.push(branch);
        }
        (0..self.branches.len()).try_for_each(|branch| self.choose(runner, branch, logits))
    }
}
