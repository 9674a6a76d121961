//! Captures by ACL: the lists and the memory that a capture records.
//!
//! Each replay writes the lists of the step. Other lists are constants, which are sent when the capture has
//! ended: nothing is copied from the host while ACL captures.

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

/// A capture that this thread records.
pub(super) type AclRecording = Recording<AclStream>;

thread_local! {
    static RECORDING: RefCell<Option<AclRecording>> = const { RefCell::new(None) };
}

/// Alignment of the lists that replays write, in bytes.
const ALIGN: usize = 64;

/// Makes a list of a step, as the operators of a graph read it.
pub(crate) type MakeList = Box<dyn Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync>;

/// Lists and memory that a capture records, and its graph keeps.
#[derive(Default)]
pub(crate) struct CaptureNotes {
    /// Lists that each replay writes.
    pub(super) lists: StepLists<MakeList>,
    /// Lists that are the same in each replay.
    constants: Vec<(Arc<ListMemory>, Vec<u8>)>,
    /// Memory between operators, by the stream that took part.
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
        // SAFETY: the stream is alive. Memory that captured work uses is held by the graph.
        self.npu.check(unsafe { library.acl.aclmdlRICaptureBegin(self.raw, mode) })
    }

    fn end(&self) -> Result<AclGraph> {
        let _current = self.npu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is alive; its capture was begun by this thread. `raw` is a place for the answer.
        self.npu.check(unsafe { self.npu.library.acl.aclmdlRICaptureEnd(self.raw, &raw mut raw) })?;
        Ok(AclGraph { raw, npu: Arc::clone(&self.npu) })
    }
}

/// Captures what `record` enqueues on a stream.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] for work that a graph cannot hold, inside of another capture, and
/// if this CANN captures no graphs. Returns the errors of `record` and of the device.
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
    /// Refuses a call that cannot be captured, if the event is part of a capture.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`], which names the call.
    pub(crate) fn refuse_capture(&self, what: &str) -> Result<()> {
        AclStream::refuse_event(self.0.capture, what)
    }
}

impl CaptureNotes {
    /// Sends the constants. The device's graph has not run yet.
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

/// Adds a list that each replay writes. Returns its address on the device.
pub(super) fn add_list(
    recording: &mut AclRecording,
    npu: &Arc<Npu>,
    bytes: usize,
    make: MakeList,
) -> Result<u64> {
    let allocate = |len| Ok(Arc::new(AscendStorage::uninitialised(npu, MemoryKind::Device, len)?) as _);
    recording.notes().lists.add(make, bytes, ALIGN, allocate)
}

/// Adds a list that is the same in each replay.
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

/// Returns the memory between the operators of a stream. Work outside of graphs has other memory, because it
/// may run at the same time as a replay.
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
