//! Stored keys and values, and the segment in which a prompt uses them.

use std::sync::Arc;

use kvcore::{BlockId, Segment};

/// The blocks, length and position of stored keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) blocks: &'a Arc<[BlockId]>,
    pub(crate) len: usize,
    /// The position that the first key is rotated to.
    pub(crate) start: i64,
}

impl Stored<'_> {
    /// Returns the segment of these keys and values, used at positions starting at `position`.
    pub(super) fn used_at(self, position: i64, logical: usize) -> Segment {
        Segment::new(Arc::clone(self.blocks), self.len, logical, self.start).at_offset(position - self.start)
    }
}
