//! The checks of captured operations, which each replay repeats with its own lists.

use std::sync::{Arc, OnceLock};

use kvcore::{
    ApplyRope, Attend, AttendMla, AttendWork, Error, KvArena, Operation, Result, Rope, RopeTable,
    RowRotation, Scatter, StepInputs, WriteSlots,
};

use super::capture::uncapturable;

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
pub(super) struct Recheck {
    reader: Reader,
    /// The table of angles that the kernels read. A rope's table is another one when it has grown.
    table: Option<Arc<RopeTable>>,
}

/// Returns whether two lists are one list.
pub(super) fn one<T>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b)
}

/// Work that stands where a captured operation's was, so that the graph does not hold it.
fn no_work() -> Arc<AttendWork> {
    static NONE: OnceLock<Arc<AttendWork>> = OnceLock::new();
    Arc::clone(NONE.get_or_init(|| Arc::new(AttendWork::new([], []))))
}

/// Returns a call without its work.
pub(crate) fn without_work(op: &Attend) -> Attend {
    Attend { work: no_work(), ..op.clone() }
}

fn table(rope: Option<&Arc<Rope>>) -> Result<Option<Arc<RopeTable>>> {
    rope.map(|rope| rope.table([])).transpose()
}

fn other_lists(operation: Operation<'_>) -> Error {
    uncapturable(&format!("{} over lists that are not those of the step", operation.name()))
}

impl Recheck {
    /// Returns the check of an operation that is being captured; none if it reads no list of the step.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for an operation that cannot be captured.
    pub(super) fn of(operation: Operation<'_>, step: &StepInputs) -> Result<Option<Self>> {
        let reader = match operation {
            Operation::CopyTensor(_) => return Ok(None),
            Operation::Gather(op) if !one(&op.slots, &step.slots) => return Ok(None),
            Operation::ApplyRope(op) if !one(&op.positions, &step.positions) => return Ok(None),
            Operation::ApplyRope(op) => Reader::Rope(ApplyRope { positions: Arc::default(), ..op.clone() }),
            Operation::Scatter(op) => {
                let positions = op.rotation.as_ref().map_or(&step.positions, |r| &r.positions);
                if !one(&op.slots, &step.slots) || !one(positions, &step.positions) {
                    return Err(other_lists(operation));
                }
                let rotation = op.rotation.as_ref();
                let rotation =
                    rotation.map(|r| RowRotation { rope: Arc::clone(&r.rope), positions: Arc::default() });
                Reader::Scatter(Scatter { slots: WriteSlots::default(), rotation, ..op.clone() })
            }
            Operation::Attend(op) => Reader::Attend(captured(op, operation, step)?),
            Operation::AttendMla(op) => {
                let attend = captured(&op.attend, operation, step)?;
                Reader::AttendMla(AttendMla { attend, ..op.clone() })
            }
            other => return Err(uncapturable(other.name())),
        };
        let table = table(reader.rope())?;
        Ok(Some(Self { reader, table }))
    }

    /// Returns whether this check refuses all lists that `other` refuses: layers of a model differ in nothing that a
    /// list is checked against.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let alike = match (&self.reader, &other.reader) {
            (Reader::Scatter(a), Reader::Scatter(b)) => {
                one_arena(&a.arena, &b.arena) && a.k.shape()[0] == b.k.shape()[0]
            }
            (Reader::Attend(a), Reader::Attend(b)) => alike(a, b),
            (Reader::AttendMla(a), Reader::AttendMla(b)) => alike(&a.attend, &b.attend),
            (Reader::Rope(a), Reader::Rope(b)) => a.rows.shape()[0] == b.rows.shape()[0],
            _ => false,
        };
        alike && self.reader.rope().map(Arc::as_ptr) == other.reader.rope().map(Arc::as_ptr)
    }

    /// Checks the lists of a replay.
    ///
    /// # Errors
    /// Returns the errors of the operation's check, and [`Error::GraphOutgrown`] if a position is past the table of
    /// angles that the graph reads.
    pub(super) fn check(&self, step: &StepInputs) -> Result<()> {
        match &self.reader {
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
        }?;
        let now = table(self.reader.rope())?;
        if now.as_ref().map(Arc::as_ptr) == self.table.as_ref().map(Arc::as_ptr) {
            Ok(())
        } else {
            Err(Error::GraphOutgrown { what: "positions" })
        }
    }
}

impl Reader {
    fn rope(&self) -> Option<&Arc<Rope>> {
        match self {
            Self::Scatter(op) => op.rotation.as_ref().map(|rotation| &rotation.rope),
            Self::Attend(op) => op.rope.as_ref(),
            Self::AttendMla(op) => op.attend.rope.as_ref(),
            Self::Rope(op) => Some(&op.rope),
        }
    }
}

fn captured(op: &Attend, operation: Operation<'_>, step: &StepInputs) -> Result<Attend> {
    if op.work.id() != step.work.id() {
        return Err(other_lists(operation));
    }
    if op.work.batch().iter().any(|entry| entry.selection.is_some()) {
        return Err(uncapturable("a selection"));
    }
    Ok(without_work(op))
}

fn one_arena(a: &KvArena, b: &KvArena) -> bool {
    Arc::ptr_eq(a.k_plane().storage, b.k_plane().storage) && Arc::ptr_eq(a.layout(), b.layout())
}

fn alike(a: &Attend, b: &Attend) -> bool {
    one_arena(&a.arena, &b.arena) && a.keys == b.keys && a.q.shape()[0] == b.q.shape()[0]
}
