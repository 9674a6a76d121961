//! The checks of captured operations, which each replay repeats with new lists.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::base::{Error, Result, Rope};
use crate::device::graph::StepInputs;
use crate::device::{
    ApplyRope, Attend, AttendMla, AttendWork, KvArena, Operation, RowRotation, Scatter, WriteSlots,
};

/// A function that checks the lists of a step.
type CheckLists = Box<dyn Fn(&StepInputs) -> Result<()> + Send + Sync>;

/// The check of a captured operation that reads the step's lists.
pub struct ReplayCheck {
    /// The key of a check. Checks with equal keys reject the same lists.
    key: [usize; 5],
    rope: Option<Arc<Rope>>,
    check: CheckLists,
}

impl fmt::Debug for ReplayCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplayCheck({:?})", self.key)
    }
}

/// Returns the error for work that a backend's graphs cannot contain.
pub fn uncapturable(backend: &'static str, what: &str) -> Error {
    Error::Unsupported { backend, what: format!("{what} in a captured graph") }
}

/// Returns a copy of `op` with empty work, because a graph must not keep the original work alive.
pub fn without_work(op: &Attend) -> Attend {
    static NONE: OnceLock<Arc<AttendWork>> = OnceLock::new();
    let work = Arc::clone(NONE.get_or_init(|| Arc::new(AttendWork::new([], []))));
    Attend { work, ..op.clone() }
}

impl ReplayCheck {
    /// Returns the check of an operation that is being captured, or `None` if it does not read the step's
    /// lists.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`], which names the operation, if it cannot be captured: it uses lists
    /// other than the step's, has a selection, or is an operation that graphs do not support.
    pub fn of(backend: &'static str, operation: Operation<'_>, step: &StepInputs) -> Result<Option<Self>> {
        let other_lists = || {
            let what = format!("{} with lists that do not belong to the captured step", operation.name());
            uncapturable(backend, &what)
        };
        let captured = |op: &Attend| {
            if op.work.id() != step.work.id() {
                return Err(other_lists());
            }
            if op.work.batch().iter().any(|entry| entry.selection.is_some()) {
                return Err(uncapturable(backend, "a selection"));
            }
            Ok(without_work(op))
        };
        Ok(Some(match operation {
            Operation::CopyTensor(_) => return Ok(None),
            Operation::Gather(op) if !one(&op.slots, &step.slots) => return Ok(None),
            Operation::ApplyRope(op) if !one(&op.positions, &step.positions) => return Ok(None),
            Operation::ApplyRope(op) => {
                let op = ApplyRope { positions: Arc::default(), ..op.clone() };
                Self::new([1, 0, 0, 0, op.rows.shape()[0]], Some(&op.rope.clone()), move |step| {
                    ApplyRope { positions: Arc::clone(&step.positions), ..op.clone() }.check()
                })
            }
            Operation::Scatter(op) => {
                let rotation = op.rotation.as_ref();
                let rope = rotation.map(|rotation| Arc::clone(&rotation.rope));
                let positions = rotation.map_or(&step.positions, |rotation| &rotation.positions);
                if !one(&op.slots, &step.slots) || !one(positions, &step.positions) {
                    return Err(other_lists());
                }
                let op = Scatter { slots: WriteSlots::default(), rotation: None, ..op.clone() };
                let of_rope = rope.clone();
                Self::new(key(2, &op.arena, 0, op.k.shape()[0]), of_rope.as_ref(), move |step| {
                    let positions = || Arc::clone(&step.positions);
                    let rotation = rope.clone().map(|rope| RowRotation { rope, positions: positions() });
                    Scatter { slots: step.slots.clone(), rotation, ..op.clone() }.check()
                })
            }
            Operation::Attend(op) => {
                let op = captured(op)?;
                Self::new(key_of(3, &op), op.rope.clone().as_ref(), move |step| {
                    Attend { work: Arc::clone(&step.work), ..op.clone() }.check()
                })
            }
            Operation::AttendMla(op) => {
                let op = AttendMla { attend: captured(&op.attend)?, ..op.clone() };
                Self::new(key_of(4, &op.attend), op.attend.rope.clone().as_ref(), move |step| {
                    let attend = Attend { work: Arc::clone(&step.work), ..op.attend.clone() };
                    AttendMla { attend, ..op.clone() }.check()
                })
            }
            other => return Err(uncapturable(backend, other.name())),
        }))
    }

    fn new(
        key: [usize; 5],
        rope: Option<&Arc<Rope>>,
        check: impl Fn(&StepInputs) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { key, rope: rope.cloned(), check: Box::new(check) }
    }

    /// Returns whether this check rejects all lists that `other` rejects. This is the case for the layers of
    /// a model, because the properties that lists are checked against do not differ between layers.
    pub fn covers(&self, other: &Self) -> bool {
        self.key == other.key && self.rope.as_ref().map(Arc::as_ptr) == other.rope.as_ref().map(Arc::as_ptr)
    }

    /// Checks the lists of a replay.
    ///
    /// # Errors
    /// Returns the errors of the operation's check.
    pub fn check(&self, step: &StepInputs) -> Result<()> {
        (self.check)(step)
    }

    /// Returns the rotary embedding whose angles the operation reads, if any.
    pub fn rope(&self) -> Option<&Arc<Rope>> {
        self.rope.as_ref()
    }
}

/// Returns whether `a` and `b` are the same list in memory.
fn one<T>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b)
}

/// Returns the key of a check. The check holds the arena, so the addresses in the key are not reused.
fn key(kind: usize, arena: &KvArena, keys: usize, rows: usize) -> [usize; 5] {
    let storage = Arc::as_ptr(arena.k_plane().storage).cast::<u8>() as usize;
    [kind, storage, Arc::as_ptr(arena.layout()) as usize, keys, rows]
}

fn key_of(kind: usize, op: &Attend) -> [usize; 5] {
    key(kind, &op.arena, op.keys as usize, op.q.shape()[0])
}
