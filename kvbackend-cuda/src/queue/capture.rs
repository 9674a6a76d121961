//! Driver captures, and the data that a graph of this backend keeps.
//!
//! The step's lists are in memory that each replay writes ([`StepLists`]). All other lists are constants in
//! the graph.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

use cudarc::driver::result;
use cudarc::driver::sys::CUstreamCaptureMode;
use kvcore::device::queue::{CaptureSide, CapturedStream, StepLists};
use kvcore::{Error, Operation, Result, Rope, RopeTable};

use super::lists::StepList;
use super::plans::AttendPlans;
use super::raw::RawGraph;
use super::state::CudaStreamState;
use crate::driver::NAME;
use crate::memory::CudaStorage;

/// A capture on this backend's streams.
pub(crate) type CudaRecording = kvcore::device::queue::Recording<CudaStreamState>;

thread_local! {
    static RECORDING: RefCell<Option<CudaRecording>> = const { RefCell::new(None) };
}

/// Data that is collected during a capture and kept by the resulting graph.
#[derive(Default)]
pub(crate) struct GraphNotes {
    pub(super) lists: StepLists<StepList>,
    pub(super) plans: AttendPlans,
    /// The angle tables that kernels read. A table that must grow is replaced by a new one.
    tables: Vec<(Arc<Rope>, Arc<RopeTable>)>,
}

impl GraphNotes {
    /// Checks that no angle table has grown since the capture.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if a position is past the end of the angle table that the graph
    /// reads.
    pub(super) fn check_tables(&self) -> Result<()> {
        for (rope, table) in &self.tables {
            if !Arc::ptr_eq(&rope.table([])?, table) {
                return Err(Error::GraphOutgrown { what: "positions" });
            }
        }
        Ok(())
    }
}

/// Returns the error for an operation that cannot be captured in a graph.
pub(crate) fn uncapturable(what: &str) -> Error {
    kvcore::device::capture::uncapturable(NAME, what)
}

/// Checks that an operation can be replayed with different lists. Stores the check that each replay
/// repeats, and the angle table that the operation reads.
///
/// # Errors
/// Returns [`Error::Unsupported`], which names the operation, if it cannot be replayed.
pub(crate) fn admit(recording: &mut CudaRecording, operation: Operation<'_>) -> Result<()> {
    if let Some(rope) = recording.admit(operation)? {
        let table = rope.table([])?;
        recording.notes().tables.push((rope, table));
    }
    Ok(())
}

// Decision: docs/decisions/backend-cuda.md#a-capture-belongs-to-a-thread
impl CapturedStream for CudaStreamState {
    const BACKEND: &'static str = NAME;
    type Graph = RawGraph;
    type Notes = GraphNotes;
    type Memory = CudaStorage;

    fn side(&self) -> &CaptureSide {
        &self.side
    }

    fn slot() -> &'static LocalKey<RefCell<Option<CudaRecording>>> {
        &RECORDING
    }

    fn begin(&self) -> Result<()> {
        let _bound = self.on.device.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive. The graph holds the memory that captured work uses.
        unsafe { result::stream::begin_capture(self.on.raw, mode) }
            .map_err(|error| self.on.device.refused(error))
    }

    fn end(&self) -> Result<RawGraph> {
        let device = &self.on.device;
        let _bound = device.bind()?;
        // SAFETY: the stream is alive, and this thread began its capture.
        let raw = unsafe { result::stream::end_capture(self.on.raw) };
        Ok(RawGraph { raw: raw.map_err(|error| device.refused(error))?, device: Arc::clone(device) })
    }
}
