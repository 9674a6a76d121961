//! A capture under way: what the recording thread has enqueued so far, and what the graph will own.
//!
//! A capture belongs to one thread, and has the streams that take part for itself: the stream that began it, and those that
//! wait for one of its events. Work on another stream by this thread is refused, because it would be lost. Calls of other
//! threads on these streams wait until the capture ends, because they would enter the graph unseen.
//!
//! Lists of the step lie in memory that each replay writes. Other lists are constants, which go up when the capture has
//! ended: nothing is copied from the host while ACL captures.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvcore::device::capture;
use kvcore::{
    CapturePass, CounterSnapshot, Counters, Error, MemoryKind, Operation, ReplayCheck, Result, StepInputs,
    Storage,
};

use super::flight::Held;
use super::upload::Upload;
use super::work::Scratch;
use super::{StreamState, copy_now};
use crate::NAME;
use crate::bindings::types as sys;
use crate::dense::ActivationMemory;
use crate::device::Device;
use crate::memory::AscendStorage;
use crate::operations::Plans;

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Number of the next capture. 0 marks a stream that takes part in none.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Returns the error for something that a graph cannot hold.
pub(crate) fn uncapturable(what: &str) -> Error {
    capture::uncapturable(NAME, what)
}

/// Makes a list of a step, as operators of a graph read it.
pub(crate) type MakeList = Box<dyn Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync>;

/// A list that each replay writes, and its place in a block of memory.
struct GraphList {
    block: usize,
    at: usize,
    bytes: usize,
    make: MakeList,
}

/// Least bytes of a block of lists, and the distance between lists.
const BLOCK: usize = 64 << 10;
const ALIGN: usize = 64;

/// The lists of a graph. They lie in few blocks of memory, usually one, so that a replay sends them up by one copy.
#[derive(Default)]
pub(super) struct GraphLists {
    /// Memory, and the bytes of it that are in use.
    blocks: Vec<(Arc<dyn Storage>, usize)>,
    lists: Vec<GraphList>,
}

impl GraphLists {
    /// Returns the address of a new list.
    fn add(&mut self, device: &Arc<Device>, bytes: usize, make: MakeList) -> Result<u64> {
        if self.blocks.last().is_none_or(|(storage, used)| used + bytes > storage.len()) {
            let size = bytes.next_power_of_two().max(BLOCK);
            let made = AscendStorage::uninitialised(device, MemoryKind::Device, size)?;
            self.blocks.push((Arc::new(made), 0));
        }
        let block = self.blocks.len() - 1;
        let (storage, used) = &mut self.blocks[block];
        let at = *used;
        *used = (at + bytes).next_multiple_of(ALIGN);
        self.lists.push(GraphList { block, at, bytes, make });
        Ok(storage.address() + at as u64)
    }

    /// Returns the contents of each block for a step, with the address where they go.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] for another number of rows, and the errors of the lists.
    pub(super) fn contents(&self, step: &StepInputs) -> Result<Vec<(u64, Vec<u8>)>> {
        let sized = |(storage, used): &(Arc<dyn Storage>, usize)| {
            (storage.address(), vec![0; (*used).min(storage.len())])
        };
        let mut contents: Vec<_> = self.blocks.iter().map(sized).collect();
        for GraphList { block, at, bytes, make } in &self.lists {
            let (made, expected) = (make(step)?, *bytes);
            if made.len() != expected {
                let (what, got) = ("bytes of a list of a captured step", made.len());
                return Err(Error::Mismatch { what, expected, got });
            }
            contents[*block].1[*at..*at + expected].copy_from_slice(&made);
        }
        Ok(contents)
    }
}

/// A capture that this thread records.
pub(crate) struct Recording {
    number: u64,
    /// The streams that take part, each with its count of operations when it joined.
    streams: Vec<(Arc<StreamState>, CounterSnapshot)>,
    step: StepInputs,
    pub(super) lists: GraphLists,
    pub(super) checks: Vec<ReplayCheck>,
    pub(super) held: Vec<Held>,
    known: HashSet<usize>,
    pub(super) plans: Plans,
    /// Lists that are the same in each replay.
    constants: Vec<(Arc<Upload>, Vec<u8>)>,
    /// Memory between operators, by the stream that took part.
    scratch: Vec<(usize, Scratch)>,
    /// Memory of activations, by the memory that serves the same steps outside of captures. It is the graph's own: what
    /// one graph leaves for its caller must not lie where another one works.
    pub(super) activations: Vec<(usize, Arc<ActivationMemory>)>,
    /// The first refusal, in case that the recorded function does not return it.
    refused: Option<Error>,
}

/// Memory between operators that the graphs of a stream share, as long as one of them holds it: their replays follow one
/// another.
pub(super) type GraphMemory = Vec<(usize, Weak<dyn Storage>)>;

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

/// Refuses what belongs to a capture by its event, of which `number` is the capture; 0 is none.
///
/// # Errors
/// Returns [`Error::Unsupported`], which names the call.
pub(super) fn refuse(number: u64, what: &str) -> Result<()> {
    if number == 0 {
        return Ok(());
    }
    let refused = |slot: &mut Option<Recording>| {
        let error = uncapturable(what);
        slot.as_mut().map_or(error.clone(), |recording| recording.refuse(error))
    };
    Err(RECORDING.with_borrow_mut(refused))
}

/// Returns whether this thread records what is enqueued on a stream.
pub(super) fn records(stream: &StreamState) -> bool {
    RECORDING
        .with_borrow(|slot| slot.as_ref().is_some_and(|recording| stream.gate.capture() == recording.number))
}

/// Lets a stream that waits for an event of capture `number` take part, or keeps captures away if the event is of none.
/// `body` enqueues the wait, and gets the capture.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the capture is not this thread's or has ended, and for an event from before the
/// capture that the stream takes part in.
pub(super) fn join<R>(
    stream: &Arc<StreamState>,
    number: u64,
    body: impl FnOnce(Option<&mut Recording>) -> Result<R>,
) -> Result<R> {
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

/// A capture on a stream. It is thrown away unless it is ended.
pub(super) struct Open<'a>(&'a Arc<StreamState>);

impl<'a> Open<'a> {
    /// Begins a capture.
    pub(super) fn begin(stream: &'a Arc<StreamState>, step: &StepInputs) -> Result<Self> {
        drop(outside(stream, "a second capture")?);
        let acl = &stream.device.library.acl;
        if !stream.device.library.captures() {
            return Err(Error::Unsupported {
                backend: NAME,
                what: "captures of graphs by this CANN".to_owned(),
            });
        }
        let _bound = stream.device.bind()?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        stream.gate.close(number);
        // SAFETY: the stream is alive. Memory that captured work uses is held by the graph.
        let code = unsafe { acl.aclmdlRICaptureBegin(stream.raw, sys::ACL_MODEL_RI_CAPTURE_MODE_RELAXED) };
        if let Err(error) = stream.device.check(code) {
            stream.gate.open();
            return Err(error);
        }
        RECORDING.set(Some(Recording {
            number,
            streams: vec![(Arc::clone(stream), stream.captured.snapshot())],
            step: step.clone(),
            lists: GraphLists::default(),
            checks: Vec::new(),
            held: Vec::new(),
            known: HashSet::new(),
            plans: Plans::default(),
            constants: Vec::new(),
            scratch: Vec::new(),
            activations: Vec::new(),
            refused: None,
        }));
        Ok(Self(stream))
    }

    /// Ends the capture. Returns the graph, which the caller destroys, with what was recorded and the operations counted.
    pub(super) fn end(self) -> Result<(sys::aclmdlRI, Recording, CounterSnapshot)> {
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
            None => recording.send_constants(&home.device),
            Some(error) => Err(error),
        };
        if let Err(error) = kept {
            destroy(&home.device, graph);
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

    fn close(&self) -> (Result<sys::aclmdlRI>, Option<Recording>) {
        let device = &self.0.device;
        let recording = RECORDING.take();
        let graph = device.bind().and_then(|_bound| {
            let mut graph = std::ptr::null_mut();
            // SAFETY: the stream is alive; its capture was begun by this thread. `graph` is a place for the answer.
            device.check(unsafe { device.library.acl.aclmdlRICaptureEnd(self.0.raw, &raw mut graph) })?;
            Ok(graph)
        });
        for (stream, _) in recording.iter().flat_map(|recording| &recording.streams) {
            stream.gate.open();
        }
        (graph, recording)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if let (Ok(graph), _) = self.close() {
            destroy(&self.0.device, graph);
        }
    }
}

/// Destroys a graph that no enqueued work runs.
pub(super) fn destroy(device: &Device, graph: sys::aclmdlRI) {
    if let Ok(_bound) = device.bind_lost() {
        // SAFETY: the caller owns the graph, and its runs are done.
        unsafe { device.library.acl.aclmdlRIDestroy(graph) };
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

    pub(super) fn hold(&mut self, held: Held) {
        if self.known.insert(held.address()) {
            self.held.push(held);
        }
    }

    /// Returns the address at which each replay writes a list of `bytes` bytes.
    pub(super) fn list(&mut self, device: &Arc<Device>, bytes: usize, make: MakeList) -> Result<u64> {
        self.lists.add(device, bytes, make)
    }

    /// Returns memory for a list that is the same in each replay.
    pub(super) fn constant(&mut self, device: &Arc<Device>, bytes: &[u8]) -> Result<Arc<Upload>> {
        let made = Arc::new(Upload::of_device(device, bytes.len())?);
        self.constants.push((Arc::clone(&made), bytes.to_vec()));
        self.hold(Held::Upload(Arc::clone(&made)));
        Ok(made)
    }

    fn send_constants(&mut self, device: &Arc<Device>) -> Result<()> {
        let _bound = device.bind()?;
        for (to, bytes) in self.constants.drain(..).filter(|(_, bytes)| !bytes.is_empty()) {
            let from = bytes.as_ptr() as u64;
            // SAFETY: the memory has room for the bytes, and no work uses it before the graph's first replay.
            unsafe { copy_now(device, to.address(), from, bytes.len(), sys::ACL_MEMCPY_HOST_TO_DEVICE) }?;
        }
        Ok(())
    }

    /// Returns memory between the operators of a stream. It is not the memory of work outside of graphs, which may run
    /// beside a replay.
    pub(super) fn scratch(&mut self, stream: sys::aclrtStream) -> &mut Scratch {
        let key = stream as usize;
        let at = self.scratch.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let shared = self.streams[0].0.graphs.lock();
            let memory = shared.iter().find(|(known, _)| *known == key).and_then(|(_, held)| held.upgrade());
            self.scratch.push((key, Scratch::over(memory)));
            self.scratch.len() - 1
        });
        &mut self.scratch[at].1
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
