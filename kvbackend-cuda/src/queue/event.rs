//! Events: points in a stream's order of work.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUevent;
use kvcore::device::queue::{CapturedStream, Mark};
use kvcore::{DoneCall, Event, Result, call_when_done};

use super::capture::uncapturable;
use super::raw::RawEvent;
use super::state::CudaStreamState;

/// A point in a [`CudaStream`](crate::CudaStream)'s order of work.
pub struct CudaEvent {
    mark: RawEvent,
    stream: Arc<CudaStreamState>,
    /// The ID of the capture that the event belongs to, or 0 if there is none. An event of a capture never
    /// completes.
    capture: u64,
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent on {:?}", self.stream.on.device)
    }
}

impl CudaEvent {
    /// Records an event after the work that is enqueued on a stream.
    pub(crate) fn record(stream: &Arc<CudaStreamState>) -> Result<Self> {
        stream.recorded(|recording| {
            let _bound = stream.on.device.bind()?;
            let mark = RawEvent::create(&stream.on)?;
            mark.record(&stream.on)?;
            let capture = recording.map_or(0, |recording| recording.number());
            Ok(Self { mark, stream: Arc::clone(stream), capture })
        })
    }

    /// Returns the driver's event.
    pub(crate) fn raw(&self) -> CUevent {
        self.mark.raw()
    }

    /// Returns the stream on which the event was recorded.
    pub(crate) fn stream(&self) -> &Arc<CudaStreamState> {
        &self.stream
    }

    /// Returns the ID of the capture that the event belongs to, or 0 if there is none.
    pub(crate) fn capture(&self) -> u64 {
        self.capture
    }
}

impl Event for CudaEvent {
    fn wait(&self) -> Result<()> {
        if self.capture != 0 {
            return Err(uncapturable("a wait of the host for an event"));
        }
        self.mark.wait()
    }

    fn is_done(&self) -> bool {
        // A lost device never finishes its work, so its events count as done; a wait then returns the error.
        self.capture == 0 && self.mark.is_done().unwrap_or(true)
    }

    fn on_done(self: Arc<Self>, call: DoneCall) {
        // An event of a capture is never done, so `call` is called at once, with the error that a wait
        // returns.
        if self.capture == 0 { call_when_done(self, call) } else { call(self.wait()) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
