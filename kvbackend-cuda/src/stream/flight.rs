//! Holds of enqueued work: what lives until the work is done.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use kvcore::Storage;

use super::graph::CapturedWork;
use super::upload::Upload;

/// Number of handles after which an event is recorded, so that they can go when the event is done.
const BATCH: usize = 64;

/// Memory that enqueued work uses.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    Storage(Arc<dyn Storage>),
    Upload(Arc<Upload>),
    Graph(Arc<CapturedWork>),
}

impl Held {
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Storage(storage) => Arc::as_ptr(storage).cast::<u8>() as usize,
            Self::Upload(upload) => Arc::as_ptr(upload) as usize,
            Self::Graph(work) => Arc::as_ptr(work) as usize,
        }
    }
}

/// Handles in the order of the work that uses them, cut into batches by events.
#[derive(Default)]
pub(super) struct InFlight {
    batches: VecDeque<(CUevent, Vec<Held>)>,
    current: Vec<Held>,
    /// Events that may be recorded again.
    spare: Vec<CUevent>,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for InFlight {}

impl InFlight {
    /// Holds something until the work enqueued so far and next is done.
    pub(super) fn hold(&mut self, held: Held) {
        let address = held.address();
        if !self.current.iter().any(|known| known.address() == address) {
            self.current.push(held);
        }
    }

    /// Cuts a batch if there are many handles, and lets go of those whose work is done.
    pub(super) fn tidy(&mut self, stream: CUstream) -> Result<(), DriverError> {
        if self.current.len() >= BATCH {
            return self.cut(stream);
        }
        self.let_go()
    }

    /// Cuts a batch, and lets go of the handles whose work is done.
    pub(super) fn cut(&mut self, stream: CUstream) -> Result<(), DriverError> {
        if !self.current.is_empty() {
            let event = match self.spare.pop() {
                Some(event) => event,
                None => result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
            };
            // SAFETY: event and stream are alive and of one device.
            if let Err(error) = unsafe { result::event::record(event, stream) } {
                self.spare.push(event);
                return Err(error);
            }
            self.batches.push_back((event, std::mem::take(&mut self.current)));
        }
        self.let_go()
    }

    /// Waits until fewer than `most` batches are not done.
    pub(super) fn wait_until(&mut self, most: usize) -> Result<(), DriverError> {
        while self.batches.len() >= most.max(1) {
            // SAFETY: the event is alive and recorded.
            unsafe { result::event::synchronize(self.batches[0].0) }?;
            self.spare.extend(self.batches.pop_front().map(|(event, _)| event));
        }
        Ok(())
    }

    fn let_go(&mut self) -> Result<(), DriverError> {
        while let Some(&(event, _)) = self.batches.front() {
            // SAFETY: the event is alive.
            match unsafe { result::event::query(event) } {
                Ok(()) => self.spare.extend(self.batches.pop_front().map(|(event, _)| event)),
                Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Lets go of everything. The caller has waited for the stream, or the device is lost.
    pub(super) fn clear(&mut self) {
        self.spare.extend(self.batches.drain(..).map(|(event, _)| event));
        self.current.clear();
    }

    /// Lets go of everything and destroys the events. The context is current.
    pub(super) fn end(&mut self) {
        self.clear();
        for event in self.spare.drain(..) {
            // SAFETY: the event is alive, and nothing waits for it.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
