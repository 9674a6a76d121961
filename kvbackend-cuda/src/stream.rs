//! [`Stream`] for CUDA: operations, events, host copies, captures. This module is the only caller of
//! [`kernels::lower`].

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent_wait_flags};
use kvcore::device::queue::{self, CapturedStream, Hold};
use kvcore::{
    Checked, Counters, Error, Event, Graph, MemoryKind, Result, StepInputs, Storage, Stream, TensorView,
};

use crate::driver::NAME;
use crate::kernels;
use crate::memory;
use crate::queue::{CudaEvent, CudaGraph, CudaStream, RawStream, capture};

/// The maximum size, in bytes, of a write that the host copies to the stream's pinned memory instead of
/// waiting. For a larger write, the host waits for the stream.
const STAGED: usize = 1 << 20;

impl Stream for CudaStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        let operation = operation.operation();
        self.enqueue(|to| {
            if let Some(recording) = to.recording() {
                capture::admit(recording, operation)?;
            }
            kernels::lower(to, operation)?;
            operation.storages().for_each(|storage| to.hold(Hold::Storage(Arc::clone(storage))));
            Ok(())
        })
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        memory::of(&self.state().on.device, storage).map(drop)
    }

    fn reaches(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.owns(storage).or_else(|foreign| {
            let known = storage.as_any().downcast_ref::<memory::CudaStorage>();
            let on_a_device = known.is_some_and(|known| known.kind() == MemoryKind::Device);
            if on_a_device { Ok(()) } else { Err(foreign) }
        })
    }

    fn counters(&self) -> &Counters {
        let state = self.state();
        if state.records() { &state.side().counters } else { &state.on.device.counters }
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::record(self.state())?))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<CudaEvent>();
        let known = known.ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        self.state().join(known.capture(), |_| {
            let RawStream { device, raw } = &self.state().on;
            let _bound = device.bind()?;
            let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: the stream and the event are alive; the driver allows waiting for another device's
            // event.
            unsafe { result::stream::wait_event(*raw, known.raw(), flags) }
                .map_err(|error| device.refused(error))
        })
    }

    fn synchronize(&self) -> Result<()> {
        let state = self.state();
        let _pass = state.outside("a wait of the host")?;
        let _bound = state.on.device.bind()?;
        state.synchronize(&mut state.queue.lock())
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        self.owns(dst.storage())?;
        let _pass = self.state().outside("a write by the host")?;
        let state = self.state();
        let (device, raw) = (&state.on.device, state.on.raw);
        let _bound = device.bind()?;
        if src.is_empty() {
            return Ok(());
        }
        let at = dst.storage().address() + range.start as u64;
        let mut queue = state.queue.lock();
        queue.in_flight.hold(Hold::Storage(Arc::clone(dst.storage())));
        let host = memory::of(device, dst.storage())?.host();
        if let Some(host) = host.filter(|_| src.len() > STAGED) {
            state.synchronize(&mut queue)?;
            // SAFETY: the range is in the pinned memory, and this stream's work on it is done. The contract
            // requires callers to order other streams before this call.
            unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), host.add(range.start), src.len()) };
        } else {
            let from = if src.len() > STAGED {
                src.as_ptr() as u64
            } else {
                // Decision: docs/decisions/backend-cuda.md#host-copies-to-pinned-memory-go-through-the-device
                // A direct host-to-host copy would not wait for the stream.
                let (upload, from) = if host.is_some() {
                    let upload = queue.uploads.send(&state.on, src)?;
                    let from = upload.address();
                    (upload, from)
                } else {
                    let upload = queue.uploads.stage(device, src)?;
                    let from = upload.host() as u64;
                    (upload, from)
                };
                queue.in_flight.hold(Hold::Other(upload));
                from
            };
            // SAFETY: the range is in the storage. The upload is held until the work is done; `src` stays
            // borrowed until the wait below.
            unsafe { sys::cuMemcpyAsync(at, from, src.len(), raw) }
                .result()
                .map_err(|error| device.refused(error))?;
            if src.len() > STAGED {
                // The copy may still be reading the caller's bytes if they are pinned.
                state.synchronize(&mut queue)?;
            }
        }
        Counters::add(&device.counters.host_write_bytes, src.len());
        queue.in_flight.tidy(&state.on)
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let range = src.host_range(dst.len())?;
        self.owns(src.storage())?;
        let _pass = self.state().outside("a read by the host")?;
        let state = self.state();
        let (device, raw) = (&state.on.device, state.on.raw);
        let _bound = device.bind()?;
        let at = src.storage().address() + range.start as u64;
        let host = memory::of(device, src.storage())?.host();
        let mut queue = state.queue.lock();
        if host.is_none() && !dst.is_empty() {
            // SAFETY: the range is in the storage; `dst` is not used before the wait below.
            unsafe { sys::cuMemcpyAsync(dst.as_mut_ptr() as u64, at, dst.len(), raw) }
                .result()
                .map_err(|error| device.refused(error))?;
        }
        state.synchronize(&mut queue)?;
        if let Some(host) = host {
            // SAFETY: the range is in the pinned memory, and this stream's work on it is done. The contract
            // requires callers to order other streams before this call.
            unsafe { std::ptr::copy_nonoverlapping(host.add(range.start), dst.as_mut_ptr(), dst.len()) };
        }
        Counters::add(&device.counters.host_read_bytes, dst.len());
        Ok(())
    }

    fn capture(&self, inputs: &StepInputs, record: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        let (graph, captured, counts) = queue::capture(self.state(), inputs, record)?;
        Ok(Arc::new(CudaGraph::new(self.state(), graph, captured, counts)?))
    }
}
