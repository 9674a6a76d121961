//! The choice of what a step computes.
//!
//! Who runs is served first: what is to be computed is chosen, and slots are taken for all of it at once; where there are too few
//! blocks, the last in the order of service gives way, and the rest is tried again. What is left of the step's tokens goes to new
//! requests.

use std::sync::Arc;

use kvcore::{Logits, PagedKvCache, SequenceId, SequenceInput, SequenceStart, WriteSlots};

use super::live::Live;
use super::parts::chunked;
use super::{Rank, Scheduler, Watch};
use crate::engine::Engine;
use crate::error::{Error, Result};

/// Tokens of one request in a pass.
#[derive(Debug)]
pub(super) struct Feed {
    pub(super) rank: Rank,
    /// The sample whose tokens they are, or `None` for tokens of the documents.
    pub(super) branch: Option<usize>,
    pub(super) tokens: usize,
    /// The input, until it goes into the batch. Missing for a sample's tokens whose slots are still to be taken.
    pub(super) input: Option<SequenceInput>,
}

/// The inputs of a step, and the requests that it could not serve.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) feeds: Vec<Feed>,
    /// The input of each feed.
    pub(super) batch: Vec<SequenceInput>,
    /// The slots of the inputs that have none of their own, in each group of layers.
    pub(super) slots: Vec<WriteSlots>,
    /// Memory for the sequences that grow, and by how many tokens.
    grown: Vec<(SequenceId, usize)>,
    /// Memory for those of them that may share their last block.
    shared: Vec<SequenceId>,
    pub(super) failed: Vec<(Rank, Error)>,
    /// The number of tokens that blends have computed while the rest was planned.
    pub(super) blended: usize,
}

impl Plan {
    /// Takes a request that gives way out of the pass.
    fn forget(&mut self, rank: Rank) {
        self.feeds.retain(|feed| feed.rank != rank);
    }

    fn has_failed(&self, rank: Rank) -> bool {
        self.failed.iter().any(|(known, _)| *known == rank)
    }
}

impl Scheduler {
    /// Plans a step: a token for each answer, then pieces of prompts in the order of service, then new requests.
    pub(super) fn plan(&mut self, engine: &mut Engine, plan: &mut Plan, watch: &mut Watch<'_>) {
        let preempted = self.preemptions;
        let mut left = self.limits.step_tokens;
        let mut ranks = std::mem::take(&mut self.ranks);
        ranks.clear();
        ranks.extend(self.running.iter().map(Live::rank));
        // Every answer goes on by a token; guesses share what that leaves.
        let answers = |live: &Live| live.branches.iter().filter(|branch| branch.is_decoding()).count();
        let mut guesses = left.saturating_sub(self.running.iter().map(answers).sum());
        for &rank in &ranks {
            left = left.saturating_sub(self.feed_answers(engine, plan, rank, &mut guesses));
        }
        for &rank in &ranks {
            left -= self.feed_prompt(engine, plan, watch, rank, left).min(left);
        }
        self.ranks = ranks;
        self.take_slots(engine, plan);
        // Who gave way in this step is not let in again in the same one.
        while left > 0 && self.preemptions == preempted {
            let Some((rank, fed)) = self.admit(engine, plan, left) else { break };
            let fed = if fed > 0 { fed } else { self.feed_documents(engine, plan, watch, rank, left) };
            left -= fed.min(left);
        }
        plan.batch.extend(plan.feeds.iter_mut().filter_map(|feed| feed.input.take()));
    }

    /// Feeds the last token of each answer of a request, with guesses behind it as long as there are `guesses` left. Returns the number
    /// of tokens.
    fn feed_answers(
        &mut self,
        engine: &mut Engine,
        plan: &mut Plan,
        rank: Rank,
        guesses: &mut usize,
    ) -> usize {
        let Some(at) = self.place(rank) else { return 0 };
        let live = &mut self.running[at];
        let mut fed = 0;
        for branch in 0..live.branches.len() {
            if live.branches[branch].is_decoding() {
                let guessed = engine.draft(live, branch, *guesses);
                *guesses -= guessed;
                fed += feed_own(engine, plan, live, branch, 1);
                // The guesses come behind the token that was chosen.
                if let Some(feed) = plan.feeds.last_mut().filter(|_| guessed > 0) {
                    feed.tokens += guessed;
                    fed += guessed;
                }
            }
        }
        fed
    }

    /// Feeds up to `most` tokens of a request's documents and of one of its prompts. Returns their number.
    fn feed_prompt(
        &mut self,
        engine: &mut Engine,
        plan: &mut Plan,
        watch: &mut Watch<'_>,
        rank: Rank,
        most: usize,
    ) -> usize {
        let fed = self.feed_parts_of(engine, plan, watch, rank, most);
        let Some(live) = self.place(rank).map(|at| &mut self.running[at]) else { return fed };
        if plan.has_failed(rank) || fed >= most || !live.sees_parts(fed) {
            return fed;
        }
        // One sample after the other, so that the next finds what this one has computed.
        let unfed = live.branches.iter().position(|branch| branch.left() > 0 && !branch.is_decoding());
        fed + unfed.map_or(0, |branch| feed_own(engine, plan, live, branch, most - fed))
    }

    /// Feeds up to `most` tokens of a request's documents. Returns their number.
    fn feed_parts_of(
        &mut self,
        engine: &mut Engine,
        plan: &mut Plan,
        watch: &mut Watch<'_>,
        rank: Rank,
        most: usize,
    ) -> usize {
        if most == 0 || plan.has_failed(rank) {
            return 0;
        }
        while let Some(at) = self.place(rank) {
            let live = &mut self.running[at];
            match feed_parts(engine, live, plan, watch, most) {
                Ok(fed) => return fed,
                Err(error) => {
                    if !self.make_room(engine, plan, rank, error) {
                        return 0;
                    }
                }
            }
        }
        0
    }

    /// Feeds up to `most` tokens of the documents of a request that was just let in, and of its question if it may see them and there is
    /// room for it. Returns their number.
    fn feed_documents(
        &mut self,
        engine: &mut Engine,
        plan: &mut Plan,
        watch: &mut Watch<'_>,
        rank: Rank,
        most: usize,
    ) -> usize {
        let Some(live) = self.place(rank).map(|at| &mut self.running[at]) else { return 0 };
        // The others have their slots by now, and nobody gives way any more.
        let fed = match feed_parts(engine, live, plan, watch, most) {
            Ok(fed) => fed,
            Err(error) if is_out_of_blocks(&error) => return 0,
            Err(error) => {
                plan.failed.push((rank, error));
                return 0;
            }
        };
        let Some(branch) = live.unfed().filter(|_| fed < most && live.sees_parts(fed)) else { return fed };
        let (own, computed) = (live.branches[branch].own, live.branches[branch].computed);
        let Ok(input) = engine.first_piece(live, branch, most - fed) else {
            // The next step makes room, or says that there is none.
            match own {
                Some(_) => live.branches[branch].computed = computed,
                None => engine.withdraw_branch(&mut live.branches[branch]),
            }
            return fed;
        };
        let tokens = input.tokens.len();
        plan.feeds.push(Feed { rank, branch: Some(branch), tokens, input: Some(input) });
        fed + tokens
    }

    /// Takes the slots of everything that was chosen, and makes room as long as there are too few blocks.
    fn take_slots(&mut self, engine: &mut Engine, plan: &mut Plan) {
        while let Err(error) = self.try_slots(engine, plan) {
            let fed = |feed: &&Feed| feed.branch.is_some();
            let (Some(first), Some(last)) =
                (plan.feeds.iter().find(fed).map(|f| f.rank), plan.feeds.iter().rfind(fed).map(|f| f.rank))
            else {
                return;
            };
            if is_out_of_blocks(&error) && self.drop_drafts(plan) {
                continue;
            }
            if is_out_of_blocks(&error) || first == last {
                self.make_room(engine, plan, first, error);
            } else {
                // It cannot be said whose tokens the device refused.
                let error = Arc::new(error);
                let ranks = plan.feeds.iter().map(|feed| feed.rank);
                plan.failed.extend(ranks.map(|rank| (rank, Error::Pass(Arc::clone(&error)))));
                plan.feeds.clear();
            }
        }
    }

    /// Takes the guesses out of a plan. Returns whether there were any.
    fn drop_drafts(&mut self, plan: &mut Plan) -> bool {
        let mut dropped = false;
        for feed in &mut plan.feeds {
            let (Some(at), Some(branch)) = (self.place(feed.rank), feed.branch) else { continue };
            let draft = &mut self.running[at].branches[branch].draft;
            feed.tokens -= draft.len();
            dropped |= !draft.is_empty();
            draft.clear();
        }
        dropped
    }

    /// Takes the slots of everything that was chosen, or none.
    fn try_slots(&mut self, engine: &mut Engine, plan: &mut Plan) -> Result<()> {
        plan.grown.clear();
        plan.shared.clear();
        for feed in plan.feeds.iter().filter(|feed| feed.input.is_none()) {
            let live = self.place(feed.rank).map(|at| &self.running[at]);
            let branch = live.zip(feed.branch).map(|(live, branch)| (live, &live.branches[branch]));
            let Some((live, own)) = branch.and_then(|(live, branch)| Some((live, branch.own?))) else {
                continue;
            };
            plan.grown.push((own, feed.tokens));
            if live.branches.len() > 1 {
                plan.shared.push(own);
            }
        }
        if !plan.shared.is_empty() {
            engine.caches.copy_on_write(&plan.shared, engine.stream.as_ref())?;
        }
        engine.caches.grow_batch(&plan.grown, &mut plan.slots)?;
        for feed in plan.feeds.iter_mut().filter(|feed| feed.input.is_none()) {
            let (Some(at), Some(branch)) = (self.place(feed.rank), feed.branch) else { continue };
            feed.input = Some(engine.input_of(&mut self.running[at], branch, feed.tokens)?);
        }
        Ok(())
    }

    /// Makes room for a request that found none, at the cost of the last in the order of service. Returns false if that is the request
    /// itself, or if the error is another one.
    fn make_room(&mut self, engine: &mut Engine, plan: &mut Plan, rank: Rank, error: Error) -> bool {
        let last = self.running.iter().map(Live::rank).rfind(|&rank| !plan.has_failed(rank));
        match last.filter(|_| is_out_of_blocks(&error)) {
            Some(last) if last > rank => {
                self.preempt(engine, plan, last);
                true
            }
            Some(last) if last == rank && self.running.len() > 1 => {
                self.preempt(engine, plan, rank);
                false
            }
            _ => {
                plan.forget(rank);
                plan.failed.push((rank, error));
                false
            }
        }
    }

    /// Takes a request's blocks away, to host memory or for good. It waits in its old place.
    fn preempt(&mut self, engine: &mut Engine, plan: &mut Plan, rank: Rank) {
        let Some(at) = self.place(rank) else { return };
        plan.forget(rank);
        let mut live = self.running.remove(at);
        if engine.swap_away(&mut live) {
            self.swaps += 1;
        } else {
            engine.withdraw(&mut live);
        }
        self.preemptions += 1;
        self.waiting.insert(rank, live);
    }

    /// Lets the first waiting request in, if there is room for its first piece of up to `most` tokens. Returns the number of tokens that it
    /// was fed.
    fn admit(&mut self, engine: &mut Engine, plan: &mut Plan, most: usize) -> Option<(Rank, usize)> {
        let answers: usize = self.running.iter().map(|live| live.request.width()).sum();
        loop {
            let (&rank, live) = self.waiting.first_key_value()?;
            let alone = self.running.is_empty();
            if !alone
                && (answers + live.request.width() > self.limits.running
                    || !engine.has_room(live, most, self.limits.watermark))
            {
                return None;
            }
            let mut live = self.waiting.remove(&rank)?;
            match engine.begin(&mut live, most, alone) {
                Ok(fed) => {
                    let at = self.running.partition_point(|other| other.rank() < rank);
                    self.running.insert(at, live);
                    let tokens = fed.as_ref().map_or(0, |(_, input)| input.tokens.len());
                    plan.feeds.extend(fed.map(|(branch, input)| Feed {
                        rank,
                        branch: Some(branch),
                        tokens,
                        input: Some(input),
                    }));
                    return Some((rank, tokens));
                }
                Err(error) if is_out_of_blocks(&error) && !alone => {
                    if live.branches.iter().all(|branch| branch.swapped.is_none()) {
                        engine.withdraw(&mut live);
                    }
                    live.refused = Some(engine.caches.available());
                    self.waiting.insert(rank, live);
                    return None;
                }
                Err(error) => {
                    engine.withdraw(&mut live);
                    live.sender.fail(error);
                }
            }
        }
    }
}

impl Engine {
    /// Returns whether every pool has room for the first piece of a request above the watermark. Of a prompt that may be cached, only
    /// [its admission](kvcore::PagedKvCache::admit) can say.
    fn has_room(&self, live: &Live, most: usize, watermark: usize) -> bool {
        if let Some(cache) = self.cache().as_static() {
            return self.cache().num_sequences() < cache.max_batch();
        }
        // Documents are looked up anew only when there is more room than they last found too little.
        if chunked(live).is_some() && live.refused.is_some_and(|had| self.caches.available() <= had) {
            return false;
        }
        let first = live.branches.first().map_or(0, |branch| branch.tokens.len().min(most));
        let blocks = first.div_ceil(self.caches.block_size());
        let has_room = |cache: &PagedKvCache| cache.pool().counts().available() >= blocks + watermark;
        finds_prefix(live) || self.caches.groups().all(|(_, cache)| has_room(cache))
    }

    /// Begins a request: looks its documents up, or takes the blocks for the first piece of up to `most` tokens of its prompt. Returns
    /// that piece. Running requests keep the watermark's blocks, if there are others.
    fn begin(&mut self, live: &mut Live, most: usize, alone: bool) -> Result<Option<(usize, SequenceInput)>> {
        if self.swap_back(live, alone)? {
            return Ok(None);
        }
        self.begin_parts(live)?;
        if chunked(live).is_some() {
            return Ok(None);
        }
        // Samples that are over wait for nothing.
        let Some(branch) = live.unfed() else { return Ok(None) };
        if alone || !finds_prefix(live) {
            return Ok(Some((branch, self.first_piece(live, branch, most)?)));
        }
        let slots = self.admit_branch(live, branch, most)?;
        let mut input = self.input_of(live, branch, slots[0].len())?;
        input.set_slots(slots);
        Ok(Some((branch, input)))
    }

    /// Returns the next piece of up to `most` tokens of a sample's sequence, with its slots.
    fn first_piece(&mut self, live: &mut Live, branch: usize, most: usize) -> Result<SequenceInput> {
        let tokens = self.take_next(live, branch, most)?;
        let Some(own) = live.branches[branch].own else { return Err(Error::EmptyPrompt) };
        let slots = self.caches.grow(own, tokens)?;
        let mut input = self.input_of(live, branch, tokens)?;
        input.set_slots(slots);
        Ok(input)
    }

    /// Chooses up to `most` of the next tokens of a sample. Returns their number.
    fn take_next(&mut self, live: &mut Live, branch: usize, most: usize) -> Result<usize> {
        self.begin_branch(live, branch)?;
        let it = &mut live.branches[branch];
        let mut end = it.tokens.len().min(it.computed + most);
        if live.request.forced.is_some() && it.computed < it.prompt {
            end = end.min(it.prompt);
        }
        Ok(end - std::mem::replace(&mut it.computed, end))
    }

    /// Returns the last `tokens` chosen tokens of a sample as an input without slots, which gets logits if these are the last.
    fn input_of(&mut self, live: &mut Live, branch: usize, tokens: usize) -> Result<SequenceInput> {
        let given = live.request.forced.is_some();
        let it = &mut live.branches[branch];
        let Some(own) = it.own else { return Err(Error::EmptyPrompt) };
        let segment = self.caches.sequences().segment(own)?;
        let start = SequenceStart { logical: segment.logical_start, position: segment.stored_start };
        let (before, chosen) = (segment.len - tokens, tokens - it.draft.len());
        let fresh = &it.tokens[it.computed - chosen..it.computed];
        let mut input = if let Some(mut input) = it.input.take().filter(|_| tokens == 1) {
            input.slots = WriteSlots::default();
            input.logical_start = start.logical + before;
            input.position_start = start.position + before as i64;
            input.tokens.clear();
            input.tokens.extend_from_slice(fresh);
            // No pass holds the list between two tokens, so that it is changed in place.
            if let Some(last) = Arc::make_mut(&mut input.segments).last_mut() {
                *last = segment;
            }
            input
        } else {
            let mut input = live.context.input(start, before, fresh, WriteSlots::default(), segment);
            input.tokens.extend_from_slice(&it.draft);
            input
        };
        self.caches.set_others(own, &mut input)?;
        if !it.draft.is_empty() {
            return Ok(input.with_logits(Logits::All));
        }
        Ok(input.with_logits(match it.computed {
            end if given && end > it.prompt => Logits::All,
            end if end == it.tokens.len() => Logits::Last,
            _ => Logits::None,
        }))
    }
}

/// Returns whether a request's prompt is looked up when its sequence begins.
fn finds_prefix(live: &Live) -> bool {
    chunked(live).is_none() && live.request.reuse && live.request.forced.is_none()
}

/// Chooses up to `most` tokens of a sample's own sequence, whose slots are taken later. Returns their number.
fn feed_own(engine: &mut Engine, plan: &mut Plan, live: &mut Live, branch: usize, most: usize) -> usize {
    let rank = live.rank();
    match engine.take_next(live, branch, most) {
        Ok(tokens) => {
            plan.feeds.push(Feed { rank, branch: Some(branch), tokens, input: None });
            tokens
        }
        Err(error) => {
            plan.failed.push((rank, error));
            0
        }
    }
}

/// Feeds up to `most` rows of a request's documents, or computes them, which a blend does by itself. Returns their number.
fn feed_parts(
    engine: &mut Engine,
    live: &mut Live,
    plan: &mut Plan,
    watch: &mut Watch<'_>,
    most: usize,
) -> Result<usize> {
    engine.advance_parts(live)?;
    let blended = engine.blend(live, most, watch.of(live.rank()))?;
    if blended > 0 {
        plan.blended += blended;
        return Ok(blended);
    }
    let (inputs, mut skip) = live.parts.inputs();
    let mut fed = 0;
    for input in inputs {
        let tokens = input.tokens.len();
        if skip >= tokens {
            skip -= tokens;
            continue;
        }
        let end = tokens.min(skip + most - fed);
        if end == skip {
            break;
        }
        let part = if (skip, end) == (0, tokens) { input.clone() } else { input.part(skip..end)? };
        plan.feeds.push(Feed { rank: live.rank(), branch: None, tokens: end - skip, input: Some(part) });
        (fed, skip) = (fed + end - skip, 0);
    }
    Ok(fed)
}

pub(super) fn is_out_of_blocks(error: &Error) -> bool {
    use kvcore::Error::OutOfBlocks;
    matches!(error, Error::Core(OutOfBlocks { .. }) | Error::Chunk(kvchunk::Error::Core(OutOfBlocks { .. })))
}
