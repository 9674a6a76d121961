//! Chooses the tokens that a step computes.
//!
//! Running requests are served first: their tokens are chosen, and slots are allocated for all of them at
//! once. If there are too few blocks, the last request in the order of service is preempted, and the
//! allocation is repeated for the other requests. New requests get the remaining tokens of the step.

use std::sync::Arc;
use std::time::Instant;

use kvcore::Logits;

use super::disk::DiskFetch;
use super::feed::{Feed, StepPlan};
use super::live::{LiveRequest, ServiceRank, index_of};
use super::scheduler::{Scheduler, StepTimes, Watch};
use crate::error::{Error, Result};
use crate::runner::Runner;

impl Scheduler {
    /// Plans a step: a token for each answer, then pieces of prompts in the order of service, then new
    /// requests.
    pub(super) fn plan(&mut self, runner: &mut Runner, watch: &mut Watch<'_>) {
        let preempted = self.preemptions;
        let mut left = self.limits.step_tokens;
        self.ranks.clear();
        self.ranks.extend(self.running.iter().map(LiveRequest::rank));
        // Every answer gets one token. Guesses share the remaining tokens.
        let answers = |live: &LiveRequest| live.branches.iter().filter(|branch| branch.is_decoding()).count();
        let mut guesses = left.saturating_sub(self.running.iter().map(answers).sum());
        for i in 0..self.ranks.len() {
            left = left.saturating_sub(self.feed_answers(runner, self.ranks[i], &mut guesses));
        }
        for i in 0..self.ranks.len() {
            left -= self.feed_prompt(runner, watch, self.ranks[i], left).min(left);
        }
        self.take_slots(runner);
        self.fetch(runner);
        self.put_arrived(runner);
        // A request that was preempted in this step must not be admitted again in the same step.
        while left > 0 && self.preemptions == preempted {
            let Some((rank, fed)) = self.admit(runner, left) else { break };
            let fed = if fed > 0 { fed } else { self.feed_documents(runner, watch, rank, left) };
            left -= fed.min(left);
        }
        let StepPlan { feeds, batch, .. } = &mut self.plan;
        batch.extend(feeds.iter_mut().filter_map(|feed| feed.input.take()));
    }

    /// Feeds the last token of each of a request's answers, followed by up to `guesses` guesses in total.
    /// Subtracts the number of guesses from `guesses`, and returns the number of tokens fed.
    fn feed_answers(&mut self, runner: &mut Runner, rank: ServiceRank, guesses: &mut usize) -> usize {
        let Some(at) = index_of(&self.running, rank) else { return 0 };
        let live = &mut self.running[at];
        let mut fed = 0;
        for branch in 0..live.branches.len() {
            if live.branches[branch].is_decoding() {
                let guessed = live.draft(runner, branch, *guesses);
                *guesses -= guessed;
                fed += feed_branch(runner, &mut self.plan, live, branch, 1);
                // Guesses come after the chosen token.
                if let Some(feed) = self.plan.feeds.last_mut().filter(|_| guessed > 0) {
                    feed.tokens += guessed;
                    fed += guessed;
                }
            }
        }
        fed
    }

    /// Feeds up to `most` tokens in total of a request's documents and of one sample's prompt. Returns the
    /// number of tokens fed.
    fn feed_prompt(
        &mut self,
        runner: &mut Runner,
        watch: &mut Watch<'_>,
        rank: ServiceRank,
        most: usize,
    ) -> usize {
        let fed = self.feed_running_parts(runner, watch, rank, most);
        let Some(at) = index_of(&self.running, rank) else { return fed };
        let live = &mut self.running[at];
        if self.plan.has_failed(rank) {
            return fed;
        }
        if fed >= most || !live.prompt.opens_to_question(&live.request, fed) {
            live.check_parts(&mut self.plan);
            return fed;
        }
        // Samples are fed one after another, so that each sample finds the tokens that the previous sample
        // computed.
        let unfed = live.branches.iter().position(|branch| branch.left() > 0 && !branch.is_decoding());
        fed + unfed.map_or(0, |branch| feed_branch(runner, &mut self.plan, live, branch, most - fed))
    }

    /// Feeds up to `most` tokens of a running request's documents, and makes room for them. Returns the
    /// number of tokens fed.
    fn feed_running_parts(
        &mut self,
        runner: &mut Runner,
        watch: &mut Watch<'_>,
        rank: ServiceRank,
        most: usize,
    ) -> usize {
        if most == 0 || self.plan.has_failed(rank) {
            return 0;
        }
        while let Some(at) = index_of(&self.running, rank) {
            let (live, plan) = (&mut self.running[at], &mut self.plan);
            match feed_parts(runner, live, (plan, &mut self.times), watch, most) {
                Ok(fed) => return fed,
                Err(error) => {
                    if !self.make_room(runner, rank, error) {
                        return 0;
                    }
                }
            }
        }
        0
    }

    /// Feeds up to `most` tokens of the documents of a request that was just admitted. Also feeds the
    /// request's question, if it may already see the documents and there is room. Returns the number of
    /// tokens fed.
    fn feed_documents(
        &mut self,
        runner: &mut Runner,
        watch: &mut Watch<'_>,
        rank: ServiceRank,
        most: usize,
    ) -> usize {
        let Some(at) = index_of(&self.running, rank) else { return 0 };
        let live = &mut self.running[at];
        // The other requests already have their slots, so none of them is preempted now.
        let fed = match feed_parts(runner, live, (&mut self.plan, &mut self.times), watch, most) {
            Ok(fed) => fed,
            Err(error) if error.is_out_of_blocks() => return 0,
            Err(error) => {
                self.plan.failed.push((rank, error));
                return 0;
            }
        };
        let opens = fed < most && live.prompt.opens_to_question(&live.request, fed);
        let Some(branch) = live.unfed().filter(|_| opens) else {
            live.check_parts(&mut self.plan);
            return fed;
        };
        let (sequence, computed) = (live.branches[branch].sequence, live.branches[branch].computed);
        let Ok(input) = live.first_piece(runner, branch, most - fed) else {
            // The next step makes room, or reports that there is no room.
            match sequence {
                Some(_) => live.branches[branch].computed = computed,
                None => live.branches[branch].withdraw(runner),
            }
            live.check_parts(&mut self.plan);
            return fed;
        };
        let tokens = input.tokens.len();
        self.plan.feeds.push(Feed { rank, branch: Some(branch), tokens, input: Some(input) });
        fed + tokens
    }

    /// Allocates slots for all chosen tokens. Drops guesses or preempts requests as long as there are too few
    /// blocks.
    fn take_slots(&mut self, runner: &mut Runner) {
        while let Err(error) = self.try_slots(runner) {
            let fed = |feed: &&Feed| feed.branch.is_some();
            let feeds = &self.plan.feeds;
            let (first, last) = (feeds.iter().find(fed), feeds.iter().rfind(fed));
            let Some((first, last)) = first.zip(last).map(|(first, last)| (first.rank, last.rank)) else {
                return;
            };
            if error.is_out_of_blocks() && self.drop_drafts() {
                continue;
            }
            if error.is_out_of_blocks() || first == last {
                self.make_room(runner, first, error);
            } else {
                // The device does not report which request's tokens failed.
                let error = Arc::new(error);
                let failed =
                    self.plan.feeds.drain(..).map(|feed| (feed.rank, Error::Pass(Arc::clone(&error))));
                self.plan.failed.extend(failed);
            }
        }
    }

    /// Removes the guesses from the plan. Returns true if there were any.
    fn drop_drafts(&mut self) -> bool {
        let mut dropped = false;
        for feed in &mut self.plan.feeds {
            let (Some(at), Some(branch)) = (index_of(&self.running, feed.rank), feed.branch) else {
                continue;
            };
            let draft = &mut self.running[at].branches[branch].draft;
            feed.tokens -= draft.len();
            dropped |= !draft.is_empty();
            draft.clear();
        }
        dropped
    }

    /// Allocates slots for all chosen tokens, or none.
    fn try_slots(&mut self, runner: &mut Runner) -> Result<()> {
        let StepPlan { feeds, slots, grown, forked, .. } = &mut self.plan;
        grown.clear();
        forked.clear();
        for feed in feeds.iter().filter(|feed| feed.input.is_none()) {
            let live = index_of(&self.running, feed.rank).map(|at| &self.running[at]);
            let Some((live, branch)) = live.zip(feed.branch) else { continue };
            let Some(sequence) = live.branches[branch].sequence else { continue };
            grown.push((sequence, feed.tokens));
            if live.branches.len() > 1 {
                forked.push(sequence);
            }
        }
        if !forked.is_empty() {
            runner.caches.sequences.grouped()?.copy_on_write(forked, runner.setup.stream.as_ref())?;
        }
        runner.caches.sequences.grow_batch(grown, slots)?;
        for feed in feeds.iter_mut().filter(|feed| feed.input.is_none()) {
            let (Some(at), Some(branch)) = (index_of(&self.running, feed.rank), feed.branch) else {
                continue;
            };
            feed.input = Some(self.running[at].input(runner, branch, feed.tokens)?);
        }
        Ok(())
    }

    /// Makes room for a request that ran out of blocks, by preempting the last request in the order of
    /// service. Returns true if another request was preempted. Otherwise, the request itself was preempted
    /// or, if that cannot help, has failed with `error`.
    fn make_room(&mut self, runner: &mut Runner, rank: ServiceRank, error: Error) -> bool {
        let last = self.running.iter().map(LiveRequest::rank).rfind(|&rank| !self.plan.has_failed(rank));
        match last.filter(|_| error.is_out_of_blocks()) {
            Some(last) if last > rank => {
                self.preempt(runner, last);
                true
            }
            Some(last) if last == rank && self.running.len() > 1 => {
                self.preempt(runner, rank);
                false
            }
            _ => {
                self.plan.remove(rank);
                self.end_unfit(runner, rank, error);
                false
            }
        }
    }

    // Decision: docs/decisions/models.md#an-answer-that-outgrows-the-pool-is-kept
    /// Ends a running request that cannot go on. If its answer has outgrown the pool, the answer so far is kept.
    fn end_unfit(&mut self, runner: &mut Runner, rank: ServiceRank, error: Error) {
        let Some(at) = index_of(&self.running, rank) else { return };
        if self.running[at].end_outgrown(runner, &error) {
            self.moving.insert(self.running.remove(at)).withdraw(runner);
            self.moving = None;
        } else {
            self.plan.failed.push((rank, error));
        }
    }

    /// Preempts a request: frees its blocks, possibly after copying them to host memory, and makes the
    /// request wait at its old rank.
    fn preempt(&mut self, runner: &mut Runner, rank: ServiceRank) {
        let Some(at) = index_of(&self.running, rank) else { return };
        self.plan.remove(rank);
        let live = self.moving.insert(self.running.remove(at));
        live.prompt.give_way(live.branches.iter().any(|branch| branch.sequence.is_some()));
        if self.swap.swap_out(runner, live) {
            self.swaps += 1;
        } else {
            live.withdraw(runner);
            live.fetch = DiskFetch::default();
        }
        self.preemptions += 1;
        self.waiting.extend(self.moving.take().map(|live| (rank, live)));
    }
}

impl LiveRequest {
    // Decision: docs/decisions/models.md#nothing-is-kept-before-logits-behind-it-were-numbers
    /// Requests logits behind the planned tokens of the system prompt and the documents, so that they are checked before
    /// they are stored. A question in the same pass checks them anyway.
    fn check_parts(&self, plan: &mut StepPlan) {
        if !self.prompt.is_missing() || !self.request.reuse {
            return;
        }
        let rank = self.rank();
        for feed in plan.feeds.iter_mut().filter(|feed| feed.rank == rank && feed.branch.is_none()) {
            feed.input = feed.input.take().map(|input| input.with_logits(Logits::Last));
        }
    }
}

/// Chooses up to `most` tokens of a sample's own sequence. Their slots are allocated later. Returns the
/// number of chosen tokens.
fn feed_branch(
    runner: &mut Runner,
    plan: &mut StepPlan,
    live: &mut LiveRequest,
    branch: usize,
    most: usize,
) -> usize {
    let rank = live.rank();
    match live.take_next(runner, branch, most) {
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

/// Feeds up to `most` rows of a request's documents. A blend computes its rows right away. Returns the number
/// of rows fed.
fn feed_parts(
    runner: &mut Runner,
    live: &mut LiveRequest,
    (plan, times): (&mut StepPlan, &mut StepTimes),
    watch: &mut Watch<'_>,
    most: usize,
) -> Result<usize> {
    let rank = live.rank();
    live.prompt.advance(runner, &live.request)?;
    if live.prompt.is_blending() {
        let started = Instant::now();
        let blended = live.prompt.blend(runner, &live.request, most, watch.of(rank));
        times.model += started.elapsed();
        let (rows, logits) = blended?;
        if let Some(logits) = logits {
            live.take_blended(runner, &logits)?;
        }
        plan.blended += rows;
        return Ok(rows);
    }
    let mut fed = 0;
    while let Some(input) = live.prompt.take_rows(most - fed)? {
        let tokens = input.tokens.len();
        plan.feeds.push(Feed { rank, branch: None, tokens, input: Some(input) });
        fed += tokens;
    }
    Ok(fed)
}
