//! The memory and handles that enqueued work uses.

use std::fmt;
use std::sync::Arc;

use kvcore::{ReplayCheck, Storage};

use super::activations::ActivationPool;
use super::event::AclEvent;
use super::list::ListMemory;
use super::replay::ReplayLists;
use crate::bindings::types as sys;
use crate::device::Npu;

/// Something that enqueued work uses, held until the work is done.
#[derive(Debug, Clone)]
pub(crate) enum Used {
    Storage(Arc<dyn Storage>),
    List(Arc<ListMemory>),
    Event(Arc<AclEvent>),
    Graph(Arc<CapturedSteps>),
}

impl Used {
    /// Returns an address that tells one use from another.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Storage(storage) => Arc::as_ptr(storage).cast::<u8>() as usize,
            Self::List(list) => Arc::as_ptr(list) as usize,
            Self::Event(event) => Arc::as_ptr(event) as usize,
            Self::Graph(graph) => Arc::as_ptr(graph) as usize,
        }
    }
}

/// ACL's graph, and all memory that it touches. Each replay holds it until the replay is done.
pub(crate) struct CapturedSteps {
    pub(super) graph: sys::aclmdlRI,
    pub(super) npu: Arc<Npu>,
    pub(super) lists: ReplayLists,
    pub(super) checks: Vec<ReplayCheck>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    pub(super) used: Vec<Used>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    pub(super) activations: Vec<(usize, Arc<ActivationPool>)>,
}

// SAFETY: ACL's graphs may be run and destroyed from any thread that has the device's context current; runs are ordered by
// the stream's lock.
unsafe impl Send for CapturedSteps {}
// SAFETY: as for `Send`.
unsafe impl Sync for CapturedSteps {}

impl fmt::Debug for CapturedSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapturedSteps on {:?}", self.npu)
    }
}

impl Drop for CapturedSteps {
    fn drop(&mut self) {
        // Its runs are done, because they hold it.
        destroy(&self.npu, self.graph);
    }
}

/// Destroys a graph that no enqueued work runs.
pub(super) fn destroy(npu: &Npu, graph: sys::aclmdlRI) {
    if let Ok(_current) = npu.bind_lost() {
        // SAFETY: the caller owns the graph, and its runs are done.
        unsafe { npu.library.acl.aclmdlRIDestroy(graph) };
    }
}
