//! What a model is asked to compute: tokens, where they stand, where their KV goes, what they see.

use std::sync::Arc;

use crate::base::{Result, same};
use crate::device::{MergeGroup, QueryRow, Segment};
use crate::paging::SlotMapping;

/// Which logits the caller wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Logits {
    /// None: the pass only fills the cache.
    #[default]
    None,
    /// Of the last token.
    Last,
    /// Of every token.
    All,
}

/// One sequence's share of a forward pass: a prefill, a decode step, a chunk to fill, or tokens of one to
/// compute anew.
#[derive(Debug, Clone)]
pub struct SequenceInput {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Logical index of the start.
    pub logical_start: usize,
    /// Position of the start.
    pub position_start: i64,
    /// How far from the start each token stands, rising; `None` when they follow one another from it.
    pub at: Option<Arc<[u32]>>,
    /// Positions from where keys are stored to where their tokens stand: a token at position `p` has its
    /// key rotated to `p − key_offset`, for a segment with that offset.
    pub key_offset: i64,
    /// Where K and V of the new tokens are written, one slot each.
    pub slots: SlotMapping,
    /// What the tokens see: earlier segments and, last, the one that holds the tokens themselves.
    pub segments: Vec<Segment>,
    /// The merge groups of these segments.
    pub groups: Arc<[MergeGroup]>,
    /// Which logits are wanted.
    pub logits: Logits,
}

impl SequenceInput {
    /// Tokens that follow one another from a start, with plain attention and no logits.
    ///
    /// ```
    /// use kvcore::{BlockId, Segment, SequenceInput, SlotMapping};
    /// let own = Segment::new([BlockId(4)].into(), 2, 10, 10);
    /// let input = SequenceInput::new(vec![7, 8], 10, 10, SlotMapping::from(vec![64, 65]), vec![own]);
    /// assert_eq!(input.rows().map(|row| row.position).collect::<Vec<_>>(), [10, 11]);
    /// ```
    pub fn new(
        tokens: Vec<u32>,
        logical_start: usize,
        position_start: i64,
        slots: SlotMapping,
        segments: Vec<Segment>,
    ) -> Self {
        Self {
            tokens,
            logical_start,
            position_start,
            at: None,
            key_offset: 0,
            slots,
            segments,
            groups: [MergeGroup::default()].into(),
            logits: Logits::None,
        }
    }

    /// The same with logits.
    #[must_use]
    pub fn with_logits(mut self, logits: Logits) -> Self {
        self.logits = logits;
        self
    }

    /// Checks that there is a slot, and a place if places are given, for every token.
    ///
    /// # Errors
    /// [`crate::Error::Mismatch`].
    pub fn check(&self) -> Result<()> {
        same("slots of a sequence", self.tokens.len(), self.slots.len())?;
        self.at.as_ref().map_or(Ok(()), |at| same("places of a sequence", self.tokens.len(), at.len()))
    }

    /// One query row per token.
    pub fn rows(&self) -> impl Iterator<Item = QueryRow> + '_ {
        (0..self.tokens.len()).map(|i| {
            let at = self.at.as_ref().and_then(|at| at.get(i)).map_or(i, |&at| at as usize);
            QueryRow { logical: self.logical_start + at, position: self.position_start + at as i64 }
        })
    }

    /// The position that each token's key is rotated to.
    pub fn key_positions(&self) -> impl Iterator<Item = i64> + '_ {
        self.rows().map(|row| row.position - self.key_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_may_stand_apart_and_keys_elsewhere() {
        let input = SequenceInput::new(vec![5, 6], 100, 40, vec![0, 1].into(), Vec::new());
        input.check().unwrap();
        let apart = SequenceInput { at: Some([3, 9].into()), key_offset: 30, ..input.clone() };
        apart.check().unwrap();
        let rows: Vec<_> = apart.rows().map(|row| (row.logical, row.position)).collect();
        assert_eq!(rows, [(103, 43), (109, 49)]);
        assert_eq!(apart.key_positions().collect::<Vec<_>>(), [13, 19]);
        assert!(SequenceInput { at: Some([3].into()), ..input.clone() }.check().is_err());
        assert!(SequenceInput { slots: vec![0].into(), ..input }.check().is_err());
    }
}
