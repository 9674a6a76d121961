//! Events: points in the order of a stream.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::thread::Builder;

use kvcore::{DoneCall, Event, Result};
use parking_lot::Mutex;

use super::capture::{self, uncapturable};
use crate::bindings::types as sys;
use crate::device::Device;

/// An event of ACL that may be recorded again, destroyed with the value. Streams hold those that their work records or
/// waits for until that work is done, because ACL destroys at once.
pub(crate) struct RawEvent {
    raw: sys::aclrtEvent,
    device: Arc<Device>,
    /// Number of the capture that the event is part of, or 0. Such an event never happens.
    capture: u64,
}

// SAFETY: events may be used from any thread that has the device's context current.
unsafe impl Send for RawEvent {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawEvent {}

impl fmt::Debug for RawEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an event on {:?}", self.device)
    }
}

impl RawEvent {
    /// Creates an event that streams and the host can wait for. The device's context is current.
    pub(super) fn create(device: &Arc<Device>) -> Result<Self> {
        Self::of_capture(device, 0)
    }

    /// Creates an event of a capture, or of none if its number is 0. The device's context is current.
    pub(super) fn of_capture(device: &Arc<Device>, capture: u64) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // Events of this kind are recorded again as those of CUDA are, and take none of the hardware's numbers.
        let flags = sys::ACL_EVENT_SYNC | sys::ACL_EVENT_TIME_LINE;
        // SAFETY: `raw` is a place for the answer.
        device.check(unsafe { device.library.acl.aclrtCreateEventExWithFlag(&raw mut raw, flags) })?;
        Ok(Self { raw, device: Arc::clone(device), capture })
    }

    /// Records the event behind the work of a stream. The device's context is current.
    pub(super) fn record(&self, stream: sys::aclrtStream) -> Result<()> {
        // SAFETY: event and stream are alive and of one device.
        self.device.check(unsafe { self.device.library.acl.aclrtRecordEvent(self.raw, stream) })
    }

    /// Makes a stream wait for the event. The context of the stream's device is current.
    pub(super) fn hold_back(&self, device: &Device, stream: sys::aclrtStream) -> Result<()> {
        // SAFETY: event and stream are alive.
        device.check(unsafe { device.library.acl.aclrtStreamWaitEvent(stream, self.raw) })
    }

    /// Blocks the host until the event is done.
    pub(super) fn wait(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive and recorded.
        self.device.check(unsafe { self.device.library.acl.aclrtSynchronizeEvent(self.raw) })
    }

    /// Returns whether the event is done. The device's context is current.
    pub(super) fn is_done(&self) -> Result<bool> {
        let mut status = sys::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: the event is alive, and `status` is a place for the answer.
        let code = unsafe { self.device.library.acl.aclrtQueryEventStatus(self.raw, &raw mut status) };
        self.device.check(code)?;
        Ok(status == sys::ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind_lost() else { return };
        // SAFETY: the event is alive, and the work that uses it is done.
        unsafe { self.device.library.acl.aclrtDestroyEvent(self.raw) };
    }
}

/// A point in the order of an [`AscendStream`](super::AscendStream).
#[derive(Debug)]
pub struct AscendEvent(pub(super) Arc<RawEvent>);

impl AscendEvent {
    /// Returns the device whose stream has recorded the event.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Returns the number of the capture that the event is part of, or 0.
    pub(super) fn capture(&self) -> u64 {
        self.0.capture
    }

    /// Refuses a call that cannot be captured, if the event is part of a capture.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`](kvcore::Error::Unsupported), which names the call.
    pub(crate) fn refuse_capture(&self, what: &str) -> Result<()> {
        capture::refuse(self.0.capture, what)
    }

    /// Makes a stream of a device wait for the event. The device's context is current.
    pub(crate) fn hold_back(&self, device: &Device, stream: sys::aclrtStream) -> Result<()> {
        self.0.hold_back(device, stream)
    }
}

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
        let Ok(_bound) = self.0.device.bind() else { return true }; // what a lost device had to do never will be done
        self.0.is_done().unwrap_or(true)
    }

    /// A thread waits: ACL need not begin work that nobody waits for.
    fn on_done(self: Arc<Self>, call: DoneCall) {
        if self.0.capture != 0 || self.is_done() {
            return call(self.wait());
        }
        let call = Arc::new(Mutex::new(Some(call)));
        let (event, later) = (Arc::clone(&self), Arc::clone(&call));
        let tell = |event: &Self, call: &Mutex<Option<DoneCall>>| {
            let call = call.lock().take();
            if let Some(call) = call {
                call(event.wait());
            }
        };
        let waits = Builder::new().name("kv-event".to_owned()).spawn(move || tell(&event, &later));
        if waits.is_err() {
            tell(&self, &call);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
