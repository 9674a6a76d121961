//! The rows of a batch, in the order of its sequences.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Logits, SequenceInput, StepBatch};
use crate::base::{Error, Result, same};
use crate::device::{AttendRows, AttendWork, MergeGroup, QueryRow, Segment, StepInputs, WriteSlots};

/// The rows of a batch, in the form that each layer's operations need.
///
/// Refilling reuses the memory if the sizes are equal, so a decode step does not allocate.
///
/// ```
/// use kvcore::{BatchRows, BlockPool, BlockTable, Segment, SequenceInput};
/// let pool = BlockPool::new(0..8)?;
/// let (mut prompt, mut answer) = (BlockTable::new(&pool, 4)?, BlockTable::new(&pool, 4)?);
/// answer.grow(6)?;                                              // in the cache already
/// let (of_prompt, of_answer) = (prompt.grow(3)?, answer.grow(1)?);
/// let own = |table: &BlockTable| [Segment::new(table.ids().clone(), table.len(), 0, 0)];
/// let batch = [
///     SequenceInput::new(vec![7, 8, 9], 0, 0, of_prompt, own(&prompt)),
///     SequenceInput::new(vec![5], 6, 6, of_answer, own(&answer)),
/// ];
/// let mut rows = BatchRows::default();
/// rows.fill(&batch)?;
/// assert_eq!((rows.tokens()[..].len(), &rows.positions()[..]), (4, &[0, 1, 2, 6][..]));
/// assert_eq!(rows.work().batch()[1].rows, 3..4);                // the attention work of every layer
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchRows {
    tokens: Arc<[u32]>,
    positions: Arc<[i64]>,
    /// The slots and the attention work of each layer group. There is at least one group.
    in_groups: Vec<GroupRows>,
    /// The merge groups of the whole batch.
    groups: Vec<MergeGroup>,
    /// For each sequence, the rows whose logits are needed, as a range of `tokens`.
    logits: Vec<Range<usize>>,
}

/// The slots and attention work of one layer group.
#[derive(Debug)]
struct GroupRows {
    slots: WriteSlots,
    work: Arc<AttendWork>,
}

impl Default for GroupRows {
    fn default() -> Self {
        Self { slots: WriteSlots::default(), work: Arc::new(AttendWork::new([], [])) }
    }
}

impl Default for BatchRows {
    fn default() -> Self {
        Self {
            tokens: Arc::default(),
            positions: Arc::default(),
            in_groups: vec![GroupRows::default()],
            groups: Vec::new(),
            logits: Vec::new(),
        }
    }
}

impl BatchRows {
    /// Replaces the rows with the rows of `batch`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if a sequence lacks a slot for a token or does not have the same number of
    /// layer groups as the other sequences, and [`Error::OutOfRange`] if a segment refers to an unknown merge
    /// group. The rows are unchanged in these cases.
    pub fn fill<'a>(&mut self, batch: impl Into<StepBatch<'a>>) -> Result<()> {
        let StepBatch { inputs, slots } = batch.into();
        let num_groups = inputs.first().map_or(1, SequenceInput::num_groups);
        let what = "groups of layers of a sequence";
        inputs.iter().try_for_each(|input| same(what, num_groups, input.num_groups()))?;
        if !slots.is_empty() {
            same("groups of layers with slots of a batch", num_groups, slots.len())?;
        }
        let slots = (0..num_groups).map(|group| slots_of(inputs, slots.get(group), group));
        let slots: SmallVec<[WriteSlots; 1]> = slots.collect::<Result<_>>()?;
        inputs.iter().try_for_each(check_groups)?;
        let count = inputs.iter().map(|s| s.tokens.len()).sum();
        refill(&mut self.tokens, count, inputs.iter().flat_map(|s| s.tokens.iter().copied()));
        refill(&mut self.positions, count, inputs.iter().flat_map(SequenceInput::key_positions));
        self.in_groups.resize_with(num_groups, GroupRows::default);
        self.in_groups.iter_mut().zip(slots).for_each(|(rows, slots)| rows.slots = slots);
        self.logits.clear();
        let mut at = 0;
        for sequence in inputs {
            let range = at..at + sequence.tokens.len();
            at = range.end;
            self.logits.push(match sequence.logits {
                Logits::None => range.end..range.end,
                Logits::Last => range.end.saturating_sub(1).max(range.start)..range.end,
                Logits::All => range,
            });
        }
        self.fill_work(inputs);
        Ok(())
    }

    /// Returns the tokens, one per row.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// Returns the positions that keys are rotated to, one per row.
    pub fn positions(&self) -> &Arc<[i64]> {
        &self.positions
    }

    /// Returns the slots for keys and values in the first layer group, one per row.
    pub fn slots(&self) -> &WriteSlots {
        self.slots_in(0)
    }

    /// Returns the attention work of the rows, which is the same for all layers of the first group.
    pub fn work(&self) -> &Arc<AttendWork> {
        self.work_in(0)
    }

    /// Returns the number of layer groups.
    pub fn num_groups(&self) -> usize {
        self.in_groups.len()
    }

    /// Returns the slots of the rows in layer group `group`, which must exist.
    pub fn slots_in(&self, group: usize) -> &WriteSlots {
        &self.in_groups[group].slots
    }

    /// Returns the attention work of the rows in layer group `group`, which must exist.
    pub fn work_in(&self, group: usize) -> &Arc<AttendWork> {
        &self.in_groups[group].work
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    fn fill_work(&mut self, batch: &[SequenceInput]) {
        self.groups.clear();
        for &group in batch.iter().flat_map(|sequence| sequence.groups.iter()) {
            if place_of(&self.groups, group).is_none() {
                self.groups.push(group);
            }
        }
        let groups = &self.groups;
        for (group, own) in self.in_groups.iter_mut().enumerate() {
            let fill = |rows: &mut Vec<QueryRow>, entries: &mut Vec<AttendRows>| {
                rows.clear();
                rows.extend(batch.iter().flat_map(SequenceInput::rows));
                entries.clear();
                let mut at = 0;
                for sequence in batch {
                    let range = at..at + sequence.tokens.len();
                    at = range.end;
                    entries.push(AttendRows::new(range, grouped(sequence, group, groups)));
                }
            };
            match Arc::get_mut(&mut own.work) {
                Some(work) if work.groups()[..] == groups[..] => work.edit(fill),
                _ => {
                    let (mut rows, mut entries) = (Vec::new(), Vec::new());
                    fill(&mut rows, &mut entries);
                    own.work = Arc::new(AttendWork::with_groups(rows, entries, groups.as_slice()));
                }
            }
        }
    }

    /// Pads the rows to the number of rows of a graph, and returns the padded lists, whose memory is shared
    /// with this struct. A graph covers the layers of only one group, so the slots and the work are from the
    /// first group.
    pub fn padded(&mut self) -> StepInputs {
        let own = &mut self.in_groups[0];
        let step = StepInputs {
            tokens: Arc::clone(&self.tokens),
            positions: Arc::clone(&self.positions),
            slots: own.slots.clone(),
            work: Arc::clone(&own.work),
        };
        let (count, step) = (self.tokens.len(), step.padded());
        if step.tokens.len() > count {
            self.logits.push(count..step.tokens.len());
            self.tokens = Arc::clone(&step.tokens);
            self.positions = Arc::clone(&step.positions);
            own.slots = step.slots.clone();
            own.work = Arc::clone(&step.work);
        }
        step
    }

    /// Releases the slots and segments of the batch, so that their owner can refill them in place.
    pub fn release(&mut self) {
        for own in &mut self.in_groups {
            own.slots = WriteSlots::default();
            if let Some(work) = Arc::get_mut(&mut own.work) {
                work.edit(|_, entries| entries.clear());
            }
        }
    }

    /// Returns whether the logits of all rows are needed.
    pub fn all_wanted(&self) -> bool {
        self.logits.iter().map(Range::len).sum::<usize>() == self.tokens.len()
    }

    /// Returns the rows whose logits are needed, with their attention work in a layer group, or `None` if all
    /// rows are needed. In the last layer, only these rows need queries.
    pub fn wanted(&self, group: usize) -> Option<(Vec<u32>, Arc<AttendWork>)> {
        if self.all_wanted() {
            return None;
        }
        let index: Vec<u32> = self.logits.iter().cloned().flatten().map(|row| row as u32).collect();
        let (mut batch, mut at) = (Vec::new(), 0);
        let all = self.work_in(group);
        for (entry, wanted) in all.batch().iter().zip(&self.logits) {
            let range = at..at + wanted.len();
            at = range.end;
            batch.push(AttendRows::new(range, Arc::clone(&entry.segments)));
        }
        let rows: Vec<_> = index.iter().map(|&row| all.rows()[row as usize]).collect();
        let work = Arc::new(AttendWork::with_groups(rows, batch, Arc::clone(all.groups())));
        Some((index, work))
    }
}

/// Returns the slots of all tokens in a layer group: for each sequence its own slots, or the next slots in
/// `shared`.
fn slots_of(inputs: &[SequenceInput], shared: Option<&WriteSlots>, group: usize) -> Result<WriteSlots> {
    let none = WriteSlots::default();
    let shared = shared.unwrap_or(&none);
    let takes = |input: &SequenceInput| input.in_group(group).0.is_empty() && !shared.is_empty();
    let taken = inputs.iter().filter(|input| takes(input)).map(|input| input.tokens.len()).sum();
    same("slots of a batch", taken, shared.len())?;
    inputs.iter().filter(|input| !takes(input)).try_for_each(SequenceInput::check)?;
    if inputs.iter().all(takes) {
        return Ok(shared.clone());
    }
    if shared.is_empty() {
        return Ok(WriteSlots::concat(inputs.iter().map(|input| input.in_group(group).0)));
    }
    let mut at = 0;
    let parts = inputs.iter().map(|input| {
        if !takes(input) {
            return Ok(input.in_group(group).0.clone());
        }
        at += input.tokens.len();
        shared.part(at - input.tokens.len()..at)
    });
    let parts = parts.collect::<Result<Vec<_>>>()?;
    Ok(WriteSlots::concat(parts.iter()))
}

/// Checks that a sequence's segments refer only to merge groups of the same sequence.
fn check_groups(sequence: &SequenceInput) -> Result<()> {
    let limit = sequence.groups.len();
    let segments = (0..sequence.num_groups()).flat_map(|group| sequence.in_group(group).1.iter());
    let stray = segments.map(|segment| segment.merge_group).find(|&group| group >= limit);
    stray.map_or(Ok(()), |group| {
        let (what, value) = ("merge group of a sequence", group as i128);
        Err(Error::OutOfRange { what, value, limit: limit as i128 })
    })
}

/// Returns the index of a merge group among the batch's groups. Compares bit patterns, so that NaN is found
/// too.
fn place_of(groups: &[MergeGroup], group: MergeGroup) -> Option<usize> {
    groups.iter().position(|known| known.lse_scale.to_bits() == group.lse_scale.to_bits())
}

/// Returns a sequence's segments in a layer group, with merge-group indices that refer to the list of the
/// whole batch. That list contains equal groups only once.
fn grouped(sequence: &SequenceInput, group: usize, groups: &[MergeGroup]) -> Arc<[Segment]> {
    let segments = sequence.in_group(group).1;
    let place = |group: usize| place_of(groups, sequence.groups[group]).unwrap_or(group);
    if segments.iter().all(|segment| place(segment.merge_group) == segment.merge_group) {
        return Arc::clone(segments);
    }
    let moved = |segment: &Segment| Segment { merge_group: place(segment.merge_group), ..segment.clone() };
    segments.iter().map(moved).collect()
}

/// Replaces the items of a list. Reuses the memory if the length is unchanged and nothing else holds the
/// list.
fn refill<T: Clone>(list: &mut Arc<[T]>, len: usize, items: impl Iterator<Item = T>) {
    match Arc::get_mut(list) {
        Some(own) if own.len() == len => own.iter_mut().zip(items).for_each(|(own, item)| *own = item),
        _ => *list = items.collect(),
    }
}
