//! Admission: starts or restores waiting requests, and allocates slots for the first tokens that each of them
//! computes.

use std::sync::Arc;

use kvcore::{Logits, SequenceInput, SequenceStart, WriteSlots};

use super::disk::DiskFetch;
use super::feed::Feed;
use super::known::KnownPrefixes;
use super::live::{LiveRequest, ServiceRank};
use super::scheduler::Scheduler;
use crate::error::{Error, Result};
use crate::prompt::behind;
use crate::runner::Runner;

impl Scheduler {
    /// Admits the first waiting request if there is room for its first piece of up to `most` tokens. Returns
    /// the request's rank and the number of tokens that it adds to the pass, or `None` if nothing was
    /// admitted. A request that fails is answered with its error.
    pub(super) fn admit(&mut self, runner: &mut Runner, most: usize) -> Option<(ServiceRank, usize)> {
        let answers: usize = self.running.iter().map(|live| live.request.width()).sum();
        loop {
            // A request that loads from a disk does not hold up the others.
            let (&rank, live) = self.waiting.iter().find(|(_, live)| !live.is_loading(runner))?;
            let alone = self.running.is_empty();
            if !alone
                && (answers + live.request.width() > self.limits.running
                    || !live.has_room(runner, most, self.limits.watermark))
            {
                return None;
            }
            let live = self.moving.insert(self.waiting.remove(&rank)?);
            match live.begin(runner, &self.known, most, alone) {
                Ok(fed) => {
                    live.queued.get_or_insert(live.submitted.elapsed());
                    let live = self.moving.take()?;
                    let at = self.running.partition_point(|other| other.rank() < rank);
                    self.running.insert(at, live);
                    let tokens = fed.as_ref().map_or(0, |(_, input)| input.tokens.len());
                    self.plan.feeds.extend(fed.map(|(branch, input)| Feed {
                        rank,
                        branch: Some(branch),
                        tokens,
                        input: Some(input),
                    }));
                    return Some((rank, tokens));
                }
                Err(error) if error.is_out_of_blocks() && !alone => {
                    if live.branches.iter().all(|branch| branch.swapped.is_none()) {
                        live.withdraw(runner);
                    }
                    live.refused = Some(runner.caches.sequences.available());
                    self.waiting.extend(self.moving.take().map(|live| (rank, live)));
                    return None;
                }
                Err(error) => {
                    let kept = live.end_outgrown(runner, &error);
                    live.withdraw(runner);
                    if let Some(live) = self.moving.take().filter(|_| !kept) {
                        live.sender.fail(error);
                    }
                }
            }
        }
    }
}

impl LiveRequest {
    /// Returns true if the request should be admitted now: if every pool has room above the watermark for the
    /// request's first piece, or if its prompt may be cached. In the latter case, only
    /// [`admit`](kvcore::PagedKvCache::admit) can check whether there is room. A chunked prompt that found no
    /// room before is not tried again until more blocks are available.
    fn has_room(&self, runner: &Runner, most: usize, watermark: usize) -> bool {
        let sequences = &runner.caches.sequences;
        if let Some(fixed) = sequences.first().as_static() {
            return sequences.first().num_sequences() < fixed.max_batch();
        }
        // Documents that found no room are looked up again only when there is more room.
        if self.prompt.is_chunked() && self.refused.is_some_and(|had| sequences.available() <= had) {
            return false;
        }
        let first = self.branches.first().map_or(0, |branch| branch.tokens.len().min(most));
        let blocks = first.div_ceil(sequences.block_size());
        self.finds_prefix() || sequences.available() >= blocks + watermark
    }

    /// Returns true if the prompt is looked up when its sequence is created.
    pub(super) fn finds_prefix(&self) -> bool {
        !self.prompt.is_chunked() && self.request.reuse && self.request.forced.is_none()
    }

    /// Restores the request from host memory, or starts it: looks up its documents, or allocates the blocks
    /// for the first piece of its prompt, of up to `most` tokens. Returns the index of the branch and the
    /// piece, if there is one. Unless `alone` is true, the watermark's blocks stay free for running requests.
    fn begin(
        &mut self,
        runner: &mut Runner,
        known: &KnownPrefixes,
        most: usize,
        alone: bool,
    ) -> Result<Option<(usize, SequenceInput)>> {
        if self.swap_in(runner, alone)? {
            return Ok(None);
        }
        if self.prompt.is_chunked() {
            let fetched = if let DiskFetch::Running(fetch) = &self.fetch { Some(&**fetch) } else { None };
            self.prompt.look_up(runner, &self.request, fetched)?;
            self.note_missed(runner, known);
            self.fetch.finish();
            return Ok(None);
        }
        let _held = self.put_prefix(runner)?;
        self.note_missed(runner, known);
        let piece = self.begin_ordinary(runner, most, alone)?;
        self.fetch.finish();
        Ok(piece)
    }

    /// Allocates the blocks for the first piece of an ordinary prompt, of up to `most` tokens.
    fn begin_ordinary(
        &mut self,
        runner: &mut Runner,
        most: usize,
        alone: bool,
    ) -> Result<Option<(usize, SequenceInput)>> {
        // If all samples have ended, there is nothing to compute.
        let Some(branch) = self.unfed() else { return Ok(None) };
        if alone || !self.finds_prefix() {
            return Ok(Some((branch, self.first_piece(runner, branch, most)?)));
        }
        let slots = self.admit_branch(runner, branch, most)?;
        let mut input = self.input(runner, branch, slots[0].len())?;
        input.set_slots(slots);
        Ok(Some((branch, input)))
    }

    /// Allocates slots for the next piece of a sample's sequence, of up to `most` tokens, and returns the
    /// piece.
    pub(super) fn first_piece(
        &mut self,
        runner: &mut Runner,
        branch: usize,
        most: usize,
    ) -> Result<SequenceInput> {
        let tokens = self.take_next(runner, branch, most)?;
        let Some(sequence) = self.branches[branch].sequence else { return Err(Error::EmptyPrompt) };
        let slots = runner.caches.sequences.grow(sequence, tokens)?;
        let mut input = self.input(runner, branch, tokens)?;
        input.set_slots(slots);
        Ok(input)
    }

    /// Assigns up to `most` of a sample's next tokens to the pass being planned. Returns the number of these
    /// tokens.
    pub(super) fn take_next(&mut self, runner: &mut Runner, branch: usize, most: usize) -> Result<usize> {
        self.begin_branch(runner, branch)?;
        let forced = self.request.forced.is_some();
        let branch = &mut self.branches[branch];
        let before = branch.computed;
        let mut end = branch.tokens.len().min(before + most);
        if forced && before < branch.prompt {
            end = end.min(branch.prompt);
        }
        branch.computed = end;
        Ok(end - before)
    }

    // Decision: docs/decisions/models.md#nothing-is-kept-before-logits-behind-it-were-numbers
    /// Returns an input without slots for the last `tokens` tokens that were assigned to a sample. The input
    /// requests logits if these are the sample's last tokens, or if others may find the tokens.
    pub(super) fn input(&mut self, runner: &Runner, branch: usize, tokens: usize) -> Result<SequenceInput> {
        let forced = self.request.forced.is_some();
        let is_found = self.branches[branch].left() > 0 && self.prompt.sequence_root(&self.request).is_some();
        let branch = &mut self.branches[branch];
        let Some(sequence) = branch.sequence else { return Err(Error::EmptyPrompt) };
        let segment = behind(branch.start, runner.caches.sequences.first().segment(sequence)?);
        let start = SequenceStart { logical: segment.logical_start, position: segment.stored_start };
        let (before, chosen) = (segment.len - tokens, tokens - branch.draft.len());
        let fresh = &branch.tokens[branch.computed - chosen..branch.computed];
        let mut input = if let Some(mut input) = branch.input.take().filter(|_| tokens == 1) {
            input.slots = WriteSlots::default();
            input.logical_start = start.logical + before;
            input.position_start = start.position + before as i64;
            input.tokens.clear();
            input.tokens.extend_from_slice(fresh);
            // No pass holds the list between two tokens, so it can be changed in place.
            if let Some(last) = Arc::make_mut(&mut input.segments).last_mut() {
                *last = segment;
            }
            input
        } else {
            let context = self.prompt.context();
            let mut input = context.input(start, before, fresh, WriteSlots::default(), segment);
            input.tokens.extend_from_slice(&branch.draft);
            input
        };
        runner.caches.sequences.set_others(sequence, &mut input)?;
        if !branch.draft.is_empty() {
            return Ok(input.with_logits(Logits::All));
        }
        Ok(input.with_logits(match branch.computed {
            end if forced && end > branch.prompt => Logits::All,
            end if end == branch.tokens.len() || is_found => Logits::Last,
            _ => Logits::None,
        }))
    }
}
