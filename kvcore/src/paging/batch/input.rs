//! One sequence's input to a forward pass: tokens, positions, slots for K and V, and the segments to attend
//! to.

use std::ops::Range;
use std::sync::Arc;

use super::Logits;
use crate::base::{Result, same};
use crate::device::{MergeGroup, QueryRow, Segment, WriteSlots};

/// One sequence's part of a forward pass: a prefill, a decode step, a chunk to fill, or tokens of a chunk to
/// recompute.
#[derive(Debug, Clone)]
pub struct SequenceInput {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Logical index of the first token, or the index that distances in `at` are added to.
    pub logical_start: usize,
    /// Position of the first token, or the position that distances in `at` are added to.
    pub position_start: i64,
    /// Distance of each token from `logical_start` and `position_start`, in increasing order, or `None` if
    /// the tokens are consecutive.
    pub at: Option<Arc<[u32]>>,
    // Decision: docs/decisions/chunks.md#recomputed-keys-are-rotated-like-their-neighbours
    /// A token's position minus the position that its stored key is rotated to. The segment that contains the
    /// key must have this offset.
    pub key_offset: i64,
    /// Slots for K and V of the new tokens, one per token. Empty if
    /// [`StepBatch::slots`](super::StepBatch::slots) contains them.
    pub slots: WriteSlots,
    /// Segments that the tokens attend to, in order. The last segment contains the tokens themselves. The
    /// pass's attention work shares this list.
    pub segments: Arc<[Segment]>,
    /// The merge groups of the segments.
    pub groups: Arc<[MergeGroup]>,
    /// The logits to compute.
    pub logits: Logits,
    /// Slots and segments in the second and later layer groups, if the cache has [several
    /// groups](crate::GroupedKvCache). `slots` and `segments` belong to the first group.
    pub others: Vec<GroupInput>,
}

/// A sequence's slots and segments in one layer group. For the first group, [`SequenceInput`] has its own
/// fields.
#[derive(Debug, Clone, Default)]
pub struct GroupInput {
    /// Slots for K and V of the new tokens.
    pub slots: WriteSlots,
    /// Segments that the tokens attend to in the group's layers.
    pub segments: Arc<[Segment]>,
}

impl SequenceInput {
    /// Creates an input with consecutive tokens, plain attention and no logits.
    ///
    /// ```
    /// use kvcore::{BlockId, Segment, SequenceInput, WriteSlots};
    /// let own = Segment::new([BlockId(4)].into(), 2, 10, 10);
    /// let input = SequenceInput::new(vec![7, 8], 10, 10, WriteSlots::unchecked([64, 65]), [own]);
    /// assert_eq!(input.rows().map(|row| row.position).collect::<Vec<_>>(), [10, 11]);
    /// ```
    pub fn new(
        tokens: Vec<u32>,
        logical_start: usize,
        position_start: i64,
        slots: WriteSlots,
        segments: impl Into<Arc<[Segment]>>,
    ) -> Self {
        Self {
            tokens,
            logical_start,
            position_start,
            at: None,
            key_offset: 0,
            slots,
            segments: segments.into(),
            groups: [MergeGroup::default()].into(),
            logits: Logits::None,
            others: Vec::new(),
        }
    }

    /// Sets the logits to compute.
    #[must_use]
    pub fn with_logits(mut self, logits: Logits) -> Self {
        self.logits = logits;
        self
    }

    /// Returns some of the tokens as a separate input, with the same segments and no logits. Computing the
    /// parts of an input in order, in one pass or several, gives the same result as computing the whole
    /// input.
    ///
    /// ```
    /// # use kvcore::{BlockId, Segment, SequenceInput, WriteSlots};
    /// # let own = Segment::new([BlockId(0)].into(), 4, 10, 10);
    /// let whole = SequenceInput::new(vec![5, 6, 7, 8], 10, 10, WriteSlots::unchecked([0, 1, 2, 3]), [own]);
    /// let rest = whole.part(2..4)?;
    /// assert_eq!((&rest.tokens[..], &rest.slots[..], rest.position_start), (&[7, 8][..], &[2, 3][..], 12));
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`](crate::Error::OutOfRange) if `tokens` ends past the last token.
    pub fn part(&self, tokens: Range<usize>) -> Result<Self> {
        let slots = self.slots.part(tokens.clone())?;
        let of_group = |group: &GroupInput| {
            let slots = group.slots.part(tokens.clone())?;
            Ok(GroupInput { slots, segments: Arc::clone(&group.segments) })
        };
        let others = self.others.iter().map(of_group).collect::<Result<_>>()?;
        let (skipped, at) = match &self.at {
            Some(at) => (0, at.get(tokens.clone()).map(Arc::from)),
            None => (tokens.start, None),
        };
        Ok(Self {
            tokens: self.tokens.get(tokens).map(<[u32]>::to_vec).unwrap_or_default(),
            logical_start: self.logical_start + skipped,
            position_start: self.position_start + skipped as i64,
            at,
            key_offset: self.key_offset,
            slots,
            segments: Arc::clone(&self.segments),
            groups: Arc::clone(&self.groups),
            logits: Logits::None,
            others,
        })
    }

    /// Replaces the slots of the new tokens in each layer group.
    pub fn set_slots(&mut self, slots: Vec<WriteSlots>) {
        let mut slots = slots.into_iter();
        self.slots = slots.next().unwrap_or_default();
        self.others.iter_mut().for_each(|group| group.slots = slots.next().unwrap_or_default());
    }

    /// Returns the slots and segments in a layer group. The caller must have checked that the group exists.
    pub(super) fn in_group(&self, group: usize) -> (&WriteSlots, &Arc<[Segment]>) {
        match group.checked_sub(1).and_then(|other| self.others.get(other)) {
            Some(other) => (&other.slots, &other.segments),
            None => (&self.slots, &self.segments),
        }
    }

    /// Returns the number of layer groups.
    pub(super) fn num_groups(&self) -> usize {
        1 + self.others.len()
    }

    /// Checks that every token has a slot in every layer group, and a distance in `at` if that is given.
    ///
    /// # Errors
    /// Returns [`crate::Error::Mismatch`] if the number of slots or distances differs from the number of
    /// tokens.
    pub fn check(&self) -> Result<()> {
        let of_group = |group| same("slots of a sequence", self.tokens.len(), self.in_group(group).0.len());
        (0..self.num_groups()).try_for_each(of_group)?;
        self.at.as_ref().map_or(Ok(()), |at| same("places of a sequence", self.tokens.len(), at.len()))
    }

    /// Returns one query row per token.
    pub fn rows(&self) -> impl Iterator<Item = QueryRow> + '_ {
        (0..self.tokens.len()).map(|i| {
            let at = self.at.as_ref().and_then(|at| at.get(i)).map_or(i, |&at| at as usize);
            QueryRow { logical: self.logical_start + at, position: self.position_start + at as i64 }
        })
    }

    /// Returns the position that each token's key is rotated to.
    pub fn key_positions(&self) -> impl Iterator<Item = i64> + '_ {
        self.rows().map(|row| row.position - self.key_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_may_stand_apart_and_keys_elsewhere() {
        let input = SequenceInput::new(vec![5, 6], 100, 40, WriteSlots::unchecked([0, 1]), []);
        input.check().unwrap();
        let apart = SequenceInput { at: Some([3, 9].into()), key_offset: 30, ..input.clone() };
        apart.check().unwrap();
        let rows: Vec<_> = apart.rows().map(|row| (row.logical, row.position)).collect();
        assert_eq!(rows, [(103, 43), (109, 49)]);
        assert_eq!(apart.key_positions().collect::<Vec<_>>(), [13, 19]);
        assert!(SequenceInput { at: Some([3].into()), ..input.clone() }.check().is_err());
        assert!(SequenceInput { slots: WriteSlots::unchecked([0]), ..input }.check().is_err());
    }
}
