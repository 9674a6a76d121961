//! Query heads, grouped into units that share a K head and a V head.

use std::ops::Range;

/// Units of query heads: adjacent heads that share a K head and a V head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadUnits {
    /// Number of query heads.
    pub(super) heads: usize,
    /// Number of heads per unit.
    pub(super) size: usize,
}

impl HeadUnits {
    pub(super) fn new(heads: usize, k_heads: usize, v_heads: usize) -> Self {
        let (mut a, mut b) = (heads / k_heads, heads / v_heads);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Self { heads, size: a.max(1) }
    }

    /// Returns the number of units.
    pub(super) fn count(self) -> usize {
        self.heads / self.size
    }

    /// Returns the heads of a unit.
    pub(super) fn heads_of(self, unit: usize) -> Range<usize> {
        unit * self.size..(unit + 1) * self.size
    }
}
