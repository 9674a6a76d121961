//! A step: runs its passes, and ends requests.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{LayerRopes, Logits, StepBatch};
use kvmodel::{Forward, LogitRows, Observer};

use super::answer::RequestId;
use super::feed::{Feed, StepPlan};
use super::layered::Layered;
use super::live::{LiveRequest, index_of};
use super::numbers;
use super::scheduler::{Scheduler, Step, Watch};
use crate::error::{Error, Result};
use crate::runner::Runner;

/// The maximum time that a step waits for another engine's work if it has nothing to compute itself.
const PAUSE: Duration = Duration::from_millis(2);

impl Scheduler {
    // Decision: docs/decisions/models.md#a-panic-ends-the-requests-of-its-step
    /// Runs one step. `observer` observes the prefill of the request `observed`, and may stop this request. If
    /// the observer, the backend or a strategy panics, ends all requests that have begun, and lets the panic
    /// continue.
    pub(crate) fn step(
        &mut self,
        runner: &mut Runner,
        observed: Option<RequestId>,
        observer: &mut dyn Observer,
    ) -> Step {
        match catch_unwind(AssertUnwindSafe(|| self.run(runner, observed, observer))) {
            Ok(step) => step,
            Err(panic) => {
                self.end_begun(runner);
                resume_unwind(panic)
            }
        }
    }

    /// Ends all requests that may hold blocks, because the state of a step that was interrupted is lost.
    fn end_begun(&mut self, runner: &mut Runner) {
        self.plan = StepPlan::default();
        while let Some(mut live) = self.moving.take().or_else(|| self.running.pop()) {
            live.withdraw(runner);
            live.sender.fail(Error::Interrupted);
        }
    }

    fn run(&mut self, runner: &mut Runner, observed: Option<RequestId>, observer: &mut dyn Observer) -> Step {
        let mut watch = Watch { id: observed, observer, unwatched: () };
        let (started, before) = (Instant::now(), self.times.model);
        self.end_some(runner);
        self.choose_late(runner);
        self.plan.blended = 0;
        self.plan(runner, &mut watch);
        let mut tokens = self.plan.blended;
        while !self.plan.feeds.is_empty() {
            tokens += self.pass(runner, &mut watch);
            self.plan.next_pass();
        }
        while let Some((rank, error)) = self.plan.failed.pop() {
            if let Some(at) = index_of(&self.running, rank) {
                self.fail(runner, at, error);
            }
        }
        self.remove_ended(runner);
        runner.caches.tend(runner.setup.clock.millis());
        let in_model = self.times.model.saturating_sub(before);
        self.times.engine += started.elapsed().saturating_sub(in_model);
        if tokens == 0 {
            self.pause();
        }
        self.report(tokens)
    }

    /// Ends requests that were cancelled, have exceeded their time limit or were declared complete.
    pub(crate) fn end_some(&mut self, runner: &mut Runner) {
        let now = runner.setup.clock.millis();
        let fate = |live: &LiveRequest| {
            if live.sender.is_cancelled() {
                return Some(Error::Cancelled);
            }
            let late = live.deadline.is_some_and(|deadline| now >= deadline);
            live.request.time_limit.filter(|_| late).map(|limit| Error::TimeOut { limit })
        };
        let ended: Vec<_> =
            self.waiting.iter().filter_map(|(&rank, live)| Some((rank, fate(live)?))).collect();
        for (rank, error) in ended {
            if let Some(live) = self.waiting.remove(&rank) {
                live.sender.fail(error);
            }
        }
        self.waiting.retain(|_, live| {
            live.end_complete();
            !live.is_over()
        });
        let mut at = 0;
        while at < self.running.len() {
            if let Some(error) = fate(&self.running[at]) {
                self.fail(runner, at, error);
                continue;
            }
            self.running[at].end_complete();
            at += 1;
        }
        self.remove_ended(runner);
    }

    /// Ends a running request with an error.
    pub(super) fn fail(&mut self, runner: &mut Runner, at: usize, error: Error) {
        self.moving.insert(self.running.remove(at)).withdraw(runner);
        if let Some(live) = self.moving.take() {
            live.sender.fail(error);
        }
    }

    /// Frees the blocks of requests and samples that have ended.
    pub(super) fn remove_ended(&mut self, runner: &mut Runner) {
        self.running.retain_mut(|live| {
            for at in 0..live.branches.len() {
                if live.branches[at].over {
                    live.save_branch(runner, at);
                }
            }
            if live.is_over() {
                live.remember(runner, &mut self.known);
                live.withdraw(runner);
                return false;
            }
            for branch in live.branches.iter_mut().filter(|branch| branch.over) {
                if let Some(sequence) = branch.sequence.take() {
                    drop(runner.caches.sequences.free(sequence));
                }
            }
            true
        });
    }

    /// Computes the first planned input and all other planned inputs in the same RoPE regime. Returns the
    /// number of computed tokens.
    fn pass(&mut self, runner: &mut Runner, watch: &mut Watch<'_>) -> usize {
        let first = self.plan.feeds.first().and_then(|feed| index_of(&self.running, feed.rank));
        let Some(first) = first else { return 0 };
        let ropes = self.running[first].prompt.ropes().clone();
        self.keep_regime(runner, first);
        let feeds = &self.plan.feeds;
        let tokens: usize = feeds.iter().map(|feed| feed.tokens).sum();
        let prefill = tokens >= 2 * feeds.len();
        let single = feeds.iter().all(|feed| feed.rank == feeds[0].rank);
        let observer = if single { watch.of(feeds[0].rank) } else { &mut () };
        let started = Instant::now();
        let result = self.compute(runner, &ropes, observer);
        self.times.model += started.elapsed();
        if prefill {
            let elapsed = started.elapsed();
            self.swap.computed(tokens, elapsed);
            if let Some(tier) = &runner.tier {
                tier.prefill.computed(tokens, elapsed);
            }
        }
        match result {
            Ok(pass) => self.take_results(runner, &ropes, tokens, pass),
            Err(error) if single => self.plan.failed.push((self.plan.feeds[0].rank, error)),
            Err(error) => {
                let error = Arc::new(error);
                let StepPlan { feeds, failed, .. } = &mut self.plan;
                failed.extend(feeds.iter().map(|feed| (feed.rank, Error::Pass(Arc::clone(&error)))));
            }
        }
        tokens
    }

    /// Delivers the results of a pass, which computed `tokens` tokens, to the pass's requests.
    fn take_results(&mut self, runner: &mut Runner, ropes: &LayerRopes, tokens: usize, pass: Forward) {
        let (mut row, mut counted) = (0, 0);
        let StepPlan { feeds, batch, failed, .. } = &mut self.plan;
        for (feed, input) in feeds.iter().zip(batch.drain(..)) {
            let wanted = match input.logits {
                Logits::None => 0,
                Logits::Last => 1,
                Logits::All => feed.tokens,
            };
            let range: Range<usize> = row..row + wanted;
            row = range.end;
            let logits = pass.logits.as_ref().filter(|_| wanted > 0).map(|rows| (rows, range));
            let Some(at) = index_of(&self.running, feed.rank) else { continue };
            let live = &mut self.running[at];
            // Divides the operations in proportion to the tokens. The shares add up to the total.
            let share =
                |counted: usize| (u128::from(pass.flops) * counted as u128 / tokens.max(1) as u128) as u64;
            let before = share(counted);
            counted += feed.tokens;
            if feed.branch.is_none_or(|branch| live.branches[branch].answer().is_empty()) {
                live.prompt.costs_mut().flops += share(counted) - before;
            }
            // Without numbers, no token can be chosen, and what was computed must not be found later.
            let numbers =
                logits.clone().map_or(Ok(()), |logits| numbers::check(runner, ropes, &input, logits));
            if let Err(error) = numbers.and_then(|()| live.after(runner, feed, input, logits)) {
                failed.push((feed.rank, error));
            }
        }
        self.logits = pass.logits.map(LogitRows::into_values).unwrap_or_default();
    }

    /// Keeps in the pass only the inputs in the RoPE regime of the running request at index `first`. All
    /// other inputs move to later passes.
    fn keep_regime(&mut self, runner: &Runner, first: usize) {
        let running = &self.running;
        let together = |feed: &Feed| {
            index_of(running, feed.rank).is_some_and(|at| running[at].same_regime(&running[first]))
        };
        if self.plan.feeds.iter().all(together) {
            return;
        }
        divide_slots(runner, running, &mut self.plan);
        let StepPlan { feeds, batch, later, .. } = &mut self.plan;
        let inputs: Vec<_> = feeds.drain(..).zip(batch.drain(..)).collect();
        for (feed, input) in inputs {
            if together(&feed) {
                feeds.push(feed);
                batch.push(input);
            } else {
                later.push((feed, input));
            }
        }
    }

    /// Runs one pass. It runs layer by layer if a request selects or observes attention. It runs as a decode
    /// step, which may use a graph, if every input is one token of an answer.
    fn compute(
        &mut self,
        runner: &mut Runner,
        ropes: &LayerRopes,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        let Self { running, plan, logits, .. } = self;
        let batch = StepBatch { inputs: &plan.batch, slots: &plan.slots };
        let block_size = runner.caches.sequences.block_size();
        if let Some(layered) = Layered::find(running, &plan.feeds, batch.inputs, block_size) {
            return layered.run(runner, ropes, batch, std::mem::take(logits), observer);
        }
        let answers = |feed: &Feed| {
            let live = index_of(running, feed.rank).map(|at| &running[at]);
            let branch = feed.branch.zip(live).map(|(branch, live)| &live.branches[branch]);
            feed.tokens == 1 && branch.is_some_and(|branch| !branch.answer().is_empty())
        };
        if plan.feeds.iter().all(answers) {
            return runner.decode(ropes, batch, std::mem::take(logits));
        }
        runner.forward(ropes, batch, observer)
    }

    /// Waits briefly for a part that another engine is computing, for a constraint, or for a disk. Called when there is
    /// nothing else to do.
    fn pause(&self) {
        if let Some(waiter) = self.running.iter().find_map(|live| live.prompt.waiter()) {
            waiter.wait_for(PAUSE);
        } else if !self.wait_for_constraint(PAUSE) {
            self.wait_for_disk(PAUSE);
        }
    }
}

/// Gives each planned input its own slots, with permits that do not depend on other requests.
fn divide_slots(runner: &Runner, running: &[LiveRequest], plan: &mut StepPlan) {
    let StepPlan { feeds, batch, slots, .. } = plan;
    let mut at = 0;
    for (feed, input) in feeds.iter().zip(batch).filter(|(_, input)| input.slots.is_empty()) {
        let live = index_of(running, feed.rank).map(|at| &running[at]);
        let sequence = live.zip(feed.branch).and_then(|(live, branch)| live.branches[branch].sequence);
        let issued = sequence.and_then(|sequence| runner.caches.sequences.last_slots(sequence, feed.tokens));
        let issued = issued.unwrap_or_else(|| {
            let parts = slots.iter().map(|slots| slots.part(at..at + feed.tokens));
            Ok(parts.collect::<kvcore::Result<_>>()?)
        });
        // The pass returns an error for an input without slots.
        input.set_slots(issued.unwrap_or_default());
        at += feed.tokens;
    }
    slots.clear();
}
