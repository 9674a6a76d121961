//! Streams and events on the one queue of a device.
//!
//! A stream records commands. It submits them when something waits for them, when another stream must come
//! after them, or when there are many. The queue runs submissions in order, so that streams are ordered by
//! the order of their submissions. Without a wait between two streams, that order is arbitrary.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use kvcore::{
    Checked, Counters, DType, DoneCall, Error, Event, Graph, Result, StepInputs, Storage, Stream, TensorView,
    call_when_done,
};
use parking_lot::Mutex;
use wgpu::{BufferUsages, MapMode, SubmissionIndex};

use crate::NAME;
use crate::device::Device;
use crate::kernels::{self, Plans, copy};
use crate::memory;
use crate::pipeline::Binding;

mod queue;

pub(crate) use queue::Dispatch;
use queue::{Pending, Point};

/// Bytes up to which an aligned write goes with the next submission; larger ones are given to the queue at
/// once.
const SMALL_WRITE: usize = 1 << 20;

/// Most bytes of one piece of a read.
const STAGING: u64 = 32 << 20;

/// A stream of the wgpu backend.
pub struct WgpuStream {
    inner: Arc<StreamState>,
}

struct StreamState {
    device: Arc<Device>,
    pending: Mutex<Pending>,
    /// Attention plans, which the layers of a step share.
    plans: Plans,
}

impl Drop for StreamState {
    /// Submits the enqueued work, so that it still runs.
    fn drop(&mut self) {
        self.pending.get_mut().submit(&self.device);
    }
}

/// A point in the order of a [`WgpuStream`].
pub struct WgpuEvent {
    stream: Arc<StreamState>,
    point: Option<Arc<Point>>,
}

impl fmt::Debug for WgpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuStream on {:?}", self.inner.device)
    }
}

impl fmt::Debug for WgpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuEvent on {:?}", self.stream.device)
    }
}

impl WgpuEvent {
    /// Submits the work before the event, unless it is submitted already.
    fn submit(&self) {
        if self.point.as_ref().is_some_and(|point| point.submission().is_none()) {
            self.stream.pending.lock().submit(&self.stream.device);
        }
    }

    fn submission(&self) -> Option<SubmissionIndex> {
        self.point.as_ref().and_then(|point| point.submission())
    }
}

impl Event for WgpuEvent {
    fn wait(&self) -> Result<()> {
        self.submit();
        let device = &self.stream.device;
        self.submission().map_or_else(|| device.check(), |submission| device.wait(submission))?;
        self.stream.pending.lock().check(device)
    }

    fn is_done(&self) -> bool {
        self.submit();
        self.submission().is_none_or(|submission| self.stream.device.is_done(submission))
    }

    fn on_done(self: Arc<Self>, call: DoneCall) {
        call_when_done(self, call);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl WgpuStream {
    pub(crate) fn new(device: Arc<Device>) -> Self {
        Self { inner: Arc::new(StreamState { device, pending: Mutex::default(), plans: Plans::default() }) }
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.inner.device
    }

    pub(crate) fn plans(&self) -> &Plans {
        &self.inner.plans
    }

    /// Counts bytes that were given to the queue for work to come.
    pub(crate) fn count_written(&self, bytes: usize) {
        if bytes > 0 {
            self.inner.pending.lock().count_written(&self.inner.device, bytes);
        }
    }

    /// Enqueues runs of kernels.
    fn run_kernels(&self, work: Vec<Dispatch>) -> Result<()> {
        self.inner.device.check()?;
        self.inner.pending.lock().run(&self.inner.device, work)
    }

    /// Returns memory in which a kernel leaves results for the next kernel of the same operation. All
    /// operations of a stream share it, because they run one after the other.
    pub(crate) fn scratch(&self, bytes: u64) -> Result<Binding> {
        let mut pending = self.inner.pending.lock();
        let buffer = if let Some(kept) = pending.scratch.as_ref().filter(|kept| kept.size() >= bytes) {
            kept.clone()
        } else {
            self.inner.device.buffer("scratch", bytes.next_power_of_two(), BufferUsages::STORAGE)?
        };
        pending.scratch = Some(buffer.clone());
        Ok(Binding { buffer, offset: 0, size: bytes })
    }

    /// Reads `dst.len()` bytes of a buffer from `start` on, at most [`STAGING`] bytes.
    fn read_piece(&self, buffer: &wgpu::Buffer, start: u64, dst: &mut [u8]) -> Result<()> {
        let device = &self.inner.device;
        let (first, end) = (start - start % 4, (start + dst.len() as u64).next_multiple_of(4));
        let size = end - first;
        let (staging, submission) = {
            let mut pending = self.inner.pending.lock();
            let staging = if let Some(kept) = pending.staging.take().filter(|kept| kept.size() >= size) {
                kept
            } else {
                let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
                device.buffer("staging", size.next_power_of_two().max(4096), usage)?
            };
            pending.encoder(device).copy_buffer_to_buffer(buffer, first, &staging, 0, Some(size));
            pending.submit(device);
            pending.check(device)?;
            (staging, pending.last())
        };
        let (sender, mapped) = std::sync::mpsc::channel();
        staging.slice(..size).map_async(MapMode::Read, move |result| {
            let _ = sender.send(result);
        });
        if let Some(submission) = submission {
            device.wait(submission)?;
        }
        mapped
            .recv()
            .map_err(|error| device.refusal(error.to_string()))?
            .map_err(|error| device.refusal(error.to_string()))?;
        {
            let view = staging.slice(..size).get_mapped_range();
            let view = view.map_err(|error| device.refusal(error.to_string()))?;
            let from = (start - first) as usize;
            dst.copy_from_slice(&view[from..from + dst.len()]);
        }
        staging.unmap();
        self.inner.pending.lock().staging.get_or_insert(staging);
        Ok(())
    }
}

impl Stream for WgpuStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.run_kernels(kernels::lower(self, operation.operation())?)
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(self.device(), storage).map(drop)
    }

    fn counters(&self) -> &Counters {
        &self.device().counters
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        self.inner.device.check()?;
        let point = self.inner.pending.lock().point();
        Ok(Arc::new(WgpuEvent { stream: Arc::clone(&self.inner), point }))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<WgpuEvent>();
        let known = known
            .filter(|known| Arc::ptr_eq(&known.stream.device, &self.inner.device))
            .ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        if !Arc::ptr_eq(&known.stream, &self.inner) {
            known.submit();
            known.stream.pending.lock().check(&self.inner.device)?;
        }
        self.inner.device.check()
    }

    fn synchronize(&self) -> Result<()> {
        let last = {
            let mut pending = self.inner.pending.lock();
            pending.submit(&self.inner.device);
            pending.last()
        };
        last.map_or_else(|| self.inner.device.check(), |last| self.inner.device.wait(last))?;
        self.inner.pending.lock().check(&self.inner.device)
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let device = &self.inner.device;
        let start = dst.host_range(src.len())?.start;
        let storage = memory::of(device, dst.storage())?;
        device.check()?;
        if src.is_empty() {
            return Ok(());
        }
        let buffer = storage.buffer()?;
        Counters::add(&device.counters.host_write_bytes, src.len());
        let mut pending = self.inner.pending.lock();
        pending.check(device)?;
        let aligned = start.is_multiple_of(4) && src.len().is_multiple_of(4);
        if aligned && src.len() > SMALL_WRITE {
            pending.write(device, &buffer, start as u64, src);
            return pending.check(device);
        }
        if !aligned {
            for (i, piece) in src.chunks(SMALL_WRITE).enumerate() {
                let work = copy::bytes(device, piece, &buffer, start + i * SMALL_WRITE)?;
                pending.run(device, work)?;
                pending.count_written(device, piece.len());
            }
            return Ok(());
        }
        let from = pending.upload(device, src)?;
        let (offset, size) = (from.offset, Some(src.len() as u64));
        pending.encoder(device).copy_buffer_to_buffer(&from.buffer, offset, &buffer, start as u64, size);
        Ok(())
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let device = &self.inner.device;
        let start = src.host_range(dst.len())?.start;
        let storage = memory::of(device, src.storage())?;
        device.check()?;
        if dst.is_empty() {
            return self.synchronize();
        }
        let buffer = storage.buffer()?;
        Counters::add(&device.counters.host_read_bytes, dst.len());
        for (i, piece) in dst.chunks_mut(STAGING as usize).enumerate() {
            self.read_piece(&buffer, start as u64 + i as u64 * STAGING, piece)?;
        }
        Ok(())
    }

    fn capture(&self, _: &StepInputs, _: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        Err(Error::Unsupported { backend: NAME, what: "captures of graphs".to_owned() })
    }
}

/// Returns the byte of an element that begins a row.
pub(crate) fn byte_of(dtype: DType, element: usize) -> u64 {
    element as u64 * dtype.bits() as u64 / 8
}
