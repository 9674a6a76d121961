//! The checks of captured operations, which each replay repeats with its own lists, and the tables that kernels read.

use std::sync::Arc;

use kvcore::{Error, Operation, ReplayCheck, Result, Rope, RopeTable, StepInputs};

use crate::NAME;

/// The check of a captured operation.
#[derive(Debug)]
pub(super) struct Recheck {
    check: ReplayCheck,
    /// The table of angles that the kernels read. A rope's table is another one when it has grown.
    table: Option<Arc<RopeTable>>,
}

/// Returns whether two lists are one list.
pub(super) fn one<T>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b)
}

fn table(rope: Option<&Arc<Rope>>) -> Result<Option<Arc<RopeTable>>> {
    rope.map(|rope| rope.table([])).transpose()
}

impl Recheck {
    /// Returns the check of an operation that is being captured; none if it reads no list of the step.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for an operation that cannot be captured.
    pub(super) fn of(operation: Operation<'_>, step: &StepInputs) -> Result<Option<Self>> {
        let Some(check) = ReplayCheck::of(NAME, operation, step)? else { return Ok(None) };
        let table = table(check.rope())?;
        Ok(Some(Self { check, table }))
    }

    /// Returns whether this check refuses all lists that `other` refuses.
    pub(super) fn covers(&self, other: &Self) -> bool {
        self.check.covers(&other.check)
    }

    /// Checks the lists of a replay.
    ///
    /// # Errors
    /// Returns the errors of the operation's check, and [`Error::GraphOutgrown`] if a position is past the table of
    /// angles that the graph reads.
    pub(super) fn check(&self, step: &StepInputs) -> Result<()> {
        self.check.check(step)?;
        let now = table(self.check.rope())?;
        if now.as_ref().map(Arc::as_ptr) == self.table.as_ref().map(Arc::as_ptr) {
            Ok(())
        } else {
            Err(Error::GraphOutgrown { what: "positions" })
        }
    }
}
