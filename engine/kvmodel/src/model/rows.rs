//! The rows of a pass: checks and selections that are specific to models.

use std::sync::Arc;

use kvcore::{AttendRows, AttendWork, BatchRows, QueryRow, Segment, Selection, SequenceInput};

use crate::dense::{Dense, RowIndex};
use crate::error::{Error, Result};

/// The rows that attend in the last layer, if only some rows do.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) index: RowIndex,
    pub(super) work: Arc<AttendWork>,
}

impl Wanted {
    /// Returns the rows whose logits are requested, with their attention work in the given group of layers.
    /// Returns `None` if the logits of all rows are requested.
    pub(super) fn of(rows: &BatchRows, group: usize, dense: &dyn Dense) -> Result<Option<Self>> {
        let wanted = rows.wanted(group).map(|(index, work)| Ok(Self { index: dense.index(index)?, work }));
        wanted.transpose()
    }
}

/// Checks that all tokens of a batch are in the vocabulary.
///
/// # Errors
/// Returns [`Error::TokenOutOfVocabulary`] for the first token outside it.
pub(super) fn check_vocabulary(batch: &[SequenceInput], vocabulary: usize) -> Result<()> {
    let stray = batch.iter().flat_map(|s| &s.tokens).find(|&&token| token as usize >= vocabulary);
    stray.map_or(Ok(()), |&token| Err(Error::TokenOutOfVocabulary { token, vocabulary }))
}

/// Returns `work` with a selection for each of its entries.
pub(super) fn selecting(work: &AttendWork, selections: Vec<Option<Selection>>) -> AttendWork {
    let entries = work.batch().iter().zip(selections);
    let entries = entries.map(|(entry, selection)| AttendRows { selection, ..entry.clone() });
    AttendWork::with_groups(work.rows().to_vec(), entries.collect::<Vec<_>>(), Arc::clone(work.groups()))
}

/// Counts the tokens that each row sees, summed over all rows. The sum determines the cost of
/// attention. Windows are ignored.
pub(super) fn visible(work: &AttendWork) -> u64 {
    work.batch().iter().map(|entry| visible_in(work, entry)).sum()
}

/// Counts the tokens that each row of an entry sees, summed over these rows.
pub(super) fn visible_in(work: &AttendWork, entry: &AttendRows) -> u64 {
    let seen = |row: &QueryRow, segment: &Segment| {
        (row.logical + 1).saturating_sub(segment.logical_start).min(segment.len) as u64
    };
    let rows = &work.rows()[entry.rows.clone()];
    rows.iter().map(|row| entry.segments.iter().map(|segment| seen(row, segment)).sum::<u64>()).sum()
}
