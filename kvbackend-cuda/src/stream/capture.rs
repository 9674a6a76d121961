//! A capture under way: what the recording thread has enqueued so far, and what the graph will own.
//!
//! A capture belongs to one thread, and has the streams that take part for itself: the stream that began it, and those that
//! wait for one of its events. Work on another stream by this thread is refused, because it would be lost. Calls of other
//! threads on these streams wait until the capture ends ([`kvcore::CaptureGate`]), because they would enter the graph unseen.
//!
//! Lists of the step lie in memory that each replay writes ([`Inputs`]). Other lists are constants of the graph.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::result;
use cudarc::driver::sys::{CUgraph, CUstreamCaptureMode};
use kvcore::{CapturePass, CounterSnapshot, Error, MemoryKind, Operation, Result, StepInputs, Storage};

use super::StreamState;
use super::flight::Held;
use super::inputs::{Inputs, List};
use super::recheck::Recheck;
use crate::NAME;
use crate::dense::ActivationMemory;
use crate::device::Device;
use crate::kernels::Plans;
use crate::memory::CudaStorage;

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Number of the next capture. 0 marks a stream that takes part in none.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Returns the error for something that a graph cannot hold.
pub(crate) fn uncapturable(what: &str) -> Error {
    kvcore::device::capture::uncapturable(NAME, what)
}

/// Memory that the graphs of a stream share, as long as one of them holds it: their replays follow one another.
#[derive(Default)]
pub(super) struct GraphMemory {
    /// Memory between the kernels of an operation, by the stream that took part.
    scratch: Vec<(usize, Weak<dyn Storage>)>,
}

impl GraphMemory {
    /// Returns the scratch of a stream, or makes it known.
    fn scratch(
        &mut self,
        key: usize,
        bytes: usize,
        make: impl FnOnce() -> Result<Arc<dyn Storage>>,
    ) -> Result<Arc<dyn Storage>> {
        self.scratch.retain(|(_, held)| held.strong_count() > 0);
        let held = self.scratch.iter().filter(|(of, _)| *of == key).find_map(|(_, held)| held.upgrade());
        if let Some(held) = held.filter(|held| held.len() >= bytes) {
            return Ok(held);
        }
        let made = make()?;
        self.scratch.retain(|(of, _)| *of != key);
        self.scratch.push((key, Arc::downgrade(&made)));
        Ok(made)
    }
}

/// A capture that this thread records.
pub(crate) struct Recording {
    number: u64,
    /// The streams that take part, each with its count of operations when it joined.
    streams: Vec<(Arc<StreamState>, CounterSnapshot)>,
    step: StepInputs,
    pub(super) inputs: Inputs,
    pub(super) rechecks: Vec<Recheck>,
    pub(super) held: Vec<Held>,
    known: HashSet<usize>,
    pub(super) plans: Plans,
    /// Memory of activations, by the memory that serves the same steps outside of captures. It is the graph's own: what
    /// one graph leaves for its caller must not lie where another one works.
    pub(super) activations: Vec<(usize, Arc<ActivationMemory>)>,
    /// The first refusal, in case that the recorded function does not return it.
    refused: Option<Error>,
}

/// Calls `body` with the capture that this thread records, if any. Waits first while another thread captures the stream.
///
/// # Errors
/// Returns [`Error::Unsupported`] if this thread records a capture that the stream has not joined.
pub(crate) fn with<R>(
    stream: &StreamState,
    body: impl FnOnce(Option<&mut Recording>) -> Result<R>,
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
pub(crate) fn outside<'a>(stream: &'a StreamState, what: &str) -> Result<CapturePass<'a>> {
    RECORDING.with_borrow_mut(|slot| match slot {
        None => Ok(stream.gate.enter()),
        Some(recording) => {
            let joined = stream.gate.capture() == recording.number;
            Err(recording.refuse(if joined { uncapturable(what) } else { not_joined() }))
        }
    })
}

/// Returns whether this thread records what is enqueued on a stream.
pub(super) fn records(stream: &StreamState) -> bool {
    RECORDING
        .with_borrow(|slot| slot.as_ref().is_some_and(|recording| stream.gate.capture() == recording.number))
}

/// Lets a stream that waits for an event of capture `number` take part, or keeps captures away if the event is of none.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the capture is not this thread's or has ended, and for an event from before the
/// capture that the stream takes part in.
pub(super) fn join(stream: &Arc<StreamState>, number: u64) -> Result<CapturePass<'_>> {
    if number == 0 {
        return outside(stream, "a wait for an event from before the capture");
    }
    RECORDING.with_borrow_mut(|slot| match slot {
        Some(recording) if recording.number == number => {
            if stream.gate.capture() != number {
                stream.gate.close(number);
                recording.streams.push((Arc::clone(stream), stream.captured.snapshot()));
            }
            Ok(CapturePass::within_capture())
        }
        _ => Err(uncapturable("a wait for an event of another capture, or of one that has ended,")),
    })
}

/// A capture on a stream. It is thrown away unless it is ended.
pub(super) struct Open<'a>(&'a Arc<StreamState>);

impl<'a> Open<'a> {
    /// Begins a capture.
    pub(super) fn begin(stream: &'a Arc<StreamState>, step: &StepInputs) -> Result<Self> {
        drop(outside(stream, "a second capture")?);
        let _bound = stream.device.bind()?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        stream.gate.close(number);
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive. Memory that captured work uses is held by the graph.
        if let Err(error) = unsafe { result::stream::begin_capture(stream.raw, mode) } {
            stream.gate.open();
            return Err(stream.device.refused(error));
        }
        let recording = Recording {
            number,
            streams: vec![(Arc::clone(stream), stream.captured.snapshot())],
            step: step.clone(),
            inputs: Inputs::default(),
            rechecks: Vec::new(),
            held: Vec::new(),
            known: HashSet::new(),
            plans: Plans::default(),
            activations: Vec::new(),
            refused: None,
        };
        RECORDING.set(Some(recording));
        Ok(Self(stream))
    }

    /// Ends the capture. Returns the graph, which the caller destroys, with what was recorded and the operations counted.
    pub(super) fn end(self) -> Result<(CUgraph, Recording, CounterSnapshot)> {
        let (ended, recording) = self.close();
        std::mem::forget(self);
        let (Some(mut recording), graph) = (recording, ended?) else {
            return Err(uncapturable("a capture of another thread"));
        };
        let refused = recording.refused.take();
        let counts = kvcore::Counters::default();
        for (stream, before) in &recording.streams {
            counts.add_all(&stream.captured.snapshot().since(before));
        }
        recording.streams.clear();
        match refused {
            None => Ok((graph, recording, counts.snapshot())),
            Some(error) => {
                // SAFETY: the graph was just made, and nothing else knows it.
                let _ = unsafe { result::graph::destroy(graph) };
                Err(error)
            }
        }
    }

    fn close(&self) -> (Result<CUgraph>, Option<Recording>) {
        let device = &self.0.device;
        let recording = RECORDING.take();
        let graph = device.bind().and_then(|_bound| {
            // SAFETY: the stream is alive; its capture was begun by this thread.
            unsafe { result::stream::end_capture(self.0.raw) }.map_err(|error| device.refused(error))
        });
        for (stream, _) in recording.iter().flat_map(|recording| &recording.streams) {
            stream.gate.open();
        }
        (graph, recording)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let (Ok(graph), _) = self.close()
            && let Ok(_bound) = self.0.device.bind()
        {
            // SAFETY: the graph was just made, and nothing else knows it.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }
}

impl Recording {
    /// Notes a refusal, and returns it.
    fn refuse(&mut self, error: Error) -> Error {
        self.refused.get_or_insert_with(|| error.clone());
        error
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Checks that an operation can be replayed with other lists, and notes its check.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation.
    pub(super) fn admit(&mut self, operation: Operation<'_>) -> Result<()> {
        let recheck = Recheck::of(operation, &self.step)?;
        if let Some(recheck) = recheck
            && !self.rechecks.iter().any(|known| known.covers(&recheck))
        {
            self.rechecks.push(recheck);
        }
        Ok(())
    }

    pub(super) fn hold(&mut self, held: Held) {
        if self.known.insert(held.address()) {
            self.held.push(held);
        }
    }

    pub(super) fn step(&self) -> &StepInputs {
        &self.step
    }

    /// Returns the address at which each replay finds a list of the step.
    pub(super) fn input(&mut self, device: &Arc<Device>, list: List, bytes: usize) -> Result<u64> {
        let (address, storage) = self.inputs.place(device, list, bytes)?;
        self.hold(Held::Storage(storage));
        Ok(address)
    }

    /// Returns the address of a list that is the same in each replay.
    pub(super) fn constant(&mut self, device: &Arc<Device>, bytes: &[u8]) -> Result<u64> {
        let storage = CudaStorage::allocate(device, MemoryKind::Device, bytes.len().max(1))?;
        storage.fill(bytes)?;
        let address = storage.address();
        self.hold(Held::Storage(Arc::new(storage)));
        Ok(address)
    }

    /// Returns memory between the kernels of an operation. It is not the memory of work outside of graphs, which may
    /// run beside a replay.
    pub(super) fn scratch(&mut self, stream: &StreamState, bytes: usize) -> Result<u64> {
        let (home, key) = (&self.streams[0].0, stream.raw as usize);
        let make = || -> Result<Arc<dyn Storage>> {
            let bytes = bytes.next_power_of_two().max(1 << 16);
            let made = CudaStorage::allocate(&stream.device, MemoryKind::Device, bytes)?;
            Ok(Arc::new(made))
        };
        let scratch = home.graphs.lock().scratch(key, bytes, make)?;
        let address = scratch.address();
        self.hold(Held::Storage(scratch));
        Ok(address)
    }

    /// Returns the memory of activations that stands in for `usual`.
    pub(crate) fn activations(&mut self, usual: &Arc<ActivationMemory>) -> Arc<ActivationMemory> {
        let key = Arc::as_ptr(usual) as usize;
        if let Some((_, known)) = self.activations.iter().find(|(known, _)| *known == key) {
            return Arc::clone(known);
        }
        let made = Arc::<ActivationMemory>::default();
        self.activations.push((key, Arc::clone(&made)));
        made
    }
}
