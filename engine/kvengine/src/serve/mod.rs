//! Answering many requests at once.
//!
//! ```text
//!  submit ──► waiting, by priority and arrival
//!                │ admitted: there is room for its first piece above the watermark
//!                ▼
//!             running ── each step: one token for each answer, then pieces of prompts, up to `step_tokens`, in one pass
//!                │   ▲
//!                │   └── admitted again: what it has computed is found in the caches or computed again
//!                ▼
//!   out of blocks: the last in the order of service gives its blocks back, or takes them to host memory, and waits
//! ```
//!
//! A request is in one of two lists. What it needs next follows from its state alone: [`Parts`] are the documents of a chunked prompt,
//! a [`Branch`](live::Branch) is one sample, with its tokens and the number of those that are computed. A token that is sampled is one more token to
//! compute. A request that gives way loses what is computed, unless host memory takes it, and keeps its tokens.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{LayerRopes, Logits, SequenceInput, StepBatch, WriteSlots};
use kvmodel::{Forward, LogitRows, Observer};

mod answer;
mod beams;
mod draft;
mod layered;
mod live;
mod pages;
mod parts;
mod plan;
mod samples;
mod submit;
mod swap;

pub use answer::{Answer, AnswerEvent, RequestId};
pub use beams::BeamSearch;
use live::{Live, Parts};
pub use pages::SparseDecode;
use plan::{Feed, Plan};
pub use swap::PreemptionCosts;
pub(crate) use swap::SwapSpace;

use crate::config::Scheduling;
use crate::engine::Engine;
use crate::error::{Error, Result};

/// The time for which a step waits for other engines' work when it has none of its own.
const PAUSE: Duration = Duration::from_millis(2);

/// The largest limit that a step counts with: more than a pass can have, and far from overflow in sums.
const MANY: usize = 1 << 28;

/// The place of a request in the order of service: the smaller, the earlier.
type Rank = (Reverse<i32>, RequestId);

/// The requests of an engine.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    limits: Scheduling,
    next: u64,
    waiting: BTreeMap<Rank, Live>,
    /// In the order of service.
    running: Vec<Live>,
    plan: Plan,
    /// Memory of the order of a step.
    ranks: Vec<Rank>,
    /// Memory of the logits of a pass.
    logits: Vec<f32>,
    preemptions: u64,
    swaps: u64,
}

/// An observer of one of the requests.
struct Watch<'a> {
    id: Option<RequestId>,
    observer: &'a mut dyn Observer,
    unwatched: (),
}

impl Watch<'_> {
    /// Returns the observer of a request.
    fn of(&mut self, rank: Rank) -> &mut dyn Observer {
        if self.id == Some(rank.1) { self.observer } else { &mut self.unwatched }
    }
}

/// The work of a step, and what it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step {
    /// The number of tokens that were computed.
    pub tokens: usize,
    /// The number of requests that have blocks after the step.
    pub running: usize,
    /// The number of requests that wait for some.
    pub waiting: usize,
    /// The number of times, since the engine was made, that a request gave its blocks to others.
    pub preemptions: u64,
    /// The number of those times that the blocks went to host memory, from where they come back.
    pub swaps: u64,
}

/// The time of all steps since the engine was made, by where it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTimes {
    /// In the model: passes, and what strategies ask of it before they choose.
    pub model: Duration,
    /// In the engine: planning, look-ups, slots, sampling, and sending tokens.
    pub engine: Duration,
}

impl Step {
    /// Returns whether every request has ended.
    pub fn is_idle(&self) -> bool {
        self.running + self.waiting == 0
    }
}

impl Scheduler {
    pub(crate) fn new(limits: Scheduling) -> Self {
        let limits = Scheduling {
            step_tokens: limits.step_tokens.clamp(1, MANY),
            running: limits.running.clamp(1, MANY),
            watermark: limits.watermark.min(MANY),
        };
        Self { limits, ..Self::default() }
    }

    pub(crate) fn limits(&self) -> Scheduling {
        self.limits
    }

    fn report(&self, tokens: usize) -> Step {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        Step { tokens, running, waiting, preemptions: self.preemptions, swaps: self.swaps }
    }
}

impl Engine {
    /// Computes one pass for the requests that were submitted: a token for each answer, and pieces of prompts. Errors of single requests
    /// go to their answers.
    ///
    /// # Errors
    /// Returns [`Error::Asleep`] while the pool of sequences [sleeps](Self::sleep).
    pub fn step(&mut self) -> Result<Step> {
        self.watched(&mut Watch { id: None, observer: &mut (), unwatched: () })
    }

    /// Returns where the time of steps went.
    pub fn step_times(&self) -> StepTimes {
        self.times
    }

    /// Computes one pass as [`step`](Self::step) does. `observer` is told of the layers of a request's prefill, and may stop the request.
    pub(crate) fn step_watched(&mut self, id: RequestId, observer: &mut dyn Observer) -> Result<Step> {
        self.watched(&mut Watch { id: Some(id), observer, unwatched: () })
    }

    fn watched(&mut self, watch: &mut Watch<'_>) -> Result<Step> {
        self.check_awake()?;
        let (started, before) = (Instant::now(), self.times.model);
        let mut scheduler = std::mem::take(&mut self.scheduler);
        let tokens = scheduler.step(self, watch);
        self.scheduler = scheduler;
        let of_model = self.times.model.saturating_sub(before);
        self.times.engine += started.elapsed().saturating_sub(of_model);
        if tokens == 0 {
            self.scheduler.pause();
        }
        Ok(self.scheduler.report(tokens))
    }

    /// Ends the requests that were cancelled, without a pass.
    pub(crate) fn let_go(&mut self) {
        let mut scheduler = std::mem::take(&mut self.scheduler);
        scheduler.end_some(self);
        self.scheduler = scheduler;
    }
}

impl Scheduler {
    fn step(&mut self, engine: &mut Engine, watch: &mut Watch<'_>) -> usize {
        self.end_some(engine);
        let mut plan = std::mem::take(&mut self.plan);
        self.plan(engine, &mut plan, watch);
        let mut tokens = std::mem::take(&mut plan.blended);
        while !plan.feeds.is_empty() {
            tokens += self.pass(engine, &mut plan, watch);
        }
        for (rank, error) in plan.failed.drain(..) {
            if let Some(at) = self.place(rank) {
                self.fail(engine, at, error);
            }
        }
        self.plan = plan;
        self.leave(engine);
        tokens
    }

    /// Ends what was cancelled, is too late or was declared complete.
    fn end_some(&mut self, engine: &mut Engine) {
        let now = engine.clock.millis();
        let fate = |live: &Live| {
            if live.sender.is_cancelled() {
                return Some(Error::Cancelled);
            }
            let limit =
                live.request.time_limit.filter(|_| live.deadline.is_some_and(|deadline| now >= deadline));
            limit.map(|limit| Error::TimeOut { limit })
        };
        let late: Vec<_> =
            self.waiting.iter().filter_map(|(&rank, live)| Some((rank, fate(live)?))).collect();
        for (rank, error) in late {
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
                self.fail(engine, at, error);
                continue;
            }
            self.running[at].end_complete();
            at += 1;
        }
        self.leave(engine);
    }

    /// Ends a running request with an error.
    fn fail(&mut self, engine: &mut Engine, at: usize, error: Error) {
        let mut live = self.running.remove(at);
        engine.withdraw(&mut live);
        live.sender.fail(error);
    }

    /// Lets go of the requests and samples that are over.
    fn leave(&mut self, engine: &mut Engine) {
        self.running.retain_mut(|live| {
            if live.is_over() {
                engine.withdraw(live);
                return false;
            }
            for branch in live.branches.iter_mut().filter(|branch| branch.over) {
                if let Some(own) = branch.own.take() {
                    drop(engine.caches.free(own));
                }
            }
            true
        });
    }

    /// Computes those inputs of a plan that may be in one pass: of requests in the regime of the first. Returns the number of tokens.
    fn pass(&mut self, engine: &mut Engine, plan: &mut Plan, watch: &mut Watch<'_>) -> usize {
        let Some(first) = plan.feeds.first().and_then(|feed| self.place(feed.rank)) else {
            plan.feeds.clear();
            plan.batch.clear();
            return 0;
        };
        let ropes = self.running[first].ropes.clone();
        let together = |feed: &Feed| {
            self.place(feed.rank).is_some_and(|at| self.running[at].same_regime(&self.running[first]))
        };
        let (mut feeds, mut batch) = (std::mem::take(&mut plan.feeds), std::mem::take(&mut plan.batch));
        let mut slots = std::mem::take(&mut plan.slots);
        if !feeds.iter().all(together) {
            self.divide(engine, &feeds, &std::mem::take(&mut slots), &mut batch);
            let rows: Vec<_> = feeds.into_iter().zip(batch).collect();
            let (first, others): (Vec<_>, Vec<_>) = rows.into_iter().partition(|(feed, _)| together(feed));
            (feeds, batch) = first.into_iter().unzip();
            (plan.feeds, plan.batch) = others.into_iter().unzip();
        }
        let tokens: usize = feeds.iter().map(|feed| feed.tokens).sum();
        let single = feeds.iter().all(|feed| feed.rank == feeds[0].rank);
        let observer = if single { watch.of(feeds[0].rank) } else { &mut () };
        let started = Instant::now();
        let inputs = StepBatch { inputs: &batch, slots: &slots };
        let result = self.compute(engine, &ropes, &feeds, inputs, observer);
        engine.times.model += started.elapsed();
        if tokens >= 2 * feeds.len() {
            engine.swap.computed(tokens, started.elapsed());
        }
        match result {
            Ok(pass) => {
                let (mut row, mut counted) = (0, 0);
                for (feed, input) in feeds.iter().zip(batch.drain(..)) {
                    let wanted = match input.logits {
                        Logits::None => 0,
                        Logits::Last => 1,
                        Logits::All => feed.tokens,
                    };
                    let range = row..row + wanted;
                    row = range.end;
                    let logits = pass.logits.as_ref().filter(|_| wanted > 0).map(|rows| (rows, range));
                    let Some(at) = self.place(feed.rank) else { continue };
                    let live = &mut self.running[at];
                    // Shares by tokens, which add up to the whole.
                    let share = |counted: usize| {
                        (u128::from(pass.flops) * counted as u128 / tokens.max(1) as u128) as u64
                    };
                    let before = share(counted);
                    counted += feed.tokens;
                    if feed.branch.is_none_or(|branch| live.branches[branch].answer().is_empty()) {
                        live.costs.flops += share(counted) - before;
                    }
                    if let Err(error) = engine.after(live, feed, input, logits) {
                        plan.failed.push((feed.rank, error));
                    }
                }
                self.logits = pass.logits.map(LogitRows::into_values).unwrap_or_default();
            }
            Err(error) => {
                if single {
                    plan.failed.push((feeds[0].rank, error));
                } else {
                    let error = Arc::new(error);
                    let of = |feed: &Feed| (feed.rank, Error::Pass(Arc::clone(&error)));
                    plan.failed.extend(feeds.iter().map(of));
                }
            }
        }
        if plan.feeds.is_empty() {
            feeds.clear();
            batch.clear();
            (plan.feeds, plan.batch, plan.slots) = (feeds, batch, slots);
        }
        tokens
    }

    /// Gives each input that has none slots of its own, whose permits end with those of no other request.
    fn divide(&self, engine: &Engine, feeds: &[Feed], slots: &[WriteSlots], batch: &mut [SequenceInput]) {
        let mut at = 0;
        for (feed, input) in feeds.iter().zip(batch).filter(|(_, input)| input.slots.is_empty()) {
            let live = self.place(feed.rank).map(|at| &self.running[at]);
            let own = live.zip(feed.branch).and_then(|(live, branch)| live.branches[branch].own);
            let issued =
                own.and_then(|own| engine.caches.last_slots(own, feed.tokens)).unwrap_or_else(|| {
                    Ok(slots
                        .iter()
                        .map(|slots| slots.part(at..at + feed.tokens))
                        .collect::<kvcore::Result<_>>()?)
                });
            // A pass refuses an input without slots.
            input.set_slots(issued.unwrap_or_default());
            at += feed.tokens;
        }
    }

    /// Runs one pass: layer by layer if somebody looks at its queries, a decode step, for which there may be a graph, if every input is one token of
    /// an answer.
    fn compute(
        &mut self,
        engine: &mut Engine,
        ropes: &LayerRopes,
        feeds: &[Feed],
        batch: StepBatch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Forward> {
        if let Some(result) = self.layered_pass(engine, ropes, feeds, batch, observer) {
            return result;
        }
        let answers = |feed: &Feed| {
            let live = self.place(feed.rank).map(|at| &self.running[at]);
            let branch = feed.branch.zip(live).map(|(branch, live)| &live.branches[branch]);
            feed.tokens == 1 && branch.is_some_and(|branch| !branch.answer().is_empty())
        };
        if feeds.iter().all(answers) {
            return engine.decode(ropes, batch, std::mem::take(&mut self.logits));
        }
        engine.forward(ropes, batch, observer)
    }

    /// Returns the place of a running request.
    fn place(&self, rank: Rank) -> Option<usize> {
        self.running.binary_search_by_key(&rank, Live::rank).ok()
    }

    /// Waits a moment for what another engine computes, since there is nothing else to do.
    fn pause(&self) {
        let waiter = self.running.iter().find_map(|live| match &live.parts {
            Parts::Missing { assembly, .. } => assembly.waiters().next(),
            _ => None,
        });
        if let Some(waiter) = waiter {
            waiter.wait_for(PAUSE);
        }
    }
}
