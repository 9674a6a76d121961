//! A stream, and the bookkeeping for its enqueued work.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUstream};
use kvcore::device::queue::{CaptureSide, Hold, InFlight};
use kvcore::{Error, Result, Storage};
use parking_lot::Mutex;

use super::lists::SentLists;
use super::plans::AttendPlans;
use super::raw::{RawEvent, RawStream};
use super::upload::CudaUploads;
use crate::device::CudaDevice;
use crate::driver::NAME;
use crate::tables::AngleTables;

/// A stream of the CUDA backend.
pub struct CudaStream {
    pub(super) state: Arc<CudaStreamState>,
}

/// The part of a stream that its events and graphs share.
pub(crate) struct CudaStreamState {
    pub(crate) on: RawStream,
    pub(super) tables: Arc<AngleTables>,
    /// Keeps a lent stream alive. `None` if the backend created the stream.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    pub(crate) queue: Mutex<CudaQueue>,
    pub(super) side: CaptureSide,
    /// Scratch memory that the graphs captured on this stream share: one storage for each stream that took
    /// part in a capture.
    pub(super) graph_scratch: Mutex<GraphScratch>,
}

// SAFETY: driver streams may be used from any thread; the lock on `queue` orders the calls.
unsafe impl Send for CudaStreamState {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for CudaStreamState {}

/// The bookkeeping for a stream's enqueued work. Only one call uses it at a time.
#[derive(Default)]
pub(crate) struct CudaQueue {
    pub(crate) in_flight: InFlight<RawEvent>,
    pub(crate) uploads: CudaUploads,
    pub(super) lists: SentLists,
    pub(super) plans: AttendPlans,
    pub(super) scratch: Option<Arc<dyn Storage>>,
    pub(super) sorting: Vec<(i64, usize)>,
}

// Decision: docs/decisions/backend-cuda.md#graphs-of-a-stream-share-scratch-memory
/// Scratch memory that graphs share as long as one of them holds it. This is safe because their replays run
/// one after another.
#[derive(Default)]
pub(super) struct GraphScratch(Vec<(usize, Weak<dyn Storage>)>);

impl GraphScratch {
    /// Returns scratch memory of at least `bytes` bytes for the stream that `key` identifies. Allocates this
    /// memory with `make` if no graph holds enough of it.
    pub(super) fn of(
        &mut self,
        key: usize,
        bytes: usize,
        make: impl FnOnce() -> Result<Arc<dyn Storage>>,
    ) -> Result<Arc<dyn Storage>> {
        self.0.retain(|(_, held)| held.strong_count() > 0);
        let held = self.0.iter().filter(|(of, _)| *of == key).find_map(|(_, held)| held.upgrade());
        if let Some(held) = held.filter(|held| held.len() >= bytes) {
            return Ok(held);
        }
        let made = make()?;
        self.0.retain(|(of, _)| *of != key);
        self.0.push((key, Arc::downgrade(&made)));
        Ok(made)
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream on {:?}", self.state.on.device)
    }
}

impl Drop for CudaStreamState {
    /// Waits for the enqueued work, because dropping the stream frees memory that this work uses.
    fn drop(&mut self) {
        let Ok(_bound) = self.on.device.bind() else { return };
        // SAFETY: the stream is alive.
        let _ = unsafe { result::stream::synchronize(self.on.raw) };
        drop(std::mem::take(self.queue.get_mut()));
        if self.owner.is_none() {
            // SAFETY: the backend created the stream, and destroys it once.
            let _ = unsafe { result::stream::destroy(self.on.raw) };
        }
    }
}

impl CudaStream {
    /// Creates a stream that does not synchronise implicitly with other streams.
    pub(crate) fn new(device: &Arc<CudaDevice>, tables: &Arc<AngleTables>) -> Result<Self> {
        let _bound = device.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| device.refused(error))?;
        Ok(Self::over(device, tables, raw, None))
    }

    /// Creates a stream over a driver stream that the caller created.
    ///
    /// # Safety
    /// See [`CudaBackend::lent_stream`](crate::CudaBackend::lent_stream).
    pub(crate) unsafe fn lent(
        device: &Arc<CudaDevice>,
        tables: &Arc<AngleTables>,
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
        device: &Arc<CudaDevice>,
        tables: &Arc<AngleTables>,
        raw: CUstream,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        let state = CudaStreamState {
            on: RawStream { device: Arc::clone(device), raw },
            tables: Arc::clone(tables),
            owner,
            queue: Mutex::default(),
            side: CaptureSide::default(),
            graph_scratch: Mutex::default(),
        };
        Self { state: Arc::new(state) }
    }

    /// Returns the state that the stream shares with its events and graphs.
    pub(crate) fn state(&self) -> &Arc<CudaStreamState> {
        &self.state
    }

    /// Returns the driver's stream. An engine can enqueue its own work on it between operations.
    pub fn raw(&self) -> CUstream {
        self.state.on.raw
    }
}

impl CudaStreamState {
    /// Holds storages until the work enqueued so far is done.
    pub(crate) fn hold(&self, storages: impl Iterator<Item = Arc<dyn Storage>>) -> Result<()> {
        let _bound = self.on.device.bind()?;
        let mut queue = self.queue.lock();
        storages.for_each(|storage| queue.in_flight.hold(Hold::Storage(storage)));
        queue.in_flight.tidy(&self.on)
    }

    /// Waits for the enqueued work, and drops everything that this work held.
    pub(crate) fn synchronize(&self, queue: &mut CudaQueue) -> Result<()> {
        // SAFETY: the stream is alive, and its context is current.
        let waited = unsafe { result::stream::synchronize(self.on.raw) };
        queue.in_flight.clear();
        waited.map_err(|error| self.on.device.refused(error))
    }
}
