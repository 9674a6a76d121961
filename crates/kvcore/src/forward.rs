//! What a model is asked to compute: tokens, where they stand, where their KV goes, what they see.

use crate::cache::SlotMapping;
use crate::kernels::{QueryRow, Segment};

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

/// One sequence's share of a forward pass: a prefill, a decode step, or a chunk to fill.
#[derive(Debug, Clone)]
pub struct SequenceInput {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Logical index of the first new token; the others follow.
    pub logical_start: usize,
    /// Position of the first new token; the others follow.
    pub position_start: i64,
    /// Where K and V of the new tokens are written, one slot each.
    pub slots: SlotMapping,
    /// What the tokens see: earlier segments and, last, the one that holds the tokens themselves.
    pub segments: Vec<Segment>,
    /// Which logits are wanted.
    pub logits: Logits,
}

impl SequenceInput {
    /// One query row per token.
    pub fn rows(&self) -> impl Iterator<Item = QueryRow> + '_ {
        (0..self.tokens.len())
            .map(|i| QueryRow { logical: self.logical_start + i, position: self.position_start + i as i64 })
    }
}
