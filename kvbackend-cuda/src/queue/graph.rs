//! Graphs: captured work, and its replay with new lists.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUgraphExec};
use kvcore::device::queue::{Captured, CapturedStream, Hold};
use kvcore::{CounterSnapshot, Counters, Graph, MemoryKind, Result, StepInputs};
use smallvec::SmallVec;

use super::raw::RawGraph;
use super::state::CudaStreamState;
use super::upload::{AHEAD, copy_up};
use crate::device::CudaDevice;

/// A captured step of a [`CudaStream`](crate::CudaStream).
pub(crate) struct CudaGraph {
    stream: Arc<CudaStreamState>,
    work: Arc<GraphWork>,
    /// The operation counts that each replay adds to the device's counters.
    counts: CounterSnapshot,
}

/// The driver's graph and all memory that it uses. Each replay holds both until it is done.
struct GraphWork {
    exec: CUgraphExec,
    device: Arc<CudaDevice>,
    captured: Captured<CudaStreamState>,
}

// SAFETY: driver graphs may be launched and destroyed from any thread; the stream's lock orders the launches.
unsafe impl Send for GraphWork {}
// SAFETY: the same condition as for `Send`.
unsafe impl Sync for GraphWork {}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph on {:?}", self.stream.on.device)
    }
}

impl Drop for GraphWork {
    fn drop(&mut self) {
        let Ok(_bound) = self.device.bind() else { return };
        // SAFETY: the graph is alive, and its launches are done, because they hold it.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

impl CudaGraph {
    /// Creates a graph from a capture that has ended.
    pub(crate) fn new(
        stream: &Arc<CudaStreamState>,
        graph: RawGraph,
        captured: Captured<CudaStreamState>,
        counts: CounterSnapshot,
    ) -> Result<Self> {
        let device = Arc::clone(&stream.on.device);
        let _bound = device.bind()?;
        // SAFETY: the graph is alive, and 0 means no flags.
        let exec = unsafe {
            result::graph::instantiate(graph.raw, std::mem::zeroed::<sys::CUgraphInstantiate_flags>())
        };
        drop(graph);
        let exec = exec.map_err(|error| device.no_memory(error, MemoryKind::Device, 0))?;
        let work = Arc::new(GraphWork { exec, device: Arc::clone(&device), captured });
        Ok(Self { stream: Arc::clone(stream), work, counts })
    }
}

// Decision: docs/decisions/backend-cuda.md#a-replay-uploads-all-lists-in-one-copy-outside-the-graph
impl Graph for CudaGraph {
    fn replay(&self, inputs: &StepInputs) -> Result<()> {
        let CudaStreamState { on, queue, .. } = &*self.stream;
        let device = &on.device;
        let _pass = self.stream.outside("a replay")?;
        let GraphWork { exec, captured, .. } = &*self.work;
        captured.check(inputs)?;
        captured.notes.check_tables()?;
        let contents = captured.notes.lists.contents(|list, room| list.write(inputs, room))?;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        queue.in_flight.wait_until(AHEAD)?;
        let mut staged: SmallVec<[_; 1]> = SmallVec::new();
        for (_, bytes) in &contents {
            staged.push(queue.uploads.stage(device, bytes)?);
        }
        for (upload, (to, bytes)) in staged.into_iter().zip(&contents) {
            // SAFETY: the graph's memory has room for the bytes, and the previous replay reads it before this
            // copy in the stream's order.
            unsafe { copy_up(on, &upload, *to, bytes.len()) }?;
            queue.in_flight.hold(Hold::Other(upload));
        }
        queue.in_flight.hold(Hold::Other(Arc::clone(&self.work) as _));
        // SAFETY: the graph and the stream are alive, and the graph is held until the replay is done.
        unsafe { result::graph::launch(*exec, on.raw) }.map_err(|error| device.refused(error))?;
        device.counters.add_all(&self.counts);
        Counters::add(&device.counters.plan_bytes, contents.iter().map(|(_, bytes)| bytes.len()).sum());
        queue.in_flight.cut(on)
    }
}
