//! Addresses of the rows to read, and of the rows to prefetch.

use std::ops::Range;

use crate::simd::Simd;

/// The scales of one head's rows as f32. The scales of each row are contiguous. The address is null if rows
/// have no scales.
#[derive(Clone, Copy)]
pub(super) struct RowScales {
    at: *const f32,
    per_row: usize,
    /// Number of elements that share a scale.
    pub(super) group: usize,
}

impl Default for RowScales {
    fn default() -> Self {
        Self { at: std::ptr::null(), per_row: 0, group: 1 }
    }
}

impl RowScales {
    pub(super) fn new(at: *const f32, per_row: usize, group: usize) -> Self {
        Self { at, per_row, group }
    }

    /// Returns the address of row `t`'s scales.
    #[inline(always)]
    pub(super) fn row(self, t: usize) -> *const f32 {
        self.at.wrapping_add(t * self.per_row)
    }

    /// Returns the address of the scale for element `i` of row `t`.
    #[inline(always)]
    pub(super) fn element(self, t: usize, i: usize) -> *const f32 {
        self.row(t).wrapping_add(i / self.group)
    }
}

/// The addresses of one head's rows, which need not be adjacent.
#[derive(Clone, Copy, Default)]
pub(super) struct RowPointers<'a> {
    /// The address of head 0's row for each token.
    pub(super) at: &'a [*const u8],
    /// Distance in bytes from head 0's row to the current head's row.
    pub(super) offset: usize,
    pub(super) scales: RowScales,
}

impl RowPointers<'_> {
    /// Returns the rows of a range of tokens.
    #[inline(always)]
    pub(super) fn part(self, tokens: Range<usize>) -> Self {
        let scales = RowScales { at: self.scales.row(tokens.start), ..self.scales };
        Self { at: &self.at[tokens], offset: self.offset, scales }
    }

    pub(super) fn len(self) -> usize {
        self.at.len()
    }

    #[inline(always)]
    pub(super) fn row<E>(self, t: usize) -> *const E {
        self.at[t].wrapping_add(self.offset).cast()
    }
}

// Decision: docs/decisions/backend-cpu.md#both-products-prefetch
/// The next rows of a plane. They are prefetched while the current rows are multiplied, so that memory stays
/// busy during the products with keys as well as with values.
#[derive(Clone, Copy, Default)]
pub(super) struct Prefetch<'a> {
    pub(super) rows: RowPointers<'a>,
    /// Number of bytes per row.
    pub(super) bytes: usize,
    /// Index of the next row to prefetch, and index of the next byte in that row.
    pub(super) next: (usize, usize),
}

impl Prefetch<'_> {
    /// Returns the number of cache lines to prefetch in each of `steps` steps, so that all lines have been
    /// prefetched after the last step.
    #[inline(always)]
    pub(super) fn lines(&self, steps: usize) -> usize {
        (self.rows.len() * self.bytes.div_ceil(64)).div_ceil(steps.max(1))
    }

    /// Prefetches up to `lines` cache lines into the second-level cache, because the rows of all heads of a
    /// tile do not fit in the first level.
    ///
    /// # Safety
    /// The caller must be compiled for the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn issue<S: Simd>(&mut self, lines: usize) {
        let (mut left, (t, at)) = (lines, &mut self.next);
        while left > 0 && *t < self.rows.len() {
            let start = self.rows.row::<u8>(*t).wrapping_add(*at);
            let here = left.min((self.bytes - *at).div_ceil(64));
            for line in 0..here {
                // SAFETY: `prefetch_far` accepts any address, and the instruction set of `S` is available by
                // contract.
                unsafe { S::prefetch_far(start.wrapping_add(64 * line)) };
            }
            left -= here;
            *at += 64 * here;
            if *at >= self.bytes {
                (*t, *at) = (*t + 1, 0);
            }
        }
    }
}
