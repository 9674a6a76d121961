//! A sequence's ID, and the logical index and position at which the sequence starts.

use std::fmt;

/// The ID of a sequence in a cache. IDs are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The logical index and the position of a sequence's first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceStart {
    /// Logical index of the first token, which determines causality.
    pub logical: usize,
    /// Position of the first token, for the rotary embedding.
    pub position: i64,
}
