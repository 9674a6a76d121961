//! Graphs: captured work, and its replay with other lists.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use kvcore::{CounterSnapshot, Counters, Graph, MemoryKind, Result, StepInputs};
use smallvec::SmallVec;

use super::StreamState;
use super::capture::{self, Recording};
use super::flight::Held;
use super::inputs::Inputs;
use super::recheck::Recheck;
use crate::dense::ActivationMemory;
use crate::device::Device;

/// Replays that may be enqueued and not done. The host waits for the oldest before it enqueues another.
pub(super) const AHEAD: usize = 32;

/// A captured step of a [`CudaStream`](super::CudaStream).
pub(super) struct CudaGraph {
    stream: Arc<StreamState>,
    work: Arc<CapturedWork>,
    /// What the captured operations add to the counters.
    counts: CounterSnapshot,
}

/// The driver's graph and all memory that it touches. Each replay holds it until it is done.
pub(crate) struct CapturedWork {
    exec: CUgraphExec,
    device: Arc<Device>,
    inputs: Inputs,
    rechecks: Vec<Recheck>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    held: Vec<Held>,
    #[expect(dead_code, reason = "held so that the memory stays")]
    activations: Vec<(usize, Arc<ActivationMemory>)>,
}

// SAFETY: the driver's graphs may be launched and destroyed from any thread; launches are ordered by the stream's lock.
unsafe impl Send for CapturedWork {}
// SAFETY: as for `Send`.
unsafe impl Sync for CapturedWork {}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph on {:?}", self.stream.device)
    }
}

impl fmt::Debug for CapturedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapturedWork on {:?}", self.device)
    }
}

impl Drop for CapturedWork {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // SAFETY: the graph is alive, and its launches are done, because they hold it.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

impl CudaGraph {
    /// Makes a graph of a capture that has ended. Destroys `graph`.
    pub(super) fn new(
        stream: &Arc<StreamState>,
        graph: CUgraph,
        recording: Recording,
        counts: CounterSnapshot,
    ) -> Result<Self> {
        let device = Arc::clone(&stream.device);
        let _bound = device.bind()?;
        // SAFETY: zero is the value without flags, of a plain number; the graph is alive and destroyed once.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, std::mem::zeroed::<sys::CUgraphInstantiate_flags>());
            let _ = result::graph::destroy(graph);
            exec
        };
        let exec = exec.map_err(|error| device.no_memory(error, MemoryKind::Device, 0))?;
        let Recording { inputs, rechecks, held, activations, .. } = recording;
        let work = CapturedWork { exec, device: Arc::clone(&device), inputs, rechecks, held, activations };
        Ok(Self { stream: Arc::clone(stream), work: Arc::new(work), counts })
    }
}

impl Graph for CudaGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let StreamState { device, raw, queue, .. } = &*self.stream;
        let _pass = capture::outside(&self.stream, "a replay")?;
        let work = &self.work;
        work.rechecks.iter().try_for_each(|recheck| recheck.check(inputs))?;
        let contents = work.inputs.contents(device, inputs)?;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        let refused = |error| device.refused(error);
        queue.in_flight.wait_until(AHEAD).map_err(refused)?;
        let mut staged: SmallVec<[_; 1]> = SmallVec::new();
        for (_, bytes) in &contents {
            staged.push(queue.uploads.stage(device, bytes)?);
        }
        for (upload, (to, bytes)) in staged.into_iter().zip(&contents) {
            // SAFETY: the pinned memory has these bytes and is held until the copy is done. The graph's memory has room
            // for them; its last replay reads it earlier in the order of the stream.
            unsafe {
                let host = std::slice::from_raw_parts(upload.host().cast::<u8>(), bytes.len());
                result::memcpy_htod_async(*to, host, *raw).map_err(refused)?;
            }
            queue.in_flight.hold(Held::Upload(upload));
        }
        queue.in_flight.hold(Held::Graph(Arc::clone(work)));
        // SAFETY: graph and stream are alive, and the graph is held until it is done.
        unsafe { result::graph::launch(work.exec, *raw) }.map_err(refused)?;
        device.counters.add_all(&self.counts);
        Counters::add(&device.counters.plan_bytes, contents.iter().map(|(_, bytes)| bytes.len()).sum());
        queue.in_flight.cut(*raw).map_err(refused)
    }
}
