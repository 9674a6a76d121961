//! What names a sequence and where it stands.

use std::fmt;

/// A sequence of a cache. Ids are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a sequence's first token stands in its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceStart {
    /// Logical index, by which causality goes.
    pub logical: usize,
    /// Position of the rotary embedding.
    pub position: i64,
}
