//! The choice of what a step computes.

use kvcore::{Logits, SequenceInput};

use super::live::{Live, Parts};
use super::{Rank, Scheduler, Watch};
use crate::engine::Engine;
use crate::error::{Error, Result};

/// Tokens of one request in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Feed {
    pub(super) rank: Rank,
    /// The sample whose tokens they are, or `None` for tokens of the documents.
    pub(super) branch: Option<usize>,
    pub(super) tokens: usize,
}

/// The inputs of a step, and the requests that it could not serve.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) feeds: Vec<Feed>,
    /// The input of each feed.
    pub(super) batch: Vec<SequenceInput>,
    pub(super) failed: Vec<(Rank, Error)>,
}

impl Plan {
    fn push(&mut self, feed: Feed, input: SequenceInput) {
        self.feeds.push(feed);
        self.batch.push(input);
    }

    /// Takes a request that gives way out of the pass.
    fn forget(&mut self, rank: Rank) {
        while let Some(at) = self.feeds.iter().rposition(|feed| feed.rank == rank) {
            self.feeds.remove(at);
            self.batch.remove(at);
        }
    }

    fn has_failed(&self, rank: Rank) -> bool {
        self.failed.iter().any(|(known, _)| *known == rank)
    }
}

impl Scheduler {
    /// Plans a step: a token for each answer, then pieces of prompts in the order of service, then new requests.
    pub(super) fn plan(&mut self, engine: &mut Engine, plan: &mut Plan, watch: &mut Watch<'_>) {
        let preempted = self.preemptions;
        let mut left = self.limits.step_tokens.max(1);
        let mut ranks = std::mem::take(&mut self.ranks);
        ranks.clear();
        ranks.extend(self.running.iter().map(Live::rank));
        for &rank in &ranks {
            left = left.saturating_sub(self.feed_answers(engine, plan, rank));
        }
        for &rank in &ranks {
            left -= self.feed_prompt(engine, plan, watch, rank, left).min(left);
        }
        // Who gave way in this step is not let in again in the same one.
        while left > 0 && self.preemptions == preempted {
            let Some(rank) = self.admit(engine, left) else { break };
            left -= self.feed_prompt(engine, plan, watch, rank, left).min(left);
        }
        self.ranks = ranks;
    }

    /// Feeds the last token of each answer of a request. Returns their number.
    fn feed_answers(&mut self, engine: &mut Engine, plan: &mut Plan, rank: Rank) -> usize {
        let mut fed = 0;
        let mut branch = 0;
        while let Some(at) = self.place(rank) {
            let Some(it) = self.running[at].branches.get(branch) else { break };
            if it.is_decoding() {
                fed += self.feed_own(engine, plan, rank, branch, 1);
            }
            branch += 1;
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
        if most == 0 || plan.has_failed(rank) {
            return 0;
        }
        loop {
            let Some(at) = self.place(rank) else { return 0 };
            let live = &mut self.running[at];
            match engine.advance_parts(live, watch.of(rank)) {
                Ok(()) => break,
                Err(error) => {
                    if !self.make_room(engine, plan, rank, error) {
                        return 0;
                    }
                }
            }
        }
        let Some(at) = self.place(rank) else { return 0 };
        let live = &mut self.running[at];
        let mut fed = 0;
        if live.parts.left() > 0 {
            fed = match feed_parts(live, plan, most) {
                Ok(fed) => fed,
                Err(error) => {
                    plan.failed.push((rank, error));
                    return 0;
                }
            };
            // In the pass that computes the last of the documents, the question may see them already.
            if fed < live.parts.left() || !live.sees_parts_that_come() {
                return fed;
            }
        } else if matches!(live.parts, Parts::Missing { .. }) {
            return 0;
        }
        // One sample after the other, so that the next finds what this one has computed.
        let unfed = live.branches.iter().position(|branch| branch.left() > 0 && !branch.is_decoding());
        fed + unfed
            .filter(|_| fed < most)
            .map_or(0, |branch| self.feed_own(engine, plan, rank, branch, most - fed))
    }

    /// Feeds up to `most` tokens of a sample's own sequence. Returns their number.
    fn feed_own(
        &mut self,
        engine: &mut Engine,
        plan: &mut Plan,
        rank: Rank,
        branch: usize,
        most: usize,
    ) -> usize {
        while let Some(at) = self.place(rank).filter(|_| !plan.has_failed(rank)) {
            match engine.next_of(&mut self.running[at], branch, most) {
                Ok(input) => {
                    let tokens = input.tokens.len();
                    plan.push(Feed { rank, branch: Some(branch), tokens }, input);
                    return tokens;
                }
                Err(error) => {
                    if !self.make_room(engine, plan, rank, error) {
                        return 0;
                    }
                }
            }
        }
        0
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
                plan.failed.push((rank, error));
                false
            }
        }
    }

    /// Takes a request's blocks away. It waits in its old place.
    fn preempt(&mut self, engine: &mut Engine, plan: &mut Plan, rank: Rank) {
        let Some(at) = self.place(rank) else { return };
        plan.forget(rank);
        let mut live = self.running.remove(at);
        engine.withdraw(&mut live);
        self.preemptions += 1;
        self.waiting.insert(rank, live);
    }

    /// Lets the first waiting request in, if there is room for its first piece of up to `most` tokens.
    fn admit(&mut self, engine: &mut Engine, most: usize) -> Option<Rank> {
        let answers: usize = self.running.iter().map(|live| live.request.samples).sum();
        loop {
            let (&rank, live) = self.waiting.first_key_value()?;
            let crowded = answers + live.request.samples > self.limits.running;
            if !self.running.is_empty() && (crowded || !engine.has_room(live, most, self.limits.watermark)) {
                return None;
            }
            let mut live = self.waiting.remove(&rank)?;
            match engine.begin_parts(&mut live) {
                Ok(()) => {
                    let at = self.running.partition_point(|other| other.rank() < rank);
                    self.running.insert(at, live);
                    return Some(rank);
                }
                Err(error) if is_out_of_blocks(&error) && !self.running.is_empty() => {
                    engine.withdraw(&mut live);
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
    /// Returns whether the pool has room for the first piece of a request above the watermark.
    fn has_room(&self, live: &Live, most: usize, watermark: usize) -> bool {
        let Some(cache) = self.cache().as_paged() else { return true };
        let first = live.branches.first().map_or(0, |branch| branch.tokens.len().min(most));
        let blocks = first.div_ceil(cache.kv_pool().block_size());
        cache.pool().counts().available() >= blocks + watermark
    }

    /// Returns up to `most` of the next tokens of a sample as an input, with logits if these are the last.
    fn next_of(&mut self, live: &mut Live, branch: usize, most: usize) -> Result<SequenceInput> {
        self.begin_branch(live, branch)?;
        let Some(own) = live.branches[branch].own else { return Err(Error::EmptyPrompt) };
        if live.branches.len() > 1 {
            let stream = std::sync::Arc::clone(&self.stream);
            if let Some(cache) = self.caches.paged_mut() {
                cache.copy_on_write(own, stream.as_ref())?;
            }
        }
        let given = live.request.forced.is_some();
        let it = &mut live.branches[branch];
        let mut end = it.tokens.len().min(it.computed + most);
        if given && it.computed < it.prompt {
            end = end.min(it.prompt);
        }
        let logits = match end {
            end if given && end > it.prompt => Logits::All,
            end if end == it.tokens.len() => Logits::Last,
            _ => Logits::None,
        };
        let input = match it.input.take().filter(|_| end - it.computed == 1) {
            Some(mut input) => {
                self.advance(own, it.tokens[it.computed], &mut input)?;
                input
            }
            None => self.next_input(own, &it.tokens[it.computed..end], &live.context)?,
        };
        it.computed = end;
        Ok(input.with_logits(logits))
    }
}

/// Feeds up to `most` rows of a request's documents. Returns their number.
fn feed_parts(live: &Live, plan: &mut Plan, most: usize) -> Result<usize> {
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
        plan.push(Feed { rank: live.rank(), branch: None, tokens: end - skip }, part);
        (fed, skip) = (fed + end - skip, 0);
    }
    Ok(fed)
}

fn is_out_of_blocks(error: &Error) -> bool {
    use kvcore::Error::OutOfBlocks;
    matches!(error, Error::Core(OutOfBlocks { .. }) | Error::Chunk(kvchunk::Error::Core(OutOfBlocks { .. })))
}
