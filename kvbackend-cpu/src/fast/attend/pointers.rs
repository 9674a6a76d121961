//! Addresses of rows: of rows to read now, and of rows to prefetch.

use std::ops::Range;

use crate::simd::Simd;

/// The scales of rows of one head as f32, next to each other for each row; empty for rows without scales.
#[derive(Clone, Copy)]
pub(super) struct RowScales {
    at: *const f32,
    per_row: usize,
    /// Elements that share a scale.
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

    /// Returns the address of the scales of row `t`.
    #[inline(always)]
    pub(super) fn row(self, t: usize) -> *const f32 {
        self.at.wrapping_add(t * self.per_row)
    }

    /// Returns the address of the scale of element `i` of row `t`.
    #[inline(always)]
    pub(super) fn element(self, t: usize, i: usize) -> *const f32 {
        self.row(t).wrapping_add(i / self.group)
    }
}

/// The addresses of rows of one head, which need not be adjacent.
#[derive(Clone, Copy, Default)]
pub(super) struct RowPointers<'a> {
    /// Addresses of the rows of head 0, token by token.
    pub(super) at: &'a [*const u8],
    /// Bytes from the row of head 0 to the row of the current head.
    pub(super) offset: usize,
    pub(super) scales: RowScales,
}

impl RowPointers<'_> {
    /// Returns the rows of some tokens.
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
/// The next rows of a plane. They are prefetched while others are computed, which keeps memory busy during
/// both products.
#[derive(Clone, Copy, Default)]
pub(super) struct Prefetch<'a> {
    pub(super) rows: RowPointers<'a>,
    /// Bytes of each row.
    pub(super) bytes: usize,
    /// The next row to prefetch, and the next byte of it.
    pub(super) next: (usize, usize),
}

impl Prefetch<'_> {
    /// Returns the number of lines to prefetch at each of `steps` steps, so all are prefetched by the
    /// last step.
    #[inline(always)]
    pub(super) fn lines(&self, steps: usize) -> usize {
        (self.rows.len() * self.bytes.div_ceil(64)).div_ceil(steps.max(1))
    }

    /// Prefetches up to `lines` cache lines into the second-level cache: the rows of all heads of a tile
    /// exceed the first level.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set of `S`.
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
