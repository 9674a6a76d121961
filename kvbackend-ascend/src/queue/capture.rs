//! ACL captures, and the lists and memory that a capture records.
//!
//! Each replay rewrites the step's lists. All other lists are constants. They are uploaded after the capture
//! has ended, because nothing may be copied from the host during a capture.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

use kvcore::device::queue::{self, CaptureSide, CapturedStream, Hold, Recording, StepLists};
use kvcore::{Graph, MemoryKind, Result, StepInputs};

use super::copies::{CopyDirection, copy_now};
use super::event::AscendEvent;
use super::graph::{AclGraph, AscendGraph, CapturedWork};
use super::list::ListMemory;
use super::scratch::WorkScratch;
use super::state::AclStream;
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::{NAME, unsupported};
use crate::memory::AscendStorage;

/// A capture that the current thread is recording.
pub(super) type AclRecording = Recording<AclStream>;

thread_local! {
    static RECORDING: RefCell<Option<AclRecording>> = const { RefCell::new(None) };
}

/// Alignment of the lists that replays write, in bytes.
const ALIGN: usize = 64;

/// Computes the contents of a step's list, in the format that the graph's operators expect.
pub(crate) type MakeList = Box<dyn Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync>;

/// The lists and memory that a capture records and its graph keeps.
#[derive(Default)]
pub(crate) struct CaptureNotes {
    /// The lists that each replay rewrites.
    pub(super) lists: StepLists<MakeList>,
    /// The lists that do not change between replays.
    constants: Vec<(Arc<ListMemory>, Vec<u8>)>,
    /// The scratch memory of each stream in the capture, identified by the ACL stream's address.
    scratch: Vec<(usize, WorkScratch)>,
}

impl CapturedStream for AclStream {
    const BACKEND: &'static str = NAME;
    type Graph = AclGraph;
    type Notes = CaptureNotes;
    type Memory = AscendStorage;

    fn side(&self) -> &CaptureSide {
        &self.side
    }

    fn slot() -> &'static LocalKey<RefCell<Option<AclRecording>>> {
        &RECORDING
    }

    fn begin(&self) -> Result<()> {
        let library = self.npu.library;
        if !library.captures() {
            return Err(unsupported("captures of graphs by this CANN"));
        }
        let _current = self.npu.bind()?;
        let mode = sys::ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive. The graph holds the memory that captured work uses.
        self.npu.check(unsafe { library.acl.aclmdlRICaptureBegin(self.raw, mode) })
    }

    fn end(&self) -> Result<AclGraph> {
        let _current = self.npu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is alive, and this thread began its capture. `raw` is valid for writes.
        self.npu.check(unsafe { self.npu.library.acl.aclmdlRICaptureEnd(self.raw, &raw mut raw) })?;
        Ok(AclGraph { raw, npu: Arc::clone(&self.npu) })
    }
}

/// Captures the work that `record` enqueues on a stream as a graph.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] if a graph cannot hold the work, if another capture is under way,
/// or if this CANN cannot capture graphs. Otherwise returns an error of `record` or of the device.
pub(crate) fn capture(
    stream: &Arc<AclStream>,
    step: &StepInputs,
    record: &mut dyn FnMut() -> Result<()>,
) -> Result<Arc<dyn Graph>> {
    let (graph, mut captured, counts) = queue::capture(stream, step, record)?;
    captured.notes.send_constants(&stream.npu)?;
    let scratch = captured.notes.scratch.iter();
    *stream.graphs.lock() = scratch
        .filter_map(|(key, scratch)| scratch.memory().map(|memory| (*key, Arc::downgrade(memory))))
        .collect();
    let work = Arc::new(CapturedWork { graph, captured });
    Ok(Arc::new(AscendGraph { stream: Arc::clone(stream), work, counts }))
}

impl AscendEvent {
    /// Checks that the event does not belong to a capture, because the call cannot be captured. `what`
    /// describes the call.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`], which names the call, if the event belongs to a capture.
    pub(crate) fn refuse_capture(&self, what: &str) -> Result<()> {
        AclStream::refuse_event(self.0.capture, what)
    }
}

impl CaptureNotes {
    /// Uploads the constants to the device. The graph must not have run yet.
    fn send_constants(&mut self, npu: &Npu) -> Result<()> {
        let _current = npu.bind()?;
        for (to, bytes) in self.constants.drain(..).filter(|(_, bytes)| !bytes.is_empty()) {
            let from = bytes.as_ptr() as u64;
            // SAFETY: the memory has room for the bytes, and no work uses it before the graph's first replay.
            unsafe { copy_now(npu, to.address(), from, bytes.len(), CopyDirection::ToDevice) }?;
        }
        Ok(())
    }
}

/// Adds a list that each replay rewrites, and returns its address on the device.
pub(super) fn add_list(
    recording: &mut AclRecording,
    npu: &Arc<Npu>,
    bytes: usize,
    make: MakeList,
) -> Result<u64> {
    let allocate = |len| Ok(Arc::new(AscendStorage::uninitialised(npu, MemoryKind::Device, len)?) as _);
    recording.notes().lists.add(make, bytes, ALIGN, allocate)
}

/// Adds a list that does not change between replays.
pub(super) fn add_constant(
    recording: &mut AclRecording,
    npu: &Arc<Npu>,
    bytes: &[u8],
) -> Result<Arc<ListMemory>> {
    let list = Arc::new(ListMemory::on_device(npu, bytes.len())?);
    recording.notes().constants.push((Arc::clone(&list), bytes.to_vec()));
    recording.hold(Hold::Other(Arc::clone(&list) as _));
    Ok(list)
}

/// Returns the scratch memory that a stream uses during the capture. Work outside of graphs uses other
/// memory, because it may run at the same time as a replay.
pub(super) fn scratch(recording: &mut AclRecording, stream: sys::aclrtStream) -> &mut WorkScratch {
    let key = stream as usize;
    if recording.notes().scratch.iter().all(|(known, _)| *known != key) {
        let shared = recording.home().graphs.lock();
        let memory = shared.iter().find(|(known, _)| *known == key).and_then(|(_, memory)| memory.upgrade());
        drop(shared);
        recording.notes().scratch.push((key, WorkScratch::over(memory)));
    }
    let scratch = &mut recording.notes().scratch;
    let at = scratch.iter().position(|(known, _)| *known == key).unwrap_or_default();
    &mut scratch[at].1
}
