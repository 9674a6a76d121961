//! Graphs: captured work, and its replay with other lists.

use std::fmt;
use std::sync::Arc;

use kvcore::{CounterSnapshot, Counters, Error, Graph, ReplayCheck, Result, StepInputs};

use super::capture::{self, GraphList, Recording};
use super::flight::Held;
use super::{StreamState, Way, copy};
use crate::bindings::types as sys;
use crate::dense::ActivationMemory;
use crate::device::Device;

/// Replays that may be enqueued and not done. The host waits for the oldest before it enqueues another.
const AHEAD: usize = 16;

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
    lists: Vec<GraphList>,
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

impl CapturedWork {
    /// Returns the lists of a step.
    fn contents(&self, step: &StepInputs) -> Result<Vec<Vec<u8>>> {
        self.checks.iter().try_for_each(|check| check.check(step))?;
        let list = |list: &GraphList| {
            let made = (list.make)(step)?;
            if made.len() == list.bytes {
                return Ok(made);
            }
            let (expected, got) = (list.bytes, made.len());
            Err(Error::Mismatch { what: "bytes of a list of a captured step", expected, got })
        };
        self.lists.iter().map(list).collect()
    }
}

impl Graph for AscendGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let StreamState { device, raw, queue, .. } = &*self.stream;
        let _pass = capture::outside(&self.stream, "a replay")?;
        let contents = self.work.contents(inputs)?;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        queue.in_flight.wait_until(AHEAD)?;
        let mut staged = Vec::with_capacity(contents.len());
        for bytes in &contents {
            staged.push(queue.uploads.stage(device, bytes)?);
            // Held at once, so that the next list does not take the same memory.
            queue.in_flight.hold(Held::Upload(Arc::clone(&staged[staged.len() - 1])));
        }
        queue.in_flight.hold(Held::Graph(Arc::clone(&self.work)));
        for (list, upload) in self.work.lists.iter().zip(&staged).filter(|(list, _)| list.bytes > 0) {
            // The graph's memory has room for the bytes; its last replay reads it earlier in the order of the stream.
            copy(device, *raw, list.storage.address(), upload.host(), list.bytes, Way::Up)?;
        }
        // SAFETY: graph and stream are alive, and the graph is held until it is done.
        device.check(unsafe { device.library.acl.aclmdlRIExecuteAsync(self.work.graph, *raw) })?;
        device.counters.add_all(&self.counts);
        Counters::add(&device.counters.plan_bytes, contents.iter().map(Vec::len).sum());
        queue.in_flight.cut(device, *raw)
    }
}
