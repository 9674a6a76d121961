//! An ACL stream, and the state that its calls share.

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

/// An ACL stream and the memory that its work uses.
///
/// # Drop behaviour
/// Waits for the enqueued work, because dropping the stream frees the memory that this work uses.
pub(crate) struct AclStream {
    pub(crate) npu: Arc<Npu>,
    pub(crate) raw: sys::aclrtStream,
    /// Keeps a lent stream alive. `None` if the backend created the stream.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    pub(crate) memory: Mutex<StreamMemory>,
    pub(crate) side: CaptureSide,
    /// The scratch memory of the graphs that were captured on this stream.
    pub(super) graphs: Mutex<SharedScratch>,
}

// SAFETY: ACL streams may be used from any thread on which the device's context is current; the lock on
// `memory` orders the calls.
unsafe impl Send for AclStream {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for AclStream {}

/// Memory that dense steps borrow for activations. The memory becomes available again when its last view is
/// dropped.
pub(crate) type NpuActivations = LoanMemory<AscendStorage>;

/// The memory that a stream's work uses.
#[derive(Debug, Default)]
pub(crate) struct StreamMemory {
    pub(crate) in_flight: InFlight<AclEvent>,
    pub(crate) lists: ListPool,
    pub(super) scratch: WorkScratch,
}

impl AclStream {
    /// Creates a stream that the backend owns.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(crate) fn new(npu: &Arc<Npu>) -> Result<Self> {
        let _current = npu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::ACL_STREAM_FAST_LAUNCH | sys::ACL_STREAM_FAST_SYNC;
        // SAFETY: `raw` is valid for writes.
        npu.check(unsafe { npu.library.acl.aclrtCreateStreamWithConfig(&raw mut raw, 0, flags) })?;
        Ok(Self::over(npu, raw, None))
    }

    /// Wraps an ACL stream of this device. `owner` keeps a stream of the caller alive; without an owner, the
    /// stream is destroyed when this value is dropped.
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

    /// Waits for the stream's work, and drops everything that this work held. The device's context must be
    /// current.
    pub(crate) fn synchronize(&self, memory: &mut StreamMemory) -> Result<()> {
        // SAFETY: the stream is alive, and its context is current.
        let waited = self.npu.check(unsafe { self.npu.library.acl.aclrtSynchronizeStream(self.raw) });
        // If the wait fails, the work may not be done, so its memory stays held.
        if waited.is_ok() || self.npu.is_lost() {
            memory.in_flight.clear();
        }
        waited
    }
}

/// The device's context must be current for every method except `wait`.
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
            // The owner's stream may still run the work, and nothing here can wait for it, so the memory is
            // leaked.
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
