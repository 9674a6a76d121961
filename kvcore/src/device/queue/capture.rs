//! Captures: the state while a thread records, and the part that the graph keeps.
//!
//! A capture belongs to one thread, and has exclusive use of its streams: the stream that began it, and the
//! streams that wait for one of its events. If the capturing thread uses any other stream, the call is
//! rejected, because its work would be missing from the graph. Calls of other threads on the capture's
//! streams wait until the capture ends ([`CaptureGate`]), because they would become part of the graph.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::LocalKey;

use super::{Hold, LoanMemory};
use crate::base::{Error, Result, Rope};
use crate::device::capture::uncapturable;
use crate::device::{
    CaptureGate, CapturePass, CounterSnapshot, Counters, Operation, ReplayCheck, StepInputs,
};

/// ID of the next capture. ID 0 means that a stream is in no capture.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The part of a stream's state that captures use.
#[derive(Debug, Default)]
pub struct CaptureSide {
    gate: CaptureGate,
    /// Counts of the operations that captures have recorded on this stream. Each replay adds its graph's
    /// counts to the totals.
    pub counters: Counters,
}

/// A stream that captures graphs.
pub trait CapturedStream: Sized + 'static {
    /// The backend's name in errors.
    const BACKEND: &'static str;
    /// The type of the device's graph. Dropping a value of this type must destroy the graph.
    type Graph;
    /// Backend-specific data of a capture, which the graph keeps.
    type Notes: Default;
    /// The storage type of activation memory.
    type Memory;

    /// Returns the stream's state for captures.
    fn side(&self) -> &CaptureSide;

    /// Returns the thread-local slot of this thread's capture.
    fn slot() -> &'static LocalKey<RefCell<Option<Recording<Self>>>>;

    /// Begins the device's capture.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn begin(&self) -> Result<()>;

    /// Ends the device's capture, which this thread must have begun.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn end(&self) -> Result<Self::Graph>;

    /// Returns whether this thread is recording the work that is enqueued on the stream.
    fn records(&self) -> bool {
        Self::slot()
            .with_borrow(|slot| slot.as_ref().is_some_and(|it| it.number == self.side().gate.capture()))
    }

    /// Calls `body` with the capture that this thread is recording, if any. If another thread is capturing
    /// the stream, waits for the end of that capture first.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if this thread is recording a capture that the stream has not joined,
    /// and the errors of `body`.
    fn recorded<R>(&self, body: impl FnOnce(Option<&mut Recording<Self>>) -> Result<R>) -> Result<R> {
        Self::slot().with_borrow_mut(|slot| match slot {
            None => {
                let _pass = self.side().gate.enter();
                body(None)
            }
            Some(recording) => recording.note(|it| it.joined(self).and_then(|()| body(Some(it)))),
        })
    }

    /// Rejects the call if this thread is recording a capture. If another thread is capturing the stream,
    /// waits for the end of that capture. No capture can begin on the stream until the returned guard is
    /// dropped.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the call, if the call is rejected.
    fn outside(&self, what: &str) -> Result<CapturePass<'_>> {
        let refused = || Err(uncapturable(Self::BACKEND, what));
        Self::slot().with_borrow_mut(|slot| match slot {
            None => Ok(self.side().gate.enter()),
            Some(recording) => recording.note(|it| it.joined(self).and_then(|()| refused())),
        })
    }

    /// Calls `body`, which must make the stream wait for an event of the capture with ID `number`. The stream
    /// then joins that capture. If `number` is 0, the event belongs to no capture, and no capture can begin
    /// while `body` runs.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the capture is not this thread's or has ended, or if the event was
    /// recorded before the capture that the stream is part of. Returns the errors of `body`.
    fn join<R>(
        self: &Arc<Self>,
        number: u64,
        body: impl FnOnce(Option<&mut Recording<Self>>) -> Result<R>,
    ) -> Result<R> {
        if number == 0 {
            let _pass = self.outside("a wait for an event from before the capture")?;
            return body(None);
        }
        let foreign = "a wait for an event of another capture, or of a finished capture,";
        Self::slot().with_borrow_mut(|slot| {
            let recording = slot.as_mut().filter(|it| it.number == number);
            let recording = recording.ok_or_else(|| uncapturable(Self::BACKEND, foreign))?;
            if recording.joined(self).is_err() {
                self.side().gate.close(number);
                recording.streams.push((Arc::clone(self), self.side().counters.snapshot()));
            }
            recording.note(|it| body(Some(it)))
        })
    }

    /// Rejects a call whose event belongs to the capture with ID `number`, unless `number` is 0.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the call, if the call is rejected.
    fn refuse_event(number: u64, what: &str) -> Result<()> {
        let error = || uncapturable(Self::BACKEND, what);
        let refuse = |slot: &mut Option<Recording<Self>>| match slot {
            Some(recording) => Err(recording.refuse(error())),
            None => Err(error()),
        };
        if number == 0 { Ok(()) } else { Self::slot().with_borrow_mut(refuse) }
    }
}

/// The activation memories of a capture, each with the address of the usual memory that it replaces.
type Activations<M> = Vec<(usize, Arc<LoanMemory<M>>)>;

/// A capture that this thread is recording.
pub struct Recording<S: CapturedStream> {
    number: u64,
    /// The streams in the capture, each with its counts at the time when it joined.
    streams: Vec<(Arc<S>, CounterSnapshot)>,
    step: StepInputs,
    known: HashSet<usize>,
    /// The first rejection, in case the recorded function does not return it.
    refused: Option<Error>,
    captured: Captured<S>,
}

/// The part of a capture that its graph keeps: everything that the captured work uses, and the checks of a
/// replay's lists.
pub struct Captured<S: CapturedStream> {
    /// Backend-specific data.
    pub notes: S::Notes,
    checks: Vec<ReplayCheck>,
    held: Vec<Hold>,
    activations: Activations<S::Memory>,
}

impl<S: CapturedStream> Captured<S> {
    /// Repeats the checks of the captured operations with the lists of a replay.
    ///
    /// # Errors
    /// Returns the errors of the operations' checks.
    pub fn check(&self, step: &StepInputs) -> Result<()> {
        self.checks.iter().try_for_each(|check| check.check(step))
    }
}

impl<S: CapturedStream> Recording<S> {
    /// Returns the capture's ID, above 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the step that is being captured.
    pub fn step(&self) -> &StepInputs {
        &self.step
    }

    /// Returns the stream that began the capture.
    pub fn home(&self) -> &Arc<S> {
        &self.streams[0].0
    }

    /// Returns the backend-specific data.
    pub fn notes(&mut self) -> &mut S::Notes {
        &mut self.captured.notes
    }

    fn joined(&self, stream: &S) -> Result<()> {
        let error = || uncapturable(S::BACKEND, "work on a stream that has not joined the capture");
        (stream.side().gate.capture() == self.number).then_some(()).ok_or_else(error)
    }

    /// Calls `body`, and records its error as a rejection.
    fn note<R>(&mut self, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        body(self).map_err(|error| self.refuse(error))
    }

    /// Records a rejection, and returns it.
    fn refuse(&mut self, error: Error) -> Error {
        self.refused.get_or_insert_with(|| error.clone());
        error
    }

    /// Checks that an operation can be replayed with other lists, and stores its replay check. Returns the
    /// check's rotary embedding, unless a check that covers this one was stored before.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation, if it cannot be captured.
    pub fn admit(&mut self, operation: Operation<'_>) -> Result<Option<Arc<Rope>>> {
        let Some(check) = ReplayCheck::of(S::BACKEND, operation, &self.step)? else { return Ok(None) };
        let checks = &mut self.captured.checks;
        if checks.iter().any(|known| known.covers(&check)) {
            return Ok(None);
        }
        let rope = check.rope().cloned();
        checks.push(check);
        Ok(rope)
    }

    /// Keeps an object alive for as long as the graph exists.
    pub fn hold(&mut self, hold: Hold) {
        if self.known.insert(hold.address()) {
            self.captured.held.push(hold);
        }
    }

    /// Returns the activation memory to use instead of `usual`. Only this graph uses it, because another
    /// graph must not overwrite the outputs that this graph leaves for its caller.
    pub fn activations(&mut self, usual: &Arc<LoanMemory<S::Memory>>) -> Arc<LoanMemory<S::Memory>> {
        let key = Arc::as_ptr(usual) as usize;
        let activations = &mut self.captured.activations;
        if let Some((_, known)) = activations.iter().find(|(known, _)| *known == key) {
            return Arc::clone(known);
        }
        let made = Arc::<LoanMemory<S::Memory>>::default();
        activations.push((key, Arc::clone(&made)));
        made
    }
}

/// A capture in progress. Dropping this value discards the capture.
struct Open<'a, S: CapturedStream>(&'a S);

impl<S: CapturedStream> Open<'_, S> {
    fn close(&self) -> (Result<S::Graph>, Option<Recording<S>>) {
        let recording = S::slot().take();
        let graph = self.0.end();
        for (stream, _) in recording.iter().flat_map(|recording| &recording.streams) {
            stream.side().gate.open();
        }
        (graph, recording)
    }
}

impl<S: CapturedStream> Drop for Open<'_, S> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// Captures the work that `record` enqueues on a stream. Returns the device's graph, the data that the graph
/// keeps, and the counts of the captured operations.
///
/// # Errors
/// Returns [`Error::Unsupported`] for work that a graph cannot contain, the errors of `record`, and the
/// device's errors.
pub fn capture<S: CapturedStream>(
    stream: &Arc<S>,
    step: &StepInputs,
    record: &mut dyn FnMut() -> Result<()>,
) -> Result<(S::Graph, Captured<S>, CounterSnapshot)> {
    drop(stream.outside("a second capture")?);
    let (side, number) = (stream.side(), NUMBERS.fetch_add(1, Ordering::Relaxed));
    side.gate.close(number);
    stream.begin().inspect_err(|_| side.gate.open())?;
    S::slot().set(Some(Recording {
        number,
        streams: vec![(Arc::clone(stream), side.counters.snapshot())],
        step: step.clone(),
        known: HashSet::new(),
        refused: None,
        captured: Captured {
            notes: S::Notes::default(),
            checks: Vec::new(),
            held: Vec::new(),
            activations: Vec::new(),
        },
    }));
    let open = Open(&**stream);
    record()?;
    let (graph, recording) = open.close();
    std::mem::forget(open);
    let (Some(recording), graph) = (recording, graph?) else {
        return Err(uncapturable(S::BACKEND, "a capture of another thread"));
    };
    if let Some(refused) = recording.refused {
        return Err(refused);
    }
    let counts = Counters::default();
    for (stream, before) in &recording.streams {
        counts.add_all(&stream.side().counters.snapshot().since(before));
    }
    Ok((graph, recording.captured, counts.snapshot()))
}
