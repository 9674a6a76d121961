//! The batch of a forward pass: its sequences, and their rows in the form that each layer's operations need.
//!
//! ```text
//!  SequenceInput, SequenceInput, … ──┐
//!  slots of the batch (grow_batch) ──┴─► BatchRows ──► tokens, positions, WriteSlots, AttendWork ──► Scatter, Attend of each layer
//! ```

use crate::device::WriteSlots;

mod input;
mod rows;

pub use input::{GroupInput, SequenceInput};
pub use rows::BatchRows;

/// The logits that a pass computes for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Logits {
    /// No logits: the pass only fills the cache.
    #[default]
    None,
    /// The logits of the last token.
    Last,
    /// The logits of every token.
    All,
}

/// The sequences of a forward pass, and the slots that were allocated for the whole batch at once.
#[derive(Debug, Clone, Copy)]
pub struct StepBatch<'a> {
    /// The sequences. A slice of sequences can also be used as a batch.
    pub inputs: &'a [SequenceInput],
    /// For each layer group, the slots of the sequences whose own `slots` are empty, in order.
    /// [`grow_batch`](crate::KvCache::grow_batch) fills this list. Empty if every sequence has its own slots.
    pub slots: &'a [WriteSlots],
}

impl<'a> From<&'a [SequenceInput]> for StepBatch<'a> {
    fn from(inputs: &'a [SequenceInput]) -> Self {
        Self { inputs, slots: &[] }
    }
}

impl<'a> From<&'a Vec<SequenceInput>> for StepBatch<'a> {
    fn from(inputs: &'a Vec<SequenceInput>) -> Self {
        Self { inputs, slots: &[] }
    }
}

impl<'a, const N: usize> From<&'a [SequenceInput; N]> for StepBatch<'a> {
    fn from(inputs: &'a [SequenceInput; N]) -> Self {
        Self { inputs, slots: &[] }
    }
}
