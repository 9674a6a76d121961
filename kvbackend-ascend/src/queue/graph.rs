//! Graphs: captured work, and its replay with new lists.

use std::fmt;
use std::sync::Arc;

use kvcore::device::queue::{Captured, CapturedStream, Hold};
use kvcore::{CounterSnapshot, Counters, Error, Graph, Result, StepInputs};

use super::copies::{CopyDirection, copy};
use super::state::AclStream;
use crate::bindings::types as sys;
use crate::device::Npu;

/// The maximum number of replays that may be enqueued but not yet done. At this limit, the host waits for the
/// oldest replay before it enqueues another one.
const AHEAD: usize = 8;

/// An ACL graph. Dropping this value destroys the graph, so no enqueued work may still run it.
pub(crate) struct AclGraph {
    pub(super) raw: sys::aclmdlRI,
    pub(super) npu: Arc<Npu>,
}

// SAFETY: ACL graphs may be run and destroyed from any thread on which the device's context is current; the
// stream's lock orders the runs.
unsafe impl Send for AclGraph {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for AclGraph {}

impl Drop for AclGraph {
    fn drop(&mut self) {
        if let Ok(_current) = self.npu.bind_lost() {
            // SAFETY: the value owns the graph. No replay is running, because a replay holds the graph until
            // it is done.
            unsafe { self.npu.library.acl.aclmdlRIDestroy(self.raw) };
        }
    }
}

/// A graph and all memory that it uses. Each replay holds both until it is done.
pub(super) struct CapturedWork {
    pub(super) graph: AclGraph,
    pub(super) captured: Captured<AclStream>,
}

/// A step captured on a stream.
pub(super) struct AscendGraph {
    pub(super) stream: Arc<AclStream>,
    pub(super) work: Arc<CapturedWork>,
    /// The operation counts of the capture, which each replay adds to the device's counters.
    pub(super) counts: CounterSnapshot,
}

impl fmt::Debug for AscendGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendGraph on {:?}", self.stream.npu)
    }
}

impl Graph for AscendGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let AclStream { npu, raw, memory, .. } = &*self.stream;
        let _pass = self.stream.outside("a replay")?;
        let captured = &self.work.captured;
        captured.check(inputs)?;
        let contents = captured.notes.lists.contents(|make, room| {
            let made = make(inputs)?;
            if made.len() != room.len() {
                return Err(Error::mismatch("bytes of a list of a captured step", room.len(), made.len()));
            }
            room.copy_from_slice(&made);
            Ok(())
        })?;
        let _current = npu.bind()?;
        let mut memory = memory.lock();
        memory.in_flight.wait_until(AHEAD)?;
        let mut staged = Vec::with_capacity(contents.len());
        for (_, bytes) in &contents {
            staged.push(memory.lists.stage(npu, bytes)?);
        }
        memory.in_flight.hold(Hold::Other(Arc::clone(&self.work) as _));
        for ((to, bytes), list) in contents.iter().zip(staged).filter(|((_, bytes), _)| !bytes.is_empty()) {
            memory.in_flight.hold(Hold::Other(Arc::clone(&list) as _));
            // The graph's memory has room for the bytes. In the stream's order, the previous replay reads
            // this memory before the copy overwrites it.
            copy(npu, *raw, *to, list.host(), bytes.len(), CopyDirection::ToDevice)?;
        }
        // SAFETY: the graph and the stream are alive, and the graph is held until the replay is done.
        npu.check(unsafe { npu.library.acl.aclmdlRIExecuteAsync(self.work.graph.raw, *raw) })?;
        npu.counters.add_all(&self.counts);
        Counters::add(&npu.counters.plan_bytes, contents.iter().map(|(_, bytes)| bytes.len()).sum());
        memory.in_flight.cut(&self.stream)
    }
}
