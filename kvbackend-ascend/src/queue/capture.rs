//! A capture under way: what the recording thread has enqueued so far, and what the graph will own.
//!
//! A capture belongs to one thread, and has the streams that take part to itself: the stream that began it, and every
//! stream that waits for one of its events. Work of this thread on another stream is refused, because it would be lost.
//! Calls of other threads on these streams wait until the capture ends, because they would enter the graph unseen.
//!
//! Each replay writes the lists of the step. Other lists are constants, which are sent when the capture has ended: nothing
//! is copied from the host while ACL captures.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvcore::{CapturePass, CounterSnapshot, Counters, Error, Operation, ReplayCheck, Result, StepInputs};

use super::activations::ActivationPool;
use super::copies::{CopyDirection, copy_now};
use super::event::AscendEvent;
use super::held::{Used, destroy};
use super::list::ListMemory;
use super::replay::ReplayLists;
use super::scratch::WorkScratch;
use super::state::AclStream;
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::{NAME, uncapturable, unsupported};

thread_local! {
    static RECORDING: RefCell<Option<AclRecording>> = const { RefCell::new(None) };
}

/// Number of the next capture. 0 marks a stream that takes part in no capture.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A capture that this thread records.
pub(crate) struct AclRecording {
    number: u64,
    /// The streams that take part, each with its count of operations when it joined.
    streams: Vec<(Arc<AclStream>, CounterSnapshot)>,
    step: StepInputs,
    pub(super) lists: ReplayLists,
    pub(super) checks: Vec<ReplayCheck>,
    pub(super) used: Vec<Used>,
    /// Addresses of what `used` holds.
    known: HashSet<usize>,
    /// Lists that are the same in each replay.
    constants: Vec<(Arc<ListMemory>, Vec<u8>)>,
    /// Memory between operators, by the stream that took part.
    scratch: Vec<(usize, WorkScratch)>,
    /// Pools of activations, each with the pool that serves the same steps outside of captures. They are the graph's own:
    /// another graph must not work in memory that holds this graph's results.
    pub(super) activations: Vec<(usize, Arc<ActivationPool>)>,
    /// The first refusal, in case the recorded function does not return it.
    refused: Option<Error>,
}

/// Calls `body` with the capture that this thread records, if any. Waits first while another thread captures the stream.
///
/// # Errors
/// Returns [`Error::Unsupported`] if this thread records a capture that the stream has not joined.
pub(crate) fn with<R>(
    stream: &AclStream,
    body: impl FnOnce(Option<&mut AclRecording>) -> Result<R>,
) -> Result<R> {
    RECORDING.with_borrow_mut(|slot| match slot {
        None => {
            let _pass = stream.gate.enter();
            body(None)
        }
        Some(recording) if stream.gate.capture() == recording.number => {
            let result = body(Some(recording));
            result.map_err(|error| recording.refuse(error))
        }
        Some(recording) => Err(recording.refuse(not_joined())),
    })
}

fn not_joined() -> Error {
    uncapturable("work on a stream that has not joined the capture")
}

/// Refuses a call of a thread that records a capture. Waits first while another thread captures the stream, and keeps
/// captures away until the pass is dropped.
///
/// # Errors
/// Returns [`Error::Unsupported`], which names the call.
pub(crate) fn outside<'a>(stream: &'a AclStream, what: &str) -> Result<CapturePass<'a>> {
    RECORDING.with_borrow_mut(|slot| match slot {
        None => Ok(stream.gate.enter()),
        Some(recording) => {
            let joined = stream.gate.capture() == recording.number;
            Err(recording.refuse(if joined { uncapturable(what) } else { not_joined() }))
        }
    })
}

/// Refuses a call that cannot be captured, if the event that it uses is part of a capture.
///
/// # Errors
/// Returns [`Error::Unsupported`], which names the call.
pub(crate) fn refuse(event: &AscendEvent, what: &str) -> Result<()> {
    if event.0.capture == 0 {
        return Ok(());
    }
    let refused = |slot: &mut Option<AclRecording>| {
        let error = uncapturable(what);
        slot.as_mut().map_or(error.clone(), |recording| recording.refuse(error))
    };
    Err(RECORDING.with_borrow_mut(refused))
}

/// Returns whether this thread records what is enqueued on a stream.
pub(crate) fn records(stream: &AclStream) -> bool {
    RECORDING
        .with_borrow(|slot| slot.as_ref().is_some_and(|recording| stream.gate.capture() == recording.number))
}

/// Lets a stream take part in the capture whose event it waits for. For an event of no capture, keeps captures away.
/// `body` enqueues the wait, and is given the capture.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the capture is not this thread's or has ended, and for an event from before the
/// capture that the stream takes part in.
pub(crate) fn join<R>(
    stream: &Arc<AclStream>,
    event: &AscendEvent,
    body: impl FnOnce(Option<&mut AclRecording>) -> Result<R>,
) -> Result<R> {
    let number = event.0.capture;
    if number == 0 {
        let _pass = outside(stream, "a wait for an event from before the capture")?;
        return body(None);
    }
    RECORDING.with_borrow_mut(|slot| match slot {
        Some(recording) if recording.number == number => {
            if stream.gate.capture() != number {
                stream.gate.close(number);
                recording.streams.push((Arc::clone(stream), stream.captured.snapshot()));
            }
            let result = body(Some(recording));
            result.map_err(|error| recording.refuse(error))
        }
        _ => Err(uncapturable("a wait for an event of another capture, or of one that has ended,")),
    })
}

/// A capture on a stream. It is discarded unless it is ended.
pub(crate) struct OpenCapture<'a>(&'a Arc<AclStream>);

impl<'a> OpenCapture<'a> {
    /// Begins a capture.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] inside of a capture and if this CANN captures no graphs, and the errors of the device.
    pub(crate) fn begin(stream: &'a Arc<AclStream>, step: &StepInputs) -> Result<Self> {
        drop(outside(stream, "a second capture")?);
        let acl = &stream.npu.library.acl;
        if !stream.npu.library.captures() {
            return Err(unsupported("captures of graphs by this CANN"));
        }
        let _current = stream.npu.bind()?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        stream.gate.close(number);
        // SAFETY: the stream is alive. Memory that captured work uses is held by the graph.
        let code = unsafe { acl.aclmdlRICaptureBegin(stream.raw, sys::ACL_MODEL_RI_CAPTURE_MODE_RELAXED) };
        if let Err(error) = stream.npu.check(code) {
            stream.gate.open();
            return Err(error);
        }
        RECORDING.set(Some(AclRecording {
            number,
            streams: vec![(Arc::clone(stream), stream.captured.snapshot())],
            step: step.clone(),
            lists: ReplayLists::default(),
            checks: Vec::new(),
            used: Vec::new(),
            known: HashSet::new(),
            constants: Vec::new(),
            scratch: Vec::new(),
            activations: Vec::new(),
            refused: None,
        }));
        Ok(Self(stream))
    }

    /// Ends the capture. Returns the graph, which the caller destroys, with what was recorded and the operations counted.
    ///
    /// # Errors
    /// Returns the first refusal of the capture, and the errors of the device.
    pub(crate) fn end(self) -> Result<(sys::aclmdlRI, AclRecording, CounterSnapshot)> {
        let (ended, recording) = self.close();
        std::mem::forget(self);
        let (Some(mut recording), graph) = (recording, ended?) else {
            return Err(uncapturable("a capture of another thread"));
        };
        let counts = Counters::default();
        for (stream, before) in &recording.streams {
            counts.add_all(&stream.captured.snapshot().since(before));
        }
        let home = Arc::clone(&recording.streams[0].0);
        recording.streams.clear();
        let kept = match recording.refused.take() {
            None => recording.send_constants(&home.npu),
            Some(error) => Err(error),
        };
        if let Err(error) = kept {
            destroy(&home.npu, graph);
            return Err(error);
        }
        let mut shared = home.graphs.lock();
        shared.clear();
        shared.extend(
            recording
                .scratch
                .iter()
                .filter_map(|(key, scratch)| scratch.memory().map(|memory| (*key, Arc::downgrade(memory)))),
        );
        drop(shared);
        Ok((graph, recording, counts.snapshot()))
    }

    fn close(&self) -> (Result<sys::aclmdlRI>, Option<AclRecording>) {
        let npu = &self.0.npu;
        let recording = RECORDING.take();
        let graph = npu.bind().and_then(|_current| {
            let mut graph = std::ptr::null_mut();
            // SAFETY: the stream is alive; its capture was begun by this thread. `graph` is a place for the answer.
            npu.check(unsafe { npu.library.acl.aclmdlRICaptureEnd(self.0.raw, &raw mut graph) })?;
            Ok(graph)
        });
        for (stream, _) in recording.iter().flat_map(|recording| &recording.streams) {
            stream.gate.open();
        }
        (graph, recording)
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if let (Ok(graph), _) = self.close() {
            destroy(&self.0.npu, graph);
        }
    }
}

impl AclRecording {
    /// Notes a refusal, and returns it.
    fn refuse(&mut self, error: Error) -> Error {
        self.refused.get_or_insert_with(|| error.clone());
        error
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn step(&self) -> &StepInputs {
        &self.step
    }

    /// Checks that an operation can be replayed with other lists, and notes its check.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation.
    pub(super) fn admit(&mut self, operation: Operation<'_>) -> Result<()> {
        let check = ReplayCheck::of(NAME, operation, &self.step)?;
        if let Some(check) = check
            && !self.checks.iter().any(|known| known.covers(&check))
        {
            self.checks.push(check);
        }
        Ok(())
    }

    pub(crate) fn hold(&mut self, used: Used) {
        if self.known.insert(used.address()) {
            self.used.push(used);
        }
    }

    /// Allocates memory for a list that is the same in each replay.
    pub(super) fn constant(&mut self, npu: &Arc<Npu>, bytes: &[u8]) -> Result<Arc<ListMemory>> {
        let made = Arc::new(ListMemory::on_device(npu, bytes.len())?);
        self.constants.push((Arc::clone(&made), bytes.to_vec()));
        self.hold(Used::List(Arc::clone(&made)));
        Ok(made)
    }

    fn send_constants(&mut self, npu: &Arc<Npu>) -> Result<()> {
        let _current = npu.bind()?;
        for (to, bytes) in self.constants.drain(..).filter(|(_, bytes)| !bytes.is_empty()) {
            let from = bytes.as_ptr() as u64;
            // SAFETY: the memory has room for the bytes, and no work uses it before the graph's first replay.
            unsafe { copy_now(npu, to.address(), from, bytes.len(), CopyDirection::ToDevice) }?;
        }
        Ok(())
    }

    /// Returns the memory between the operators of a stream. Work outside of graphs has other memory, because it may run
    /// at the same time as a replay.
    pub(super) fn scratch(&mut self, stream: sys::aclrtStream) -> &mut WorkScratch {
        let key = stream as usize;
        let at = self.scratch.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let shared = self.streams[0].0.graphs.lock();
            let memory = shared.iter().find(|(known, _)| *known == key).and_then(|(_, held)| held.upgrade());
            self.scratch.push((key, WorkScratch::over(memory)));
            self.scratch.len() - 1
        });
        &mut self.scratch[at].1
    }

    /// Returns the pool of activations that takes the place of `usual`.
    pub(crate) fn activations(&mut self, usual: &Arc<ActivationPool>) -> Arc<ActivationPool> {
        let key = Arc::as_ptr(usual) as usize;
        if let Some((_, known)) = self.activations.iter().find(|(known, _)| *known == key) {
            return Arc::clone(known);
        }
        let made = Arc::<ActivationPool>::default();
        self.activations.push((key, Arc::clone(&made)));
        made
    }
}
