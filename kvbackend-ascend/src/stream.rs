//! Streams: operators and copies, in the order that the contract requires, on an ACL stream.
//!
//! An operation becomes a sequence of operator calls, which are enqueued at once under the queue's lock. The
//! host never waits for the operation. Lists that operators read are sent on the same stream, once for all
//! layers that share them.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kvcore::device::queue::{CapturedStream, Hold};
use kvcore::{Checked, Counters, Event, Graph, MemoryKind, Result, StepInputs, Storage, Stream, TensorView};
use parking_lot::Mutex;

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::foreign;
use crate::memory;
use crate::operations::{self, RecentPlans, StepWork};
use crate::queue::{AclEvent, AclStream, AscendEvent, CopyDirection, capture, copy, copy_now};

/// The maximum size, in bytes, of a write that the host copies to the stream's pinned memory, so that the
/// host need not wait. For a larger write, the host waits for the stream.
const STAGED: usize = 1 << 20;

thread_local! {
    /// The plans of the capture that this thread is recording. All captured streams share these plans.
    static CAPTURED: RefCell<RecentPlans> = RefCell::default();
}

/// Guard that drops the plans of this thread's capture when the capture ends.
struct CapturedPlans;

impl Drop for CapturedPlans {
    fn drop(&mut self) {
        CAPTURED.take();
    }
}

/// A stream of the Ascend backend.
pub struct AscendStream {
    queue: Arc<AclStream>,
    plans: Mutex<RecentPlans>,
}

impl fmt::Debug for AscendStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendStream on {:?}", self.queue.npu)
    }
}

impl AscendStream {
    pub(crate) fn over(queue: AclStream) -> Self {
        Self { queue: Arc::new(queue), plans: Mutex::default() }
    }

    /// Creates a stream over an ACL stream that the caller created on this device.
    ///
    /// # Safety
    /// See [`AscendBackend::lent_stream`](crate::AscendBackend::lent_stream).
    pub(crate) unsafe fn lent(
        npu: &Arc<Npu>,
        raw: sys::aclrtStream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::over(AclStream::over(npu, raw, Some(owner)))
    }

    pub(crate) fn queue(&self) -> &Arc<AclStream> {
        &self.queue
    }

    /// Returns ACL's stream. An engine can enqueue its own work on it between operations.
    pub fn raw(&self) -> *mut c_void {
        self.queue.raw
    }
}

impl Stream for AscendStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        let operation = operation.operation();
        self.queue.enqueue(|work| {
            work.admit(operation)?;
            operation.storages().for_each(|storage| work.hold(Hold::Storage(Arc::clone(storage))));
            if work.captured_step().is_some() {
                return CAPTURED
                    .with_borrow_mut(|plans| operations::run(&mut StepWork { work, plans }, operation));
            }
            operations::run(&mut StepWork { work, plans: &mut self.plans.lock() }, operation)
        })
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(&self.queue.npu, storage).map(drop)
    }

    fn reaches(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        let npu = &self.queue.npu;
        self.owns(storage).or_else(|_| memory::of_peer(npu, storage).map(drop))
    }

    fn counters(&self) -> &Counters {
        if self.queue.records() { &self.queue.side.counters } else { &self.queue.npu.counters }
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let AclStream { npu, raw, memory, .. } = &*self.queue;
        self.queue.recorded(|recording| {
            let _current = npu.bind()?;
            let number = recording.as_ref().map_or(0, |recording| recording.number());
            let event = Arc::new(AclEvent::create(npu, number)?);
            let mut memory = memory.lock();
            event.record(*raw)?;
            let hold = Hold::Other(Arc::clone(&event) as _);
            match recording {
                Some(recording) => recording.hold(hold),
                None => memory.in_flight.hold(hold),
            }
            Ok(Arc::new(AscendEvent(event)) as Arc<dyn Event>)
        })
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let event = event.as_any().downcast_ref::<AscendEvent>().ok_or(foreign("an event"))?;
        let AclStream { npu, raw, memory, .. } = &*self.queue;
        self.queue.join(event.0.capture, |recording| {
            let _current = npu.bind()?;
            let mut memory = memory.lock();
            event.0.hold_back(npu, *raw)?;
            let hold = Hold::Other(Arc::clone(&event.0) as _);
            if let Some(recording) = recording {
                recording.hold(hold);
                return Ok(());
            }
            memory.in_flight.hold(hold);
            memory.in_flight.tidy(&self.queue)
        })
    }

    fn synchronize(&self) -> Result<()> {
        let _pass = self.queue.outside("a wait of the host")?;
        let _current = self.queue.npu.bind()?;
        self.queue.synchronize(&mut self.queue.memory.lock())
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        let AclStream { npu, raw, memory, .. } = &*self.queue;
        let into = memory::of(npu, dst.storage())?;
        let _pass = self.queue.outside("a write by the host")?;
        let _current = npu.bind()?;
        if src.is_empty() {
            return Ok(());
        }
        let (at, len) = (dst.storage().address() + range.start as u64, src.len());
        let mut memory = memory.lock();
        match into.host() {
            // The host writes to pinned memory directly, once the stream's work is done.
            Some(_) => {
                self.queue.synchronize(&mut memory)?;
                // SAFETY: the range is in the pinned memory, and this stream's work on it is done. The
                // contract requires callers to order other streams before this call.
                unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), at as *mut u8, len) };
            }
            None if len > STAGED => {
                self.queue.synchronize(&mut memory)?;
                // SAFETY: the range is in the storage, and this stream's work on it is done.
                unsafe { copy_now(npu, at, src.as_ptr() as u64, len, CopyDirection::ToDevice) }?;
            }
            None => {
                let staged = memory.lists.stage(npu, src)?;
                memory.in_flight.hold(Hold::Storage(Arc::clone(dst.storage())));
                memory.in_flight.hold(Hold::Other(Arc::clone(&staged) as _));
                copy(npu, *raw, at, staged.host(), len, CopyDirection::ToDevice)?;
            }
        }
        Counters::add(&npu.counters.host_write_bytes, len);
        memory.in_flight.tidy(&self.queue)
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let range = src.host_range(dst.len())?;
        let AclStream { npu, memory, .. } = &*self.queue;
        let from = memory::of(npu, src.storage())?;
        let _pass = self.queue.outside("a read by the host")?;
        let _current = npu.bind()?;
        let at = src.storage().address() + range.start as u64;
        self.queue.synchronize(&mut memory.lock())?;
        if from.kind() == MemoryKind::Pinned {
            // SAFETY: the range is in the pinned memory, and this stream's work on it is done. The contract
            // requires callers to order other streams before this call.
            unsafe { std::ptr::copy_nonoverlapping(at as *const u8, dst.as_mut_ptr(), dst.len()) };
        } else if !dst.is_empty() {
            // SAFETY: the range is in the storage, and this stream's work on it is done.
            unsafe { copy_now(npu, dst.as_mut_ptr() as u64, at, dst.len(), CopyDirection::ToHost) }?;
        }
        Counters::add(&npu.counters.host_read_bytes, dst.len());
        Ok(())
    }

    fn capture(&self, inputs: &StepInputs, record: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        capture(&self.queue, inputs, &mut || {
            let _plans = CapturedPlans;
            record()
        })
    }
}
