//! Events: points in the order of a stream.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUresult};
use kvcore::{DoneCall, Event, Result, call_when_done};

use super::StreamState;
use super::capture::{self, uncapturable};

/// A point in the order of a [`CudaStream`](super::CudaStream).
pub struct CudaEvent {
    raw: CUevent,
    stream: Arc<StreamState>,
    /// Number of the capture that the event is part of, or 0. Such an event never happens.
    capture: u64,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as for `Send`.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent on {:?}", self.stream.device)
    }
}

impl CudaEvent {
    /// Records an event on a stream.
    pub(super) fn record(stream: &Arc<StreamState>) -> Result<Self> {
        capture::with(stream, |recording| {
            let device = &stream.device;
            let _bound = device.bind()?;
            let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|error| device.refused(error))?;
            let capture = recording.map_or(0, |recording| recording.number());
            let event = Self { raw, stream: Arc::clone(stream), capture };
            // SAFETY: both are alive and of one device.
            unsafe { result::event::record(raw, stream.raw) }.map_err(|error| device.refused(error))?;
            Ok(event)
        })
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Returns the stream on which the event was recorded.
    pub(crate) fn stream(&self) -> &Arc<StreamState> {
        &self.stream
    }

    pub(super) fn capture(&self) -> u64 {
        self.capture
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let Ok(_bound) = self.stream.device.bind() else { return };
        // SAFETY: the event is alive; the driver frees it when no stream waits for it any more.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

impl Event for CudaEvent {
    fn wait(&self) -> Result<()> {
        if self.capture != 0 {
            return Err(uncapturable("a wait of the host for an event"));
        }
        let device = &self.stream.device;
        let _bound = device.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(|error| device.refused(error))
    }

    fn is_done(&self) -> bool {
        if self.capture != 0 {
            return false;
        }
        let device = &self.stream.device;
        let Ok(_bound) = device.bind() else { return true }; // what a lost device had to do never will be done
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => false,
            Err(error) => {
                device.refused(error);
                true
            }
            Ok(()) => true,
        }
    }

    fn on_done(self: Arc<Self>, call: DoneCall) {
        // An event of a capture is never done, and a wait for it says so.
        if self.capture == 0 { call_when_done(self, call) } else { call(self.wait()) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
