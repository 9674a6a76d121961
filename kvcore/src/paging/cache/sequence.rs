//! The ID and the start of a sequence.

use std::fmt;

/// The ID of a cache's sequence. IDs are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a sequence's first token in its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceStart {
    /// Logical index, which determines causality.
    pub logical: usize,
    /// Position for the rotary embedding.
    pub position: i64,
}
