//! Captures: the recording of a thread, and the part of it that a graph keeps.
//!
//! A capture belongs to one thread, and has the streams that take part for itself: the stream that began it,
//! and the streams that wait for one of its events. Work on another stream by this thread is refused, because
//! it would be lost. Calls of other threads on these streams wait until the capture ends ([`CaptureGate`]),
//! because they would enter the graph unseen.

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

/// Number of the next capture. 0 marks a stream that takes part in none.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The part of a stream that captures use.
#[derive(Debug, Default)]
pub struct CaptureSide {
    gate: CaptureGate,
    /// Operations that captures have recorded here; they count when they are replayed.
    pub counters: Counters,
}

/// A stream that captures graphs.
pub trait CapturedStream: Sized + 'static {
    /// Name of the backend in errors.
    const BACKEND: &'static str;
    /// The device's graph, destroyed when it is dropped.
    type Graph;
    /// The backend's notes of a capture, which the graph keeps.
    type Notes: Default;
    /// Memory of activations.
    type Memory;

    /// Returns the part of the stream that captures use.
    fn side(&self) -> &CaptureSide;

    /// Returns the place of the capture that this thread records.
    fn slot() -> &'static LocalKey<RefCell<Option<Recording<Self>>>>;

    /// Begins the device's capture.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn begin(&self) -> Result<()>;

    /// Ends the device's capture, which this thread has begun.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn end(&self) -> Result<Self::Graph>;

    /// Returns whether this thread records what is enqueued on the stream.
    fn records(&self) -> bool {
        Self::slot()
            .with_borrow(|slot| slot.as_ref().is_some_and(|it| it.number == self.side().gate.capture()))
    }

    /// Calls `body` with the capture that this thread records, if any. Waits first while another thread
    /// captures the stream.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if this thread records a capture that the stream has not joined, and
    /// the errors of `body`.
    fn recorded<R>(&self, body: impl FnOnce(Option<&mut Recording<Self>>) -> Result<R>) -> Result<R> {
        Self::slot().with_borrow_mut(|slot| match slot {
            None => {
                let _pass = self.side().gate.enter();
                body(None)
            }
            Some(recording) => recording.note(|it| it.joined(self).and_then(|()| body(Some(it)))),
        })
    }

    /// Refuses a call of a thread that records a capture. Waits first while another thread captures the
    /// stream, and keeps captures away until the pass is dropped.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the call.
    fn outside(&self, what: &str) -> Result<CapturePass<'_>> {
        let refused = || Err(uncapturable(Self::BACKEND, what));
        Self::slot().with_borrow_mut(|slot| match slot {
            None => Ok(self.side().gate.enter()),
            Some(recording) => recording.note(|it| it.joined(self).and_then(|()| refused())),
        })
    }

    /// Calls `body` to let the stream wait for an event of capture `number`. The stream takes part in that
    /// capture from then on. For an event of no capture, 0, captures are kept away while `body` runs.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the capture is not this thread's or has ended, and for an event from
    /// before the capture that the stream takes part in. Returns the errors of `body`.
    fn join<R>(
        self: &Arc<Self>,
        number: u64,
        body: impl FnOnce(Option<&mut Recording<Self>>) -> Result<R>,
    ) -> Result<R> {
        if number == 0 {
            let _pass = self.outside("a wait for an event from before the capture")?;
            return body(None);
        }
        let foreign = "a wait for an event of another capture, or of one that has ended,";
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

    /// Refuses a call that takes an event of capture `number`; 0 is none.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the call.
    fn refuse_event(number: u64, what: &str) -> Result<()> {
        let error = || uncapturable(Self::BACKEND, what);
        let refuse = |slot: &mut Option<Recording<Self>>| match slot {
            Some(recording) => Err(recording.refuse(error())),
            None => Err(error()),
        };
        if number == 0 { Ok(()) } else { Self::slot().with_borrow_mut(refuse) }
    }
}

/// Loan memories of a capture, each by the address of the memory that serves the same steps outside of
/// captures.
type Activations<M> = Vec<(usize, Arc<LoanMemory<M>>)>;

/// A capture that this thread records.
pub struct Recording<S: CapturedStream> {
    number: u64,
    /// The streams that take part, each with its count of operations when it joined.
    streams: Vec<(Arc<S>, CounterSnapshot)>,
    step: StepInputs,
    known: HashSet<usize>,
    /// The first refusal, in case the recorded function does not return it.
    refused: Option<Error>,
    captured: Captured<S>,
}

/// The part of a capture that its graph keeps: all that its work uses, and the checks of its inputs.
pub struct Captured<S: CapturedStream> {
    /// The backend's notes.
    pub notes: S::Notes,
    checks: Vec<ReplayCheck>,
    held: Vec<Hold>,
    activations: Activations<S::Memory>,
}

impl<S: CapturedStream> Captured<S> {
    /// Checks the lists of a replay as the captured operations were checked.
    ///
    /// # Errors
    /// Returns the errors of the operations' checks.
    pub fn check(&self, step: &StepInputs) -> Result<()> {
        self.checks.iter().try_for_each(|check| check.check(step))
    }
}

impl<S: CapturedStream> Recording<S> {
    /// Returns the number of the capture, above 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the step that is captured.
    pub fn step(&self) -> &StepInputs {
        &self.step
    }

    /// Returns the stream that began the capture.
    pub fn home(&self) -> &Arc<S> {
        &self.streams[0].0
    }

    /// Returns the backend's notes.
    pub fn notes(&mut self) -> &mut S::Notes {
        &mut self.captured.notes
    }

    fn joined(&self, stream: &S) -> Result<()> {
        let error = || uncapturable(S::BACKEND, "work on a stream that has not joined the capture");
        (stream.side().gate.capture() == self.number).then_some(()).ok_or_else(error)
    }

    /// Calls `body`, and notes its error as a refusal.
    fn note<R>(&mut self, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        body(self).map_err(|error| self.refuse(error))
    }

    /// Notes a refusal, and returns it.
    fn refuse(&mut self, error: Error) -> Error {
        self.refused.get_or_insert_with(|| error.clone());
        error
    }

    /// Checks that an operation can be replayed with other lists, and notes its check. Returns the rotary
    /// embedding of the check, unless a check with equal keys was noted before.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation.
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

    /// Holds something for as long as the graph lives.
    pub fn hold(&mut self, hold: Hold) {
        if self.known.insert(hold.address()) {
            self.captured.held.push(hold);
        }
    }

    /// Returns the memory of activations that stands in for `usual`. It is the graph's own: what one graph
    /// leaves for its caller must not lie where another graph works.
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

/// A capture under way. Dropping the value discards it.
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

/// Captures what `record` enqueues on a stream. Returns the device's graph, what it keeps, and the captured
/// operations' counts.
///
/// # Errors
/// Returns [`Error::Unsupported`] for work that a graph cannot hold, the errors of `record`, and those of the
/// device.
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
