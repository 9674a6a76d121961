//! The samples of a request: their sequences, and the tokens that are chosen for them.

use std::ops::Range;

use kvcore::{SequenceInput, WriteSlots};
use kvmodel::LogitRows;

use super::answer::AnswerEvent;
use super::live::{Branch, Live, Parts};
use super::parts;
use super::plan::Feed;
use crate::engine::Engine;
use crate::error::Result;
use crate::generate::Context;
use crate::logprobs::TokenLogprobs;
use crate::request::FinishReason;
use crate::sample::{Sampler, Sampling};

impl Engine {
    /// Gives a branch a sequence, with what is cached of its tokens.
    pub(super) fn begin_branch(&mut self, live: &mut Live, branch: usize) -> Result<()> {
        let plain = parts::chunked(live).is_none();
        let (root, caches) = (*live.keys.root(), &mut self.caches);
        let it = &mut live.branches[branch];
        if it.own.is_some() {
            return Ok(());
        }
        let (own, cached) = if plain && live.request.reuse {
            let block_size = caches.block_size();
            caches.create_with_prefix(it.prompt_keys(root, block_size))?
        } else {
            (caches.create(it.start)?, 0)
        };
        live.begun(branch, own, cached);
        Ok(())
    }

    /// Gives a branch of an ordinary request a sequence, with what is cached of its tokens, and slots for up to `most` of the
    /// others, or nothing.
    pub(super) fn admit_branch(
        &mut self,
        live: &mut Live,
        branch: usize,
        most: usize,
    ) -> Result<Vec<WriteSlots>> {
        let root = *live.keys.root();
        let keys = live.branches[branch].prompt_keys(root, self.caches.block_size());
        let (own, cached, slots) = self.caches.admit(keys, most)?;
        live.begun(branch, own, cached);
        live.branches[branch].computed += slots[0].len();
        Ok(slots)
    }

    /// Takes a request's blocks away. Its tokens stay.
    pub(super) fn withdraw(&mut self, live: &mut Live) {
        for branch in &mut live.branches {
            self.withdraw_branch(branch);
        }
        (live.parts, live.context) = (Parts::None, Context::default());
        if let Some(beams) = &mut live.beams {
            beams.forget();
        }
    }

    /// Takes a sample's blocks away.
    pub(super) fn withdraw_branch(&mut self, branch: &mut Branch) {
        if let Some(own) = branch.own.take() {
            // The sequence is known: nobody else frees it.
            drop(self.caches.free(own));
        }
        branch.forget();
    }

    /// Takes note of what a pass has computed of a request, and chooses the next token if there are logits.
    pub(super) fn after(
        &mut self,
        live: &mut Live,
        feed: &Feed,
        input: SequenceInput,
        logits: Option<(&LogitRows, Range<usize>)>,
    ) -> Result<()> {
        let Some(branch) = feed.branch else {
            live.parts.add_done(feed.tokens);
            return Ok(());
        };
        if matches!(live.parts, Parts::Missing { .. }) {
            // The documents came in the same pass. Their segments are the stored ones from here on.
            self.advance_parts(live)?;
        }
        let it = &mut live.branches[branch];
        if let Some((rows, range)) = logits.clone().filter(|_| !it.draft.is_empty()) {
            return self.verify(live, branch, rows, range);
        }
        if let Some(own) = it.own {
            self.caches.commit(own, &input.tokens)?;
        }
        it.input = Some(input).filter(|input| input.tokens.len() == 1);
        self.let_go_behind(&live.branches[branch])?;
        let it = &live.branches[branch];
        let Some((rows, range)) = logits else { return Ok(()) };
        if it.given.is_some() {
            for logits in range.filter_map(|row| rows.row(row)) {
                live.note_given(branch, logits);
            }
            if live.branches[branch].left() == 0 {
                live.end_given(branch);
            }
            return Ok(());
        }
        match rows.row(range.start) {
            Some(logits) if live.request.beams.is_some() => self.follow(live, branch, logits),
            Some(logits) if it.answer().is_empty() => self.first_of(live, logits),
            Some(logits) => {
                self.choose(live, branch, logits);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Lets go of what lies behind the window of all layers, or of all of a group, for the next token of a sample.
    pub(super) fn let_go_behind(&mut self, branch: &Branch) -> Result<()> {
        branch.own.map_or(Ok(()), |own| self.caches.let_go(own, branch.computed))
    }

    /// Begins the answer, from the logits behind the prompt.
    pub(super) fn first_of(&mut self, live: &mut Live, logits: &[f32]) -> Result<()> {
        if let Some((retention, own)) = live.request.retention.zip(live.branches[0].own) {
            self.caches.retain(own, retention)?;
        }
        if live.request.beams.is_some() {
            return self.follow(live, 0, logits);
        }
        if live.request.forced.is_none() || live.request.max_new_tokens == 0 {
            return self.fork(live, logits);
        }
        let longest = self.longest();
        live.give(longest, logits);
        Ok(())
    }

    /// Chooses the next token of a branch from its logits, and ends the branch if it is the last.
    pub(super) fn choose(&self, live: &mut Live, branch: usize, logits: &[f32]) {
        let longest = self.longest() as i64;
        let it = &mut live.branches[branch];
        if live.request.max_new_tokens == 0 {
            live.end(branch, FinishReason::Length);
            return;
        }
        let token = it.sampler.sample(logits);
        it.ttft.get_or_insert_with(|| live.submitted.elapsed());
        if live.request.keep_logits {
            it.logits.push(logits.to_vec());
        }
        if !live.request.ignore_end && self.model.config().eos.contains(&token) {
            live.end(branch, FinishReason::Stop);
            return;
        }
        it.tokens.push(token);
        it.sampler.chose(token);
        let logprobs = live.request.logprobs.map(|most| TokenLogprobs::of(logits, token, most));
        it.logprobs.extend(logprobs.clone());
        let logprobs = logprobs.map(Box::new);
        live.sender.send(AnswerEvent::Token { sample: it.sample, token, logprobs });
        let next = it.start.position + it.tokens.len() as i64;
        if it.answer().len() == live.request.max_new_tokens || next > longest {
            live.end(branch, FinishReason::Length);
        }
    }

    /// Chooses the first token of every sample from the logits behind the prompt. The samples share the prompt's blocks.
    fn fork(&mut self, live: &mut Live, logits: &[f32]) -> Result<()> {
        for sample in 1..live.request.samples {
            let Some(own) = live.branches[0].own else { break };
            let Some(twin) = self.caches.fork(own)? else { break };
            let sampling = live.request.sampling;
            let seed = sampling.seed.wrapping_add(sample as u64);
            let bias = live.request.logit_bias.clone();
            let mut sampler = Sampler::new(Sampling { seed, ..sampling }).with_bias(bias);
            sampler.see(live.request.prompt.iter());
            let first = &live.branches[0];
            let branch = Branch {
                sample,
                own: Some(twin),
                start: first.start,
                prompt: first.prompt,
                computed: first.computed,
                keys: first.keys.clone(),
                ..Branch::new(first.tokens.clone(), sampler)
            };
            live.branches.push(branch);
        }
        for branch in 0..live.branches.len() {
            self.choose(live, branch, logits);
        }
        Ok(())
    }
}
