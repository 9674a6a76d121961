//! The checks of captured operations, which each replay repeats with its own lists.

use std::sync::{Arc, OnceLock};

use crate::base::Rope;
use crate::base::{Error, Result};
use crate::device::graph::StepInputs;
use crate::device::{
    ApplyRope, Attend, AttendMla, AttendWork, KvArena, Operation, RowRotation, Scatter, WriteSlots,
};

/// An operation that reads lists of the step, without these lists.
#[derive(Debug)]
enum Reader {
    Scatter(Scatter),
    Attend(Attend),
    AttendMla(AttendMla),
    Rope(ApplyRope),
}

/// The check of a captured operation.
#[derive(Debug)]
pub struct ReplayCheck(Reader);

/// Returns the error for something that a graph of a backend cannot hold.
pub fn uncapturable(backend: &'static str, what: &str) -> Error {
    Error::Unsupported { backend, what: format!("{what} in a captured graph") }
}

/// Returns whether two lists are one list.
fn one<T>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b)
}

/// Work that stands where a captured operation's was, so that the graph does not hold it.
fn no_work() -> Arc<AttendWork> {
    static NONE: OnceLock<Arc<AttendWork>> = OnceLock::new();
    Arc::clone(NONE.get_or_init(|| Arc::new(AttendWork::new([], []))))
}

/// Returns a call without its work.
pub fn without_work(op: &Attend) -> Attend {
    Attend { work: no_work(), ..op.clone() }
}

fn other_lists(backend: &'static str, operation: Operation<'_>) -> Error {
    uncapturable(backend, &format!("{} over lists that are not those of the step", operation.name()))
}

impl ReplayCheck {
    /// Returns the check of an operation that is being captured; none if it reads no list of the step.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation, for one that cannot be captured: one over other lists than
    /// those of the step, a selection, and operations that no step of a model needs.
    pub fn of(backend: &'static str, operation: Operation<'_>, step: &StepInputs) -> Result<Option<Self>> {
        let reader = match operation {
            Operation::CopyTensor(_) => return Ok(None),
            Operation::Gather(op) if !one(&op.slots, &step.slots) => return Ok(None),
            Operation::ApplyRope(op) if !one(&op.positions, &step.positions) => return Ok(None),
            Operation::ApplyRope(op) => Reader::Rope(ApplyRope { positions: Arc::default(), ..op.clone() }),
            Operation::Scatter(op) => {
                let positions = op.rotation.as_ref().map_or(&step.positions, |r| &r.positions);
                if !one(&op.slots, &step.slots) || !one(positions, &step.positions) {
                    return Err(other_lists(backend, operation));
                }
                let rotation = op.rotation.as_ref();
                let rotation =
                    rotation.map(|r| RowRotation { rope: Arc::clone(&r.rope), positions: Arc::default() });
                Reader::Scatter(Scatter { slots: WriteSlots::default(), rotation, ..op.clone() })
            }
            Operation::Attend(op) => Reader::Attend(captured(backend, op, operation, step)?),
            Operation::AttendMla(op) => {
                let attend = captured(backend, &op.attend, operation, step)?;
                Reader::AttendMla(AttendMla { attend, ..op.clone() })
            }
            other => return Err(uncapturable(backend, other.name())),
        };
        Ok(Some(Self(reader)))
    }

    /// Returns whether this check refuses all lists that `other` refuses: layers of a model differ in nothing that a
    /// list is checked against.
    pub fn covers(&self, other: &Self) -> bool {
        let alike = match (&self.0, &other.0) {
            (Reader::Scatter(a), Reader::Scatter(b)) => {
                one_arena(&a.arena, &b.arena) && a.k.shape()[0] == b.k.shape()[0]
            }
            (Reader::Attend(a), Reader::Attend(b)) => alike(a, b),
            (Reader::AttendMla(a), Reader::AttendMla(b)) => alike(&a.attend, &b.attend),
            (Reader::Rope(a), Reader::Rope(b)) => a.rows.shape()[0] == b.rows.shape()[0],
            _ => false,
        };
        alike && self.rope().map(Arc::as_ptr) == other.rope().map(Arc::as_ptr)
    }

    /// Checks the lists of a replay.
    ///
    /// # Errors
    /// Returns the errors of the operation's check.
    pub fn check(&self, step: &StepInputs) -> Result<()> {
        match &self.0 {
            Reader::Scatter(op) => {
                let rotation = op.rotation.as_ref().map(|r| RowRotation {
                    rope: Arc::clone(&r.rope),
                    positions: Arc::clone(&step.positions),
                });
                Scatter { slots: step.slots.clone(), rotation, ..op.clone() }.check()
            }
            Reader::Attend(op) => Attend { work: Arc::clone(&step.work), ..op.clone() }.check(),
            Reader::AttendMla(op) => {
                let attend = Attend { work: Arc::clone(&step.work), ..op.attend.clone() };
                AttendMla { attend, ..op.clone() }.check()
            }
            Reader::Rope(op) => ApplyRope { positions: Arc::clone(&step.positions), ..op.clone() }.check(),
        }
    }

    /// Returns the rotary embedding whose angles the operation reads.
    pub fn rope(&self) -> Option<&Arc<Rope>> {
        match &self.0 {
            Reader::Scatter(op) => op.rotation.as_ref().map(|rotation| &rotation.rope),
            Reader::Attend(op) => op.rope.as_ref(),
            Reader::AttendMla(op) => op.attend.rope.as_ref(),
            Reader::Rope(op) => Some(&op.rope),
        }
    }
}

fn captured(
    backend: &'static str,
    op: &Attend,
    operation: Operation<'_>,
    step: &StepInputs,
) -> Result<Attend> {
    if op.work.id() != step.work.id() {
        return Err(other_lists(backend, operation));
    }
    if op.work.batch().iter().any(|entry| entry.selection.is_some()) {
        return Err(uncapturable(backend, "a selection"));
    }
    Ok(without_work(op))
}

fn one_arena(a: &KvArena, b: &KvArena) -> bool {
    Arc::ptr_eq(a.k_plane().storage, b.k_plane().storage) && Arc::ptr_eq(a.layout(), b.layout())
}

fn alike(a: &Attend, b: &Attend) -> bool {
    one_arena(&a.arena, &b.arena) && a.keys == b.keys && a.q.shape()[0] == b.q.shape()[0]
}
