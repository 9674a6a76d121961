//! Graphs: captured work, and its replay with other lists.

use std::fmt;
use std::sync::Arc;

use kvcore::{CounterSnapshot, Counters, Graph, ReplayCheck, Result, StepInputs};

use super::capture::{self, GraphLists, Recording};
use super::flight::Held;
use super::{StreamState, Way, copy};
use crate::bindings::types as sys;
use crate::dense::ActivationMemory;
use crate::device::Device;

/// Replays that may be enqueued and not done. The host waits for the oldest before it enqueues another.
const AHEAD: usize = 8;

/// A captured step of an [`AscendStream`](super::AscendStream).
pub(super) struct AscendGraph {
    stream: Arc<StreamState>,
    work: Arc<CapturedWork>,
    /// What the captured operations add to the counters.
    counts: CounterSnapshot,
}

/// ACL's graph and all memory that it touches. Each replay holds it until it is done.
pub(crate) struct CapturedWork {
    graph: sys::aclmdlRI,
    device: Arc<Device>,
    lists: GraphLists,
    checks: Vec<ReplayCheck>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    held: Vec<Held>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    activations: Vec<(usize, Arc<ActivationMemory>)>,
}

// SAFETY: ACL's graphs may be run and destroyed from any thread that has the device's context current; runs are ordered by
// the stream's lock.
unsafe impl Send for CapturedWork {}
// SAFETY: as for `Send`.
unsafe impl Sync for CapturedWork {}

impl fmt::Debug for AscendGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendGraph on {:?}", self.stream.device)
    }
}

impl fmt::Debug for CapturedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapturedWork on {:?}", self.device)
    }
}

impl Drop for CapturedWork {
    fn drop(&mut self) {
        // Its runs are done, because they hold it.
        capture::destroy(&self.device, self.graph);
    }
}

impl AscendGraph {
    /// Makes a graph of a capture that has ended.
    pub(super) fn new(
        stream: &Arc<StreamState>,
        graph: sys::aclmdlRI,
        recording: Recording,
        counts: CounterSnapshot,
    ) -> Self {
        let Recording { lists, checks, held, activations, .. } = recording;
        let device = Arc::clone(&stream.device);
        let work = CapturedWork { graph, device, lists, checks, held, activations };
        Self { stream: Arc::clone(stream), work: Arc::new(work), counts }
    }
}

impl Graph for AscendGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let StreamState { device, raw, queue, .. } = &*self.stream;
        let _pass = capture::outside(&self.stream, "a replay")?;
        let work = &self.work;
        work.checks.iter().try_for_each(|check| check.check(inputs))?;
        let contents = work.lists.contents(inputs)?;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        queue.in_flight.wait_until(AHEAD)?;
        let mut staged = Vec::with_capacity(contents.len());
        for (_, bytes) in &contents {
            staged.push(queue.uploads.stage(device, bytes)?);
        }
        queue.in_flight.hold(Held::Graph(Arc::clone(work)));
        for ((to, bytes), upload) in contents.iter().zip(staged).filter(|((_, bytes), _)| !bytes.is_empty()) {
            queue.in_flight.hold(Held::Upload(Arc::clone(&upload)));
            // The graph's memory has room for the bytes; its last replay reads it earlier in the order of the stream.
            copy(device, *raw, *to, upload.host(), bytes.len(), Way::Up)?;
        }
        // SAFETY: graph and stream are alive, and the graph is held until it is done.
        device.check(unsafe { device.library.acl.aclmdlRIExecuteAsync(work.graph, *raw) })?;
        device.counters.add_all(&self.counts);
        Counters::add(&device.counters.plan_bytes, contents.iter().map(|(_, bytes)| bytes.len()).sum());
        queue.in_flight.cut(device, *raw)
    }
}
