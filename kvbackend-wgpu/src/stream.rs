//! Streams and events on a device's only queue.
//!
//! A stream records commands, and submits them when something waits for them, when another stream must run
//! after them, or when there are many commands. The queue runs submissions in order. Without a wait between
//! two streams, the order of their submissions is arbitrary.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kvcore::{
    Checked, Counters, DoneCall, Error, Event, Graph, Result, StepInputs, Storage, Stream, TensorView,
    call_when_done,
};
use wgpu::SubmissionIndex;

use crate::device::{GpuDevice, NAME};
use crate::kernels::{self, Plans, copy};
use crate::memory;
use crate::queue::{Point, Queue, SMALL_WRITE};

/// A stream of the wgpu backend.
pub struct WgpuStream {
    queue: Arc<Queue>,
    /// The attention plans that the layers of a step share.
    plans: Plans,
}

/// A point in a [`WgpuStream`]'s order of work.
pub struct WgpuEvent {
    queue: Arc<Queue>,
    point: Option<Arc<Point>>,
}

impl fmt::Debug for WgpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuStream on {:?}", self.device())
    }
}

impl fmt::Debug for WgpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuEvent on {:?}", self.queue.device())
    }
}

impl WgpuEvent {
    /// Submits the work before the event, unless this has already happened.
    fn submit(&self) {
        if self.point.as_ref().is_some_and(|point| point.submission().is_none()) {
            self.queue.submit();
        }
    }

    fn submission(&self) -> Option<SubmissionIndex> {
        self.point.as_ref().and_then(|point| point.submission())
    }
}

impl Event for WgpuEvent {
    fn wait(&self) -> Result<()> {
        self.submit();
        self.queue.wait(self.submission())?;
        self.queue.check()
    }

    fn is_done(&self) -> bool {
        self.submit();
        self.submission().is_none_or(|submission| self.queue.device().is_done(submission))
    }

    fn on_done(self: Arc<Self>, call: DoneCall) {
        call_when_done(self, call);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl WgpuStream {
    pub(crate) fn new(device: Arc<GpuDevice>) -> Self {
        Self { queue: Arc::new(Queue::new(device)), plans: Plans::default() }
    }

    fn device(&self) -> &Arc<GpuDevice> {
        self.queue.device()
    }
}

impl Stream for WgpuStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.queue.run(kernels::lower(&self.queue, &self.plans, operation.operation())?)
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(self.device(), storage).map(drop)
    }

    fn counters(&self) -> &Counters {
        &self.device().counters
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        self.device().check()?;
        Ok(Arc::new(WgpuEvent { queue: Arc::clone(&self.queue), point: self.queue.point() }))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<WgpuEvent>();
        let known = known
            .filter(|known| Arc::ptr_eq(known.queue.device(), self.device()))
            .ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        if !Arc::ptr_eq(&known.queue, &self.queue) {
            known.submit();
            known.queue.check()?;
        }
        self.device().check()
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.drain()
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let device = self.device();
        let start = dst.host_range(src.len())?.start;
        let storage = memory::of(device, dst.storage())?;
        device.check()?;
        if src.is_empty() {
            return Ok(());
        }
        let buffer = storage.buffer()?;
        Counters::add(&device.counters.host_write_bytes, src.len());
        if start.is_multiple_of(4) && src.len().is_multiple_of(4) {
            return self.queue.write_words(&buffer, start as u64, src);
        }
        let piece = |(i, piece): (usize, &[u8])| {
            Ok((copy::bytes(device, piece, &buffer, start + i * SMALL_WRITE)?, piece.len()))
        };
        self.queue.run_pieces(src.chunks(SMALL_WRITE).enumerate().map(piece))
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let device = self.device();
        let start = src.host_range(dst.len())?.start;
        let storage = memory::of(device, src.storage())?;
        device.check()?;
        if dst.is_empty() {
            return self.synchronize();
        }
        let buffer = storage.buffer()?;
        Counters::add(&device.counters.host_read_bytes, dst.len());
        self.queue.read(&buffer, start as u64, dst)
    }

    fn capture(&self, _: &StepInputs, _: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        Err(Error::Unsupported { backend: NAME, what: "captures of graphs".to_owned() })
    }
}
