//! The driver handles that a stream's work uses: the stream itself, events, and captured graphs.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUgraph, CUresult, CUstream};
use kvcore::Result;
use kvcore::device::queue::Mark;

use crate::device::CudaDevice;

/// A driver stream with its device. The owner of this value keeps the stream alive and destroys it.
pub(crate) struct RawStream {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) raw: CUstream,
}

/// A driver event. Dropping this value destroys it.
pub(crate) struct RawEvent {
    raw: CUevent,
    device: Arc<CudaDevice>,
}

/// A captured graph before instantiation. Dropping this value destroys it.
pub(crate) struct RawGraph {
    pub(super) raw: CUgraph,
    pub(super) device: Arc<CudaDevice>,
}

// SAFETY: driver events may be used from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Mark for RawEvent {
    type Stream = RawStream;

    fn create(stream: &RawStream) -> Result<Self> {
        let device = Arc::clone(&stream.device);
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Self { raw: raw.map_err(|error| device.refused(error))?, device })
    }

    fn record(&self, stream: &RawStream) -> Result<()> {
        // SAFETY: the event and the stream are alive and belong to the same device.
        unsafe { result::event::record(self.raw, stream.raw) }.map_err(|error| self.device.refused(error))
    }

    fn is_done(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(self.device.refused(error)),
        }
    }

    fn wait(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(|error| self.device.refused(error))
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // SAFETY: the event is alive; the driver frees it once no stream waits for it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

impl Drop for RawGraph {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // SAFETY: the graph is alive, and nothing else uses it.
        let _ = unsafe { result::graph::destroy(self.raw) };
    }
}
