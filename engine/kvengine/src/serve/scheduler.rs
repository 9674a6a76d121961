//! The scheduler, which holds an engine's requests and the memory that steps reuse.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvcore::PoolCounts;
use kvmodel::Observer;

use super::answer::RequestId;
use super::feed::StepPlan;
use super::known::KnownPrefixes;
use super::live::{LiveRequest, ServiceRank};
use super::swap::{PreemptionCosts, SwapSpace};
use crate::config::{EngineConfig, Scheduling};
use crate::constraint::ConstraintWorkers;

/// The maximum of each configured limit. It is larger than any pass, and small enough that sums do not
/// overflow.
const MANY: usize = 1 << 28;

/// The waiting and running requests of an engine.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(super) limits: Scheduling,
    /// The ID of the next request.
    pub(super) next: u64,
    pub(super) waiting: BTreeMap<ServiceRank, LiveRequest>,
    /// The running requests, in the order of service.
    pub(super) running: Vec<LiveRequest>,
    /// A request on its way between the lists, while code that may panic is called for it.
    pub(super) moving: Option<LiveRequest>,
    pub(super) plan: StepPlan,
    /// The ranks of the running requests. The memory is reused.
    pub(super) ranks: Vec<ServiceRank>,
    /// Memory for the logits of a pass, reused between passes.
    pub(super) logits: Vec<f32>,
    pub(super) times: StepTimes,
    pub(super) preemptions: u64,
    pub(super) swaps: u64,
    /// Host memory for preempted requests.
    pub(super) swap: SwapSpace,
    /// The blocks of prompts that were computed.
    pub(super) known: KnownPrefixes,
    /// The workers of constraints, once a request has one.
    pub(super) workers: Option<Arc<ConstraintWorkers>>,
}

/// An observer, and the ID of the request that it watches.
pub(super) struct Watch<'a> {
    pub(super) id: Option<RequestId>,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) unwatched: (),
}

impl Watch<'_> {
    /// Returns the observer for a request, which does nothing if the request is not watched.
    pub(super) fn of(&mut self, rank: ServiceRank) -> &mut dyn Observer {
        if self.id == Some(rank.1) { self.observer } else { &mut self.unwatched }
    }
}

/// The work done in a step, and the requests that are left after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step {
    /// The number of tokens that were computed.
    pub tokens: usize,
    /// The number of requests that are running after the step.
    pub running: usize,
    /// The number of requests that are waiting to be admitted after the step.
    pub waiting: usize,
    /// The number of preemptions since the engine was created.
    pub preemptions: u64,
    /// The number of preemptions that copied the blocks to host memory.
    pub swaps: u64,
}

impl Step {
    /// Returns true if every request has ended.
    pub fn is_idle(&self) -> bool {
        self.running + self.waiting == 0
    }
}

/// The total time of all steps since the engine was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepTimes {
    /// The time spent in the model: in passes, and in computing the evidence that recompute strategies need.
    pub model: Duration,
    /// The time spent in the engine: planning, lookups, slots, sampling, and sending tokens.
    pub engine: Duration,
}

impl Scheduler {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self::with_limits(config.scheduling, config.swap_memory)
    }

    /// Creates a scheduler with the same limits but without requests.
    pub(crate) fn like(&self) -> Self {
        Self::with_limits(self.limits, self.swap.memory())
    }

    fn with_limits(limits: Scheduling, swap_memory: usize) -> Self {
        let limits = Scheduling {
            step_tokens: limits.step_tokens.clamp(1, MANY),
            running: limits.running.clamp(1, MANY),
            watermark: limits.watermark.min(MANY),
        };
        Self {
            limits,
            next: 0,
            waiting: BTreeMap::new(),
            running: Vec::new(),
            moving: None,
            plan: StepPlan::default(),
            ranks: Vec::new(),
            logits: Vec::new(),
            times: StepTimes::default(),
            preemptions: 0,
            swaps: 0,
            swap: SwapSpace::new(swap_memory),
            known: KnownPrefixes::default(),
            workers: None,
        }
    }

    /// Replaces the measured costs of preemption with `costs`.
    pub(crate) fn set_preemption_costs(&mut self, costs: PreemptionCosts) {
        self.swap.set_costs(costs);
    }

    /// Returns the block counts of the host memory, if any was needed.
    pub(crate) fn swapped(&self) -> Option<PoolCounts> {
        self.swap.counts()
    }

    pub(crate) fn check_invariants(&self) -> std::result::Result<(), String> {
        self.swap.check_invariants()
    }

    /// Returns the limits.
    pub(crate) fn limits(&self) -> Scheduling {
        self.limits
    }

    /// Returns the total time of all steps.
    pub(crate) fn times(&self) -> StepTimes {
        self.times
    }

    pub(crate) fn report(&self, tokens: usize) -> Step {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        Step { tokens, running, waiting, preemptions: self.preemptions, swaps: self.swaps }
    }
}
