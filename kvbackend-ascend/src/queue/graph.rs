//! Graphs: captured work, and its replay with other lists.

use std::fmt;
use std::sync::Arc;

use kvcore::{CounterSnapshot, Counters, Graph, Result, StepInputs};

use super::capture::{self, AclRecording};
use super::copies::{CopyDirection, copy};
use super::held::{CapturedSteps, Used};
use super::state::AclStream;
use crate::bindings::types as sys;

/// Replays that may be enqueued and not done. The host waits for the oldest before it enqueues another.
const AHEAD: usize = 8;

/// A captured step of a stream.
pub(crate) struct AscendGraph {
    stream: Arc<AclStream>,
    steps: Arc<CapturedSteps>,
    /// What the captured operations add to the counters.
    counts: CounterSnapshot,
}

impl fmt::Debug for AscendGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendGraph on {:?}", self.stream.npu)
    }
}

impl AscendGraph {
    /// Creates a graph from a capture that has ended.
    pub(crate) fn new(
        stream: &Arc<AclStream>,
        graph: sys::aclmdlRI,
        recording: AclRecording,
        counts: CounterSnapshot,
    ) -> Self {
        let AclRecording { lists, checks, used, activations, .. } = recording;
        let npu = Arc::clone(&stream.npu);
        let steps = CapturedSteps { graph, npu, lists, checks, used, activations };
        Self { stream: Arc::clone(stream), steps: Arc::new(steps), counts }
    }
}

impl Graph for AscendGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let AclStream { npu, raw, memory, .. } = &*self.stream;
        let _pass = capture::outside(&self.stream, "a replay")?;
        let steps = &self.steps;
        steps.checks.iter().try_for_each(|check| check.check(inputs))?;
        let contents = steps.lists.contents(inputs)?;
        let _current = npu.bind()?;
        let mut memory = memory.lock();
        memory.in_flight.wait_until(AHEAD)?;
        let mut staged = Vec::with_capacity(contents.len());
        for (_, bytes) in &contents {
            staged.push(memory.lists.stage(npu, bytes)?);
        }
        memory.in_flight.hold(Used::Graph(Arc::clone(steps)));
        for ((to, bytes), list) in contents.iter().zip(staged).filter(|((_, bytes), _)| !bytes.is_empty()) {
            memory.in_flight.hold(Used::List(Arc::clone(&list)));
            // The graph's memory has room for the bytes; its last replay reads it earlier in the order of the stream.
            copy(npu, *raw, *to, list.host(), bytes.len(), CopyDirection::ToDevice)?;
        }
        // SAFETY: graph and stream are alive, and the graph is held until it is done.
        npu.check(unsafe { npu.library.acl.aclmdlRIExecuteAsync(steps.graph, *raw) })?;
        npu.counters.add_all(&self.counts);
        Counters::add(&npu.counters.plan_bytes, contents.iter().map(|(_, bytes)| bytes.len()).sum());
        memory.in_flight.cut(npu, *raw)
    }
}
