//! The rows of a batch, one sequence after the other.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{
    AttendRows, AttendWork, Logits, MergeGroup, QueryRow, Segment, SequenceInput, StepInputs, WriteSlots,
};

use crate::dense::{Dense, RowIndex};
use crate::error::{Error, Result};

/// The rows that a pass computes.
///
/// Refilling reuses the memory where the extents are equal, so that a decode step allocates nothing.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) tokens: Arc<[u32]>,
    /// The positions that keys are rotated to.
    pub(super) positions: Arc<[i64]>,
    pub(super) slots: WriteSlots,
    /// The attention work of the rows, equal for all layers.
    pub(super) work: Arc<AttendWork>,
    /// The merge groups of the whole batch.
    groups: Vec<MergeGroup>,
    /// The rows of each sequence whose logits are wanted, as a range of `tokens`.
    logits: Vec<Range<usize>>,
}

/// The rows that go through the end of the last layer, if these are not all rows.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) index: RowIndex,
    pub(super) work: Arc<AttendWork>,
}

impl Default for Rows {
    fn default() -> Self {
        Self {
            tokens: Arc::default(),
            positions: Arc::default(),
            slots: WriteSlots::default(),
            work: Arc::new(AttendWork::new([], [])),
            groups: Vec::new(),
            logits: Vec::new(),
        }
    }
}

impl Rows {
    /// Replaces the rows by those of a batch.
    ///
    /// # Errors
    /// Returns [`Error::TokenOutOfVocabulary`], [`kvcore::Error::Mismatch`] for a sequence without a slot for
    /// each token, and [`kvcore::Error::OutOfRange`] for a segment of an unknown merge group.
    pub(super) fn fill(&mut self, batch: &[SequenceInput], vocabulary: usize) -> Result<()> {
        let stray = |&&token: &&u32| token as usize >= vocabulary;
        if let Some(&token) = batch.iter().flat_map(|s| &s.tokens).find(stray) {
            return Err(Error::TokenOutOfVocabulary { token, vocabulary });
        }
        for sequence in batch {
            sequence.check()?;
            check_groups(sequence)?;
        }
        let count = batch.iter().map(|s| s.tokens.len()).sum();
        refill(&mut self.tokens, count, batch.iter().flat_map(|s| s.tokens.iter().copied()));
        refill(&mut self.positions, count, batch.iter().flat_map(SequenceInput::key_positions));
        self.slots = WriteSlots::concat(batch.iter().map(|s| &s.slots));
        self.logits.clear();
        let mut at = 0;
        for sequence in batch {
            let range = at..at + sequence.tokens.len();
            at = range.end;
            self.logits.push(match sequence.logits {
                Logits::None => range.end..range.end,
                Logits::Last => range.end.saturating_sub(1).max(range.start)..range.end,
                Logits::All => range,
            });
        }
        self.fill_work(batch);
        Ok(())
    }

    fn fill_work(&mut self, batch: &[SequenceInput]) {
        self.groups.clear();
        for &group in batch.iter().flat_map(|sequence| sequence.groups.iter()) {
            if place_of(&self.groups, group).is_none() {
                self.groups.push(group);
            }
        }
        let groups = &self.groups;
        let fill = |rows: &mut Vec<QueryRow>, entries: &mut Vec<AttendRows>| {
            rows.clear();
            rows.extend(batch.iter().flat_map(SequenceInput::rows));
            entries.clear();
            let mut at = 0;
            for sequence in batch {
                let range = at..at + sequence.tokens.len();
                at = range.end;
                entries.push(AttendRows::new(range, grouped(sequence, groups)));
            }
        };
        match Arc::get_mut(&mut self.work) {
            Some(work) if work.groups()[..] == groups[..] => work.edit(fill),
            _ => {
                let (mut rows, mut entries) = (Vec::new(), Vec::new());
                fill(&mut rows, &mut entries);
                self.work = Arc::new(AttendWork::with_groups(rows, entries, groups.as_slice()));
            }
        }
    }

    /// Adds rows of padding up to a number of rows that a graph has, and returns the lists of the rows. The rows hold
    /// these very lists.
    pub(super) fn padded(&mut self) -> StepInputs {
        let step = StepInputs {
            tokens: Arc::clone(&self.tokens),
            positions: Arc::clone(&self.positions),
            slots: self.slots.clone(),
            work: Arc::clone(&self.work),
        };
        let (count, step) = (self.tokens.len(), step.padded());
        if step.tokens.len() > count {
            self.logits.push(count..step.tokens.len());
            self.tokens = Arc::clone(&step.tokens);
            self.positions = Arc::clone(&step.positions);
            self.slots = step.slots.clone();
            self.work = Arc::clone(&step.work);
        }
        step
    }

    /// Releases the slots and segments of the batch, so that their owner can refill them in place.
    pub(super) fn release(&mut self) {
        self.slots = WriteSlots::default();
        if let Some(work) = Arc::get_mut(&mut self.work) {
            work.edit(|_, entries| entries.clear());
        }
    }

    /// Counts the visible tokens over all rows, on which the cost of attention depends. Windows are not
    /// subtracted.
    pub(super) fn visible(work: &AttendWork) -> u64 {
        let seen = |row: &QueryRow, segment: &Segment| {
            (row.logical + 1).saturating_sub(segment.logical_start).min(segment.len) as u64
        };
        let of = |entry: &AttendRows| -> u64 {
            let rows = &work.rows()[entry.rows.clone()];
            rows.iter().map(|row| entry.segments.iter().map(|segment| seen(row, segment)).sum::<u64>()).sum()
        };
        work.batch().iter().map(of).sum()
    }

    /// Returns whether the logits of all rows are wanted.
    pub(super) fn all_wanted(&self) -> bool {
        self.logits.iter().map(Range::len).sum::<usize>() == self.tokens.len()
    }

    /// Returns the rows whose logits are wanted, or `None` if these are all rows.
    pub(super) fn wanted(&self, dense: &dyn Dense) -> Result<Option<Wanted>> {
        if self.all_wanted() {
            return Ok(None);
        }
        let index: Vec<u32> = self.logits.iter().cloned().flatten().map(|row| row as u32).collect();
        let (mut batch, mut at) = (Vec::new(), 0);
        for (entry, wanted) in self.work.batch().iter().zip(&self.logits) {
            let range = at..at + wanted.len();
            at = range.end;
            batch.push(AttendRows::new(range, Arc::clone(&entry.segments)));
        }
        let rows: Vec<_> = index.iter().map(|&row| self.work.rows()[row as usize]).collect();
        let work = Arc::new(AttendWork::with_groups(rows, batch, Arc::clone(self.work.groups())));
        Ok(Some(Wanted { work, index: dense.index(index)? }))
    }
}

/// Checks that the segments of a sequence name merge groups that it has.
fn check_groups(sequence: &SequenceInput) -> Result<()> {
    let limit = sequence.groups.len();
    let stray = sequence.segments.iter().map(|segment| segment.merge_group).find(|&group| group >= limit);
    stray.map_or(Ok(()), |group| {
        let (what, value) = ("merge group of a sequence", group as i128);
        Err(kvcore::Error::OutOfRange { what, value, limit: limit as i128 }.into())
    })
}

/// Returns the place of a merge group among the groups of a batch. Bits are compared, so that NaN is found.
fn place_of(groups: &[MergeGroup], group: MergeGroup) -> Option<usize> {
    groups.iter().position(|known| known.lse_scale.to_bits() == group.lse_scale.to_bits())
}

/// Returns a sequence's segments with the merge groups of the whole batch, in which equal groups are one.
fn grouped(sequence: &SequenceInput, groups: &[MergeGroup]) -> Arc<[Segment]> {
    let place = |group: usize| place_of(groups, sequence.groups[group]).unwrap_or(group);
    if sequence.segments.iter().all(|segment| place(segment.merge_group) == segment.merge_group) {
        return Arc::clone(&sequence.segments);
    }
    let moved = |segment: &Segment| Segment { merge_group: place(segment.merge_group), ..segment.clone() };
    sequence.segments.iter().map(moved).collect()
}

/// Replaces the items of a list, in its old memory if their number is unchanged and nobody else holds it.
fn refill<T: Clone>(list: &mut Arc<[T]>, len: usize, items: impl Iterator<Item = T>) {
    match Arc::get_mut(list) {
        Some(own) if own.len() == len => own.iter_mut().zip(items).for_each(|(own, item)| *own = item),
        _ => *list = items.collect(),
    }
}
