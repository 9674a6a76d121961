//! ACL's stream, and what its calls share.

use std::any::Any;
use std::sync::Arc;

use kvcore::Result;
use kvcore::device::queue::{CaptureSide, InFlight, LoanMemory, Mark};
use parking_lot::Mutex;

use super::event::AclEvent;
use super::list::ListPool;
use super::scratch::{SharedScratch, WorkScratch};
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::memory::AscendStorage;

/// A stream of ACL with the memory that its work uses.
///
/// # Drop behaviour
/// Waits for the enqueued work, because its memory is freed with the stream.
pub(crate) struct AclStream {
    pub(crate) npu: Arc<Npu>,
    pub(crate) raw: sys::aclrtStream,
    /// Keeps a lent stream alive. None for a stream that the backend created.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    pub(crate) memory: Mutex<StreamMemory>,
    pub(crate) side: CaptureSide,
    /// Memory of the graphs that were captured here.
    pub(super) graphs: Mutex<SharedScratch>,
}

// SAFETY: ACL's streams may be used from any thread that has the device's context current; the order of calls
// is kept by the lock on `memory`.
unsafe impl Send for AclStream {}
// SAFETY: as for `Send`.
unsafe impl Sync for AclStream {}

/// Memory of activations: taken by steps, returned when the last view of it is dropped.
pub(crate) type NpuActivations = LoanMemory<AscendStorage>;

/// Memory that the work of a stream uses.
#[derive(Debug, Default)]
pub(crate) struct StreamMemory {
    pub(crate) in_flight: InFlight<AclEvent>,
    pub(crate) lists: ListPool,
    pub(super) scratch: WorkScratch,
}

impl AclStream {
    /// Creates a stream of the backend's own.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub(crate) fn new(npu: &Arc<Npu>) -> Result<Self> {
        let _current = npu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::ACL_STREAM_FAST_LAUNCH | sys::ACL_STREAM_FAST_SYNC;
        // SAFETY: `raw` is a place for the answer.
        npu.check(unsafe { npu.library.acl.aclrtCreateStreamWithConfig(&raw mut raw, 0, flags) })?;
        Ok(Self::over(npu, raw, None))
    }

    /// Wraps a stream of this device: the caller's, which `owner` keeps alive, or one to destroy when the
    /// value is dropped.
    pub(crate) fn over(
        npu: &Arc<Npu>,
        raw: sys::aclrtStream,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        Self {
            npu: Arc::clone(npu),
            raw,
            owner,
            memory: Mutex::default(),
            side: CaptureSide::default(),
            graphs: Mutex::default(),
        }
    }

    /// Waits for the stream, and drops what its work held. The device's context is current.
    pub(crate) fn synchronize(&self, memory: &mut StreamMemory) -> Result<()> {
        // SAFETY: the stream is alive, and its context is current.
        let waited = self.npu.check(unsafe { self.npu.library.acl.aclrtSynchronizeStream(self.raw) });
        // A refused wait does not show that the work is done: its memory stays held.
        if waited.is_ok() || self.npu.is_lost() {
            memory.in_flight.clear();
        }
        waited
    }
}

/// The device's context is current at each call but `wait`.
impl Mark for AclEvent {
    type Stream = AclStream;

    fn create(stream: &AclStream) -> Result<Self> {
        Self::create(&stream.npu, 0)
    }

    fn record(&self, stream: &AclStream) -> Result<()> {
        self.record(stream.raw)
    }

    fn is_done(&self) -> Result<bool> {
        self.is_done()
    }

    fn wait(&self) -> Result<()> {
        self.wait()
    }
}

impl Drop for AclStream {
    fn drop(&mut self) {
        let Ok(_current) = self.npu.bind_lost() else { return };
        let acl = &self.npu.library.acl;
        let memory = self.memory.get_mut();
        // SAFETY: the stream is alive.
        let waited = self.npu.check(unsafe { acl.aclrtSynchronizeStream(self.raw) });
        if waited.is_err() && !self.npu.is_lost() && self.owner.is_some() {
            // The owner's stream still has the work, and nothing waits for it here: its memory is never
            // freed.
            std::mem::forget(std::mem::take(memory));
            return;
        }
        memory.in_flight.clear();
        if self.owner.is_none() {
            // SAFETY: the backend created the stream, and destroys it once.
            unsafe { acl.aclrtDestroyStream(self.raw) };
        }
    }
}
