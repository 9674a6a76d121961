//! Streams: queues of operators and copies on a device.
//!
//! An operation becomes a row of calls of operators under the stream's lock, enqueued at once; the host never waits for
//! it. Lists that operators read go up on the same stream, each once for all layers that share it. The stream holds what
//! enqueued work uses until an event says that the work is done: ACL frees and destroys at once.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kvcore::{
    CaptureGate, Checked, Counters, Error, Event, Graph, MemoryKind, Result, StepInputs, Storage, Stream,
    TensorView,
};
use parking_lot::Mutex;

use crate::NAME;
use crate::bindings::types as sys;
use crate::device::Device;
use crate::memory;
use crate::operations::{self, Plans};

pub(crate) mod capture;
mod event;
mod flight;
mod graph;
mod upload;
mod work;

use capture::GraphMemory;
pub use event::AscendEvent;
use event::RawEvent;
pub(crate) use flight::Held;
use flight::InFlight;
pub(crate) use upload::Upload;
use upload::Uploads;
pub(crate) use work::{Scratch, Work};

/// Bytes up to which a write goes through pinned memory of the stream, and the host waits for nothing. Larger writes wait
/// for the stream.
const STAGED: usize = 1 << 20;

/// A stream of the Ascend backend.
pub struct AscendStream {
    state: Arc<StreamState>,
}

pub(crate) struct StreamState {
    pub(crate) device: Arc<Device>,
    pub(crate) raw: sys::aclrtStream,
    /// Keeps a lent stream alive. None for a stream of the backend's own.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    queue: Mutex<Queue>,
    gate: CaptureGate,
    /// Operations that graphs have captured.
    captured: Counters,
    /// Memory of the graphs that were captured here.
    graphs: Mutex<GraphMemory>,
}

// SAFETY: ACL's streams may be used from any thread that has the device's context current; the order of calls is kept by
// `queue`.
unsafe impl Send for StreamState {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamState {}

/// What the calls of a stream share.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    in_flight: InFlight,
    uploads: Uploads,
    scratch: Scratch,
    plans: Plans,
}

impl fmt::Debug for AscendStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendStream on {:?}", self.state.device)
    }
}

impl Drop for StreamState {
    /// Waits for the enqueued work, because its memory goes with the stream.
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind_lost() else { return };
        let acl = &self.device.library.acl;
        let queue = self.queue.get_mut();
        // SAFETY: the stream is alive.
        let waited = self.device.check(unsafe { acl.aclrtSynchronizeStream(self.raw) });
        if waited.is_err() && !self.device.is_lost() && self.owner.is_some() {
            // The owner's stream still has the work, and nobody will wait for it here: its memory is never freed.
            std::mem::forget(std::mem::take(queue));
            return;
        }
        queue.in_flight.clear();
        if self.owner.is_none() {
            // SAFETY: the stream is this one's own, and is destroyed once.
            unsafe { acl.aclrtDestroyStream(self.raw) };
        }
    }
}

/// The way of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From pinned memory to the device.
    Up,
    /// From the device to pinned memory.
    Down,
    /// Within the device.
    Within,
}

/// Enqueues a copy. The device's context is current, and the caller holds both memories until the copy is done.
pub(crate) fn copy(
    device: &Device,
    stream: sys::aclrtStream,
    dst: u64,
    src: u64,
    bytes: usize,
    way: Way,
) -> Result<()> {
    let kind = match way {
        Way::Up => sys::ACL_MEMCPY_HOST_TO_DEVICE,
        Way::Down => sys::ACL_MEMCPY_DEVICE_TO_HOST,
        Way::Within => sys::ACL_MEMCPY_DEVICE_TO_DEVICE,
    };
    let (dst, src) = (dst as *mut c_void, src as *const c_void);
    // SAFETY: the ranges lie in memories that are held until the copy is done; those of the host are pinned.
    device.check(unsafe { device.library.acl.aclrtMemcpyAsync(dst, bytes, src, bytes, kind, stream) })
}

impl AscendStream {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let _bound = device.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::ACL_STREAM_FAST_LAUNCH | sys::ACL_STREAM_FAST_SYNC;
        // SAFETY: `raw` is a place for the answer.
        device.check(unsafe { device.library.acl.aclrtCreateStreamWithConfig(&raw mut raw, 0, flags) })?;
        Ok(Self::over(device, raw, None))
    }

    /// Wraps a stream of the caller, of this device.
    ///
    /// # Safety
    /// See [`AscendBackend::lent_stream`](crate::AscendBackend::lent_stream).
    pub(crate) unsafe fn lent(
        device: &Arc<Device>,
        raw: sys::aclrtStream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::over(device, raw, Some(owner))
    }

    fn over(device: &Arc<Device>, raw: sys::aclrtStream, owner: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        let device = Arc::clone(device);
        let state = StreamState {
            device,
            raw,
            owner,
            queue: Mutex::default(),
            gate: CaptureGate::default(),
            captured: Counters::default(),
            graphs: Mutex::default(),
        };
        Self { state: Arc::new(state) }
    }

    /// Runs `enqueue`, and holds what it names until its work is done.
    pub(crate) fn enqueue(&self, enqueue: impl FnOnce(&mut Work<'_>) -> Result<()>) -> Result<()> {
        let StreamState { device, raw, queue, .. } = &*self.state;
        capture::with(&self.state, |recording| {
            let _bound = device.bind()?;
            let mut queue = queue.lock();
            let captured = recording.is_some();
            let done = enqueue(&mut Work::new(device, *raw, &mut queue, recording));
            if captured {
                return done;
            }
            // What was enqueued before an error runs, and its memory is held as that of a whole operation.
            done.and(queue.in_flight.tidy(device, *raw))
        })
    }

    /// Returns what the calls of the stream share.
    pub(crate) fn state(&self) -> &StreamState {
        &self.state
    }

    /// Returns ACL's stream, for engines that enqueue work of their own between operations.
    pub fn raw(&self) -> *mut c_void {
        self.state.raw
    }
}

impl StreamState {
    fn synchronize(&self, queue: &mut Queue) -> Result<()> {
        // SAFETY: the stream is alive, and its context is current.
        let waited = self.device.check(unsafe { self.device.library.acl.aclrtSynchronizeStream(self.raw) });
        // A wait that was refused says nothing of the work: its memory stays held.
        if waited.is_ok() || self.device.is_lost() {
            queue.in_flight.clear();
        }
        waited
    }
}

/// Copies bytes at once between the host and memory that no enqueued work uses. The device's context is current.
///
/// # Safety
/// Both ranges are valid for `bytes` bytes.
unsafe fn copy_now(
    device: &Device,
    dst: u64,
    src: u64,
    bytes: usize,
    kind: sys::aclrtMemcpyKind,
) -> Result<()> {
    let (dst, src) = (dst as *mut c_void, src as *const c_void);
    // SAFETY: as the caller guarantees.
    device.check(unsafe { device.library.acl.aclrtMemcpy(dst, bytes, src, bytes, kind) })
}

impl Stream for AscendStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        let operation = operation.operation();
        self.enqueue(|work| {
            work.admit(operation)?;
            operation.storages().for_each(|storage| work.hold(Held::Storage(Arc::clone(storage))));
            operations::run(work, operation)
        })
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(&self.state.device, storage).map(drop)
    }

    fn reaches(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        let device = &self.state.device;
        self.owns(storage).or_else(|_| memory::of_peer(device, storage).map(drop))
    }

    fn counters(&self) -> &Counters {
        if capture::records(&self.state) { &self.state.captured } else { &self.state.device.counters }
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let StreamState { device, raw, queue, .. } = &*self.state;
        capture::with(&self.state, |recording| {
            let _bound = device.bind()?;
            let number = recording.as_ref().map_or(0, |recording| recording.number());
            let event = Arc::new(RawEvent::of_capture(device, number)?);
            let mut queue = queue.lock();
            event.record(*raw)?;
            let held = Held::Event(Arc::clone(&event));
            match recording {
                Some(recording) => recording.hold(held),
                None => queue.in_flight.hold(held),
            }
            Ok(Arc::new(AscendEvent(event)) as Arc<dyn Event>)
        })
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<AscendEvent>();
        let known = known.ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        let StreamState { device, raw, queue, .. } = &*self.state;
        capture::join(&self.state, known.capture(), |recording| {
            let _bound = device.bind()?;
            let mut queue = queue.lock();
            known.0.hold_back(device, *raw)?;
            let held = Held::Event(Arc::clone(&known.0));
            if let Some(recording) = recording {
                recording.hold(held);
                return Ok(());
            }
            queue.in_flight.hold(held);
            queue.in_flight.tidy(device, *raw)
        })
    }

    fn synchronize(&self) -> Result<()> {
        let _pass = capture::outside(&self.state, "a wait of the host")?;
        let _bound = self.state.device.bind()?;
        self.state.synchronize(&mut self.state.queue.lock())
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        let StreamState { device, raw, queue, .. } = &*self.state;
        let into = memory::of(device, dst.storage())?;
        let _pass = capture::outside(&self.state, "a write by the host")?;
        let _bound = device.bind()?;
        if src.is_empty() {
            return Ok(());
        }
        let at = dst.storage().address() + range.start as u64;
        let mut queue = queue.lock();
        match into.host() {
            // The host writes pinned memory itself, behind what the stream does with it.
            Some(_) => {
                self.state.synchronize(&mut queue)?;
                // SAFETY: the range lies in the pinned memory, whose work on this stream is done. The contract asks
                // callers to order other streams before.
                unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), at as *mut u8, src.len()) };
            }
            None if src.len() > STAGED => {
                self.state.synchronize(&mut queue)?;
                // SAFETY: the range lies in the storage, whose work on this stream is done.
                unsafe {
                    copy_now(device, at, src.as_ptr() as u64, src.len(), sys::ACL_MEMCPY_HOST_TO_DEVICE)
                }?;
            }
            None => {
                let upload = queue.uploads.stage(device, src)?;
                queue.in_flight.hold(Held::Storage(Arc::clone(dst.storage())));
                queue.in_flight.hold(Held::Upload(Arc::clone(&upload)));
                copy(device, *raw, at, upload.host(), src.len(), Way::Up)?;
            }
        }
        Counters::add(&device.counters.host_write_bytes, src.len());
        queue.in_flight.tidy(device, *raw)
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let range = src.host_range(dst.len())?;
        let StreamState { device, queue, .. } = &*self.state;
        let from = memory::of(device, src.storage())?;
        let _pass = capture::outside(&self.state, "a read by the host")?;
        let _bound = device.bind()?;
        let at = src.storage().address() + range.start as u64;
        self.state.synchronize(&mut queue.lock())?;
        if from.kind() == MemoryKind::Pinned {
            // SAFETY: the range lies in the pinned memory, whose work on this stream is done. The contract asks callers
            // to order other streams before.
            unsafe { std::ptr::copy_nonoverlapping(at as *const u8, dst.as_mut_ptr(), dst.len()) };
        } else if !dst.is_empty() {
            // SAFETY: the range lies in the storage, whose work on this stream is done.
            unsafe {
                copy_now(device, dst.as_mut_ptr() as u64, at, dst.len(), sys::ACL_MEMCPY_DEVICE_TO_HOST)
            }?;
        }
        Counters::add(&device.counters.host_read_bytes, dst.len());
        Ok(())
    }

    fn capture(&self, inputs: &StepInputs, record: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        let open = capture::Open::begin(&self.state, inputs)?;
        record()?;
        let (graph, recording, counts) = open.end()?;
        Ok(Arc::new(graph::AscendGraph::new(&self.state, graph, recording, counts)))
    }
}
