//! Streams: queues of kernels and copies on a device.
//!
//! An operation is lowered to launches under the stream's lock, and enqueued at once; the host never waits for it.
//! Lists that kernels read (slots, plans of attention) go up on the same stream, each once for all layers that share
//! it. The stream holds the memory of enqueued work until an event says that the work is done. While a thread captures,
//! its work enters a graph instead (`capture`), which owns its memory and reads its lists where replays write them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent_wait_flags, CUstream};
use kvcore::{
    CaptureGate, Checked, Counters, Error, Event, Graph, MemoryKind, Result, StepInputs, Storage, Stream,
    TensorView,
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::NAME;
use crate::device::Device;
use crate::kernels::{self, Plans};
use crate::memory;
use crate::tables::Tables;

pub(crate) mod capture;
mod event;
mod flight;
mod graph;
mod inputs;
mod lists;
mod lowering;
mod recheck;
mod upload;

use capture::{GraphMemory, Recording};
pub use event::CudaEvent;
pub(crate) use flight::Held;
use flight::InFlight;
pub(crate) use inputs::List;
pub(crate) use kvcore::device::capture::without_work;
use lists::Lists;
pub(crate) use lowering::{Launch, Lowering};
pub(crate) use upload::Upload;
use upload::Uploads;

/// Bytes up to which a write goes through pinned memory of the stream, and the host waits for nothing. Larger writes wait
/// for the stream.
const STAGED: usize = 1 << 20;

/// A stream of the CUDA backend.
pub struct CudaStream {
    state: Arc<StreamState>,
}

pub(crate) struct StreamState {
    device: Arc<Device>,
    tables: Arc<Tables>,
    raw: CUstream,
    /// Keeps a lent stream alive. None for a stream of the backend's own.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    queue: Mutex<Queue>,
    gate: CaptureGate,
    /// Operations that captures have recorded here; they count when they are replayed.
    captured: Counters,
    /// Memory of the graphs that were captured here.
    graphs: Mutex<GraphMemory>,
}

// SAFETY: the driver's streams may be used from any thread; the order of calls is kept by `queue`.
unsafe impl Send for StreamState {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamState {}

/// What the calls of a stream share.
#[derive(Default)]
pub(crate) struct Queue {
    in_flight: InFlight,
    uploads: Uploads,
    lists: Lists,
    plans: Plans,
    scratch: Option<Arc<dyn Storage>>,
    sorting: Vec<(i64, usize)>,
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream on {:?}", self.state.device)
    }
}

impl Drop for StreamState {
    /// Waits for the enqueued work, because its memory goes with the stream.
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else {
            self.queue.get_mut().in_flight.clear();
            return;
        };
        // SAFETY: the stream is alive. It is destroyed once, unless it is lent.
        unsafe {
            let _ = result::stream::synchronize(self.raw);
            self.queue.get_mut().in_flight.end();
            if self.owner.is_none() {
                let _ = result::stream::destroy(self.raw);
            }
        }
    }
}

impl CudaStream {
    /// Creates a stream that no other stream waits for implicitly.
    pub(crate) fn new(device: &Arc<Device>, tables: &Arc<Tables>) -> Result<Self> {
        let _bound = device.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| device.refused(error))?;
        Ok(Self::over(device, tables, raw, None))
    }

    /// Wraps a stream of the caller.
    ///
    /// # Safety
    /// See [`CudaBackend::lent_stream`](crate::CudaBackend::lent_stream).
    pub(crate) unsafe fn lent(
        device: &Arc<Device>,
        tables: &Arc<Tables>,
        raw: CUstream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let _bound = device.bind()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller guarantees that `raw` is a stream.
        let known = unsafe { sys::cuStreamGetCtx(raw, &raw mut context) }.result();
        if known.is_err() || context != device.context {
            return Err(Error::ForeignHandle { what: "a lent stream of another context", backend: NAME });
        }
        Ok(Self::over(device, tables, raw, Some(owner)))
    }

    fn over(
        device: &Arc<Device>,
        tables: &Arc<Tables>,
        raw: CUstream,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        let state = StreamState {
            device: Arc::clone(device),
            tables: Arc::clone(tables),
            raw,
            owner,
            queue: Mutex::default(),
            gate: CaptureGate::default(),
            captured: Counters::default(),
            graphs: Mutex::default(),
        };
        Self { state: Arc::new(state) }
    }

    /// Enqueues what `prepare` lists. If it or a kernel's loading fails, no launch is enqueued.
    pub(crate) fn enqueue(&self, prepare: impl FnOnce(&mut Lowering<'_>) -> Result<()>) -> Result<()> {
        capture::with(&self.state, |recording| self.enqueue_in(recording, prepare))
    }

    fn enqueue_in(
        &self,
        recording: Option<&mut Recording>,
        prepare: impl FnOnce(&mut Lowering<'_>) -> Result<()>,
    ) -> Result<()> {
        let StreamState { device, raw, queue, .. } = &*self.state;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        let captured = recording.is_some();
        let mut lowering = Lowering::new(&self.state, &mut queue, recording);
        prepare(&mut lowering)?;
        let launches = lowering.launches();
        let mut functions: SmallVec<[_; 2]> = SmallVec::new();
        for launch in &launches {
            functions.push(device.modules.get(device, launch.kernel)?);
        }
        for (function, mut launch) in functions.into_iter().zip(launches) {
            let mut argument = [launch.argument()];
            // SAFETY: the argument is the kernel's struct. The memory it names belongs to this device and is held until
            // the work is done: `Stream::run` has asked `owns`, and so do the dense steps.
            unsafe {
                let (grid, block) =
                    ((launch.grid[0], launch.grid[1], launch.grid[2]), (launch.threads, 1, 1));
                result::launch_kernel(function, grid, block, launch.shared, *raw, &mut argument)
            }
            .map_err(|error| device.refused(error))?;
        }
        if captured {
            return Ok(());
        }
        queue.in_flight.tidy(*raw).map_err(|error| device.refused(error))
    }

    /// Zeroes a dense view, in stream order.
    pub(crate) fn zero(&self, view: &TensorView) -> Result<()> {
        let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
        self.owns(view.storage())?;
        let StreamState { device, raw, .. } = &*self.state;
        self.enqueue(|to| {
            to.hold(Held::Storage(Arc::clone(view.storage())));
            if range.is_empty() {
                return Ok(());
            }
            let at = view.storage().address() + range.start as u64;
            // SAFETY: the range lies in the storage, which is held until the work is done.
            unsafe { result::memset_d8_async(at, 0, range.len(), *raw) }
                .map_err(|error| device.refused(error))
        })
    }

    /// Returns what the calls of the stream share.
    pub(crate) fn state(&self) -> &StreamState {
        &self.state
    }

    /// Returns the driver's stream, for engines that enqueue work of their own between operations.
    pub fn raw(&self) -> CUstream {
        self.state.raw
    }
}

impl StreamState {
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Holds memory until the work enqueued so far is done.
    pub(crate) fn hold(&self, storages: impl Iterator<Item = Arc<dyn Storage>>) -> Result<()> {
        let _bound = self.device.bind()?;
        let mut queue = self.queue.lock();
        storages.for_each(|storage| queue.in_flight.hold(Held::Storage(storage)));
        queue.in_flight.tidy(self.raw).map_err(|error| self.device.refused(error))
    }

    fn synchronize(&self, queue: &mut Queue) -> Result<()> {
        // SAFETY: the stream is alive, and its context is current.
        let waited = unsafe { result::stream::synchronize(self.raw) };
        queue.in_flight.clear();
        waited.map_err(|error| self.device.refused(error))
    }
}

impl Stream for CudaStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        let operation = operation.operation();
        self.enqueue(|to| {
            if let Some(recording) = to.recording() {
                recording.admit(operation)?;
            }
            kernels::lower(to, operation)?;
            operation.storages().for_each(|storage| to.hold(Held::Storage(Arc::clone(storage))));
            Ok(())
        })
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(&self.state.device, storage).map(drop)
    }

    fn reaches(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.owns(storage).or_else(|foreign| {
            let known = storage.as_any().downcast_ref::<memory::CudaStorage>();
            let on_a_device = known.is_some_and(|known| known.kind() == MemoryKind::Device);
            if on_a_device { Ok(()) } else { Err(foreign) }
        })
    }

    fn counters(&self) -> &Counters {
        if capture::records(&self.state) { &self.state.captured } else { &self.state.device.counters }
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::record(&self.state)?))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<CudaEvent>();
        let known = known.ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        let _pass = capture::join(&self.state, known.capture())?;
        let device = &self.state.device;
        let _bound = device.bind()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event are alive; the driver allows events of other devices.
        unsafe { result::stream::wait_event(self.state.raw, known.raw(), flags) }
            .map_err(|error| device.refused(error))
    }

    fn synchronize(&self) -> Result<()> {
        let _pass = capture::outside(&self.state, "a wait of the host")?;
        let _bound = self.state.device.bind()?;
        self.state.synchronize(&mut self.state.queue.lock())
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        self.owns(dst.storage())?;
        let _pass = capture::outside(&self.state, "a write by the host")?;
        let StreamState { device, raw, queue, .. } = &*self.state;
        let _bound = device.bind()?;
        if src.is_empty() {
            return Ok(());
        }
        let at = dst.storage().address() + range.start as u64;
        let mut queue = queue.lock();
        queue.in_flight.hold(Held::Storage(Arc::clone(dst.storage())));
        let host = memory::of(device, dst.storage())?.host();
        if let Some(host) = host.filter(|_| src.len() > STAGED) {
            self.state.synchronize(&mut queue)?;
            // SAFETY: the range lies in the pinned memory, whose work on this stream is done. The contract asks callers
            // to order other streams before.
            unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), host.add(range.start), src.len()) };
        } else {
            let from = if src.len() > STAGED {
                src.as_ptr() as u64
            } else {
                // Copies from host to host do not wait for the stream: pinned memory is written by way of the device.
                let (upload, from) = if host.is_some() {
                    let upload = queue.uploads.send(device, *raw, src)?;
                    let from = upload.address();
                    (upload, from)
                } else {
                    let upload = queue.uploads.stage(device, src)?;
                    let from = upload.host() as u64;
                    (upload, from)
                };
                queue.in_flight.hold(Held::Upload(upload));
                from
            };
            // SAFETY: the range lies in the storage. The upload is held until the work is done, or `src` until the wait
            // below.
            unsafe { sys::cuMemcpyAsync(at, from, src.len(), *raw) }
                .result()
                .map_err(|error| device.refused(error))?;
            if src.len() > STAGED {
                // The caller's bytes may be pinned, so that the copy may still read them.
                self.state.synchronize(&mut queue)?;
            }
        }
        Counters::add(&device.counters.host_write_bytes, src.len());
        queue.in_flight.tidy(*raw).map_err(|error| device.refused(error))
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let range = src.host_range(dst.len())?;
        self.owns(src.storage())?;
        let _pass = capture::outside(&self.state, "a read by the host")?;
        let StreamState { device, raw, queue, .. } = &*self.state;
        let _bound = device.bind()?;
        let at = src.storage().address() + range.start as u64;
        let host = memory::of(device, src.storage())?.host();
        let mut queue = queue.lock();
        if host.is_none() && !dst.is_empty() {
            // SAFETY: the range lies in the storage; `dst` is not used before the wait below.
            unsafe { sys::cuMemcpyAsync(dst.as_mut_ptr() as u64, at, dst.len(), *raw) }
                .result()
                .map_err(|error| device.refused(error))?;
        }
        self.state.synchronize(&mut queue)?;
        if let Some(host) = host {
            // SAFETY: the range lies in the pinned memory, whose work on this stream is done. The contract asks callers
            // to order other streams before.
            unsafe { std::ptr::copy_nonoverlapping(host.add(range.start), dst.as_mut_ptr(), dst.len()) };
        }
        Counters::add(&device.counters.host_read_bytes, dst.len());
        Ok(())
    }

    fn capture(&self, inputs: &StepInputs, record: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        let open = capture::Open::begin(&self.state, inputs)?;
        record()?;
        let (graph, recording, counts) = open.end()?;
        Ok(Arc::new(graph::CudaGraph::new(&self.state, graph, recording, counts)?))
    }
}
