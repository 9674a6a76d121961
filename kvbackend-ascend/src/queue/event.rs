//! Events: points in a stream's order of work.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::thread::Builder;

use kvcore::{DoneCall, Event, Result};
use parking_lot::Mutex;

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::uncapturable;

// Decision: docs/decisions/backend-ascend.md#streams-keep-events-alive
/// An ACL event that may be recorded more than once. Streams hold the events that their work records or waits
/// for until that work is done, because ACL destroys events immediately.
pub(crate) struct AclEvent {
    raw: sys::aclrtEvent,
    pub(crate) npu: Arc<Npu>,
    /// The ID of the capture that the event belongs to, or 0 if there is none. An event of a capture never
    /// completes.
    pub(crate) capture: u64,
}

// SAFETY: events may be used from any thread on which the device's context is current.
unsafe impl Send for AclEvent {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for AclEvent {}

impl fmt::Debug for AclEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an event on {:?}", self.npu)
    }
}

impl AclEvent {
    /// Creates an event that streams and the host can wait for. If `capture` is not 0, the event belongs to
    /// that capture. The device's context must be current.
    pub(crate) fn create(npu: &Arc<Npu>, capture: u64) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // Events of this kind may be recorded again, as in CUDA, and use none of the limited hardware event
        // IDs.
        let flags = sys::ACL_EVENT_SYNC | sys::ACL_EVENT_TIME_LINE;
        // SAFETY: `raw` is valid for writes.
        npu.check(unsafe { npu.library.acl.aclrtCreateEventExWithFlag(&raw mut raw, flags) })?;
        Ok(Self { raw, npu: Arc::clone(npu), capture })
    }

    /// Records the event after the work that is enqueued on a stream. The device's context must be current.
    pub(crate) fn record(&self, stream: sys::aclrtStream) -> Result<()> {
        // SAFETY: the event and the stream are alive and belong to the same device.
        self.npu.check(unsafe { self.npu.library.acl.aclrtRecordEvent(self.raw, stream) })
    }

    /// Makes a stream on `npu` wait for the event. The context of `npu` must be current.
    pub(crate) fn hold_back(&self, npu: &Npu, stream: sys::aclrtStream) -> Result<()> {
        // SAFETY: the event and the stream are alive.
        npu.check(unsafe { npu.library.acl.aclrtStreamWaitEvent(stream, self.raw) })
    }

    /// Blocks the host until the event is done.
    pub(super) fn wait(&self) -> Result<()> {
        let _current = self.npu.bind()?;
        // SAFETY: the event is alive and has been recorded.
        self.npu.check(unsafe { self.npu.library.acl.aclrtSynchronizeEvent(self.raw) })
    }

    /// Returns whether the event is done. The device's context must be current.
    pub(super) fn is_done(&self) -> Result<bool> {
        let mut status = sys::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: the event is alive, and `status` is valid for writes.
        let code = unsafe { self.npu.library.acl.aclrtQueryEventStatus(self.raw, &raw mut status) };
        self.npu.check(code)?;
        Ok(status == sys::ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }
}

impl Drop for AclEvent {
    fn drop(&mut self) {
        let Ok(_current) = self.npu.bind_lost() else { return };
        // SAFETY: the value owns the event, and the work that uses it is done.
        unsafe { self.npu.library.acl.aclrtDestroyEvent(self.raw) };
    }
}

/// A point in an [`AscendStream`](crate::AscendStream)'s order of work.
#[derive(Debug)]
pub struct AscendEvent(pub(crate) Arc<AclEvent>);

impl Event for AscendEvent {
    fn wait(&self) -> Result<()> {
        if self.0.capture != 0 {
            return Err(uncapturable("a wait of the host for an event"));
        }
        self.0.wait()
    }

    fn is_done(&self) -> bool {
        if self.0.capture != 0 {
            return false;
        }
        let Ok(_current) = self.0.npu.bind() else { return true }; // the work of a lost device never runs
        self.0.is_done().unwrap_or(true)
    }

    /// Calls `call` on a thread that waits for the event, because ACL may not start work that nothing waits
    /// for.
    fn on_done(self: Arc<Self>, call: DoneCall) {
        if self.0.capture != 0 || self.is_done() {
            return call(self.wait());
        }
        let call = Arc::new(Mutex::new(Some(call)));
        let (event, later) = (Arc::clone(&self), Arc::clone(&call));
        let finish = |event: &Self, call: &Mutex<Option<DoneCall>>| {
            let call = call.lock().take();
            if let Some(call) = call {
                call(event.wait());
            }
        };
        let waits = Builder::new().name("kv-event".to_owned()).spawn(move || finish(&event, &later));
        if waits.is_err() {
            finish(&self, &call);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
