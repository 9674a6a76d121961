//! Converts the scales of a tile to f32, in the order in which the products read them.

use std::ops::Range;

use kvcore::{Fp8Kind, KvFormat};

use super::pointers::{Prefetch, RowPointers, RowScales};
use super::source::SourcePlane;
use super::tile::TILE;
use crate::plane::RowLayout;
use crate::simd::{E4M3_UNIT, Simd, SimdTask};

/// Extra elements after the scales, because vector loads may read past the last scale.
const ROOM: usize = 16;

/// The scales of one tile for some heads of a plane, ordered by head and then by token.
#[derive(Clone, Copy)]
pub(super) struct TileScales {
    at: *mut f32,
    per_row: usize,
    /// Number of elements that share a scale.
    group: usize,
    /// Index of the first head.
    first: usize,
}

impl TileScales {
    /// Returns the number of f32 elements needed for the scales of `heads` heads of a plane.
    pub(super) fn elements(source: &SourcePlane<'_>, heads: usize) -> usize {
        // After the f32 scales, there is room for the stored scales of one head.
        source.scales().map_or(0, |layout| (heads + 1) * TILE * layout.row_elements() + ROOM)
    }

    /// Creates a table in memory `at` for the scales of a plane's heads, starting at head `first`.
    pub(super) fn new(source: &SourcePlane<'_>, first: usize, at: *mut f32) -> Self {
        let per_row = source.scales().map_or(0, RowLayout::row_elements);
        Self { at, per_row, group: source.dim / per_row.max(1), first }
    }

    /// Returns the scales of a head.
    pub(super) fn of(self, head: usize) -> RowScales {
        let at = self.at.wrapping_add((head - self.first) * TILE * self.per_row);
        RowScales::new(at, self.per_row, self.group.max(1))
    }
}

/// Converts the scales of a tile to f32.
///
/// # Safety
/// `to` must have room for the scales of `heads` of `source`, in initialised memory that nothing else
/// accesses. `rows` must be the addresses of the scales of head 0 of `source`, for at most [`TILE`] tokens.
pub(super) struct ReadScales<'a> {
    pub(super) source: &'a SourcePlane<'a>,
    pub(super) rows: &'a [*const u8],
    /// The addresses of the scales to prefetch.
    pub(super) next: &'a [*const u8],
    pub(super) heads: Range<usize>,
    pub(super) to: TileScales,
}

impl SimdTask for ReadScales<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { source, rows, next, heads, to } = self;
        let Some(layout) = source.scales() else { return };
        let (head_bytes, per_row) = (layout.head_bytes(), to.per_row);
        let n = rows.len() * per_row;
        let stored = to.of(heads.end).row(0).cast_mut().cast::<u16>();
        for head in heads.clone() {
            let rows = RowPointers { at: rows, offset: head * head_bytes, ..RowPointers::default() };
            let to = to.of(head).row(0).cast_mut();
            // SAFETY: `addresses` checked that the scales of all heads of each row are in bounds. By
            // contract, `to` has room for a tile of scales per head, and after the last head for a tile of
            // f16 scales.
            unsafe {
                if let KvFormat::Fp8 { kind, .. } = source.format {
                    let unit = if kind == Fp8Kind::E4M3 { E4M3_UNIT } else { 1.0 };
                    let scale = rows.row::<f32>(0).read_unaligned() * unit;
                    (0..n).for_each(|t| *to.add(t) = scale);
                    continue;
                }
                match per_row {
                    1 => put::<1>(rows, stored),
                    2 => put::<2>(rows, stored),
                    4 => put::<4>(rows, stored),
                    8 => put::<8>(rows, stored),
                    _ => {
                        for i in 0..n {
                            let from = rows.row::<u16>(i / per_row).add(i % per_row);
                            *stored.add(i) = from.read_unaligned();
                        }
                    }
                }
                for i in (0..n).step_by(S::LANES) {
                    S::store(to.add(i), S::load_f16(stored.add(i)));
                }
            }
        }
        if matches!(source.format, KvFormat::Fp8 { .. }) {
            return;
        }
        let adjacent = head_bytes == layout.row_bytes();
        let (parts, bytes) =
            if adjacent { (1, heads.len() * head_bytes) } else { (heads.len(), layout.row_bytes()) };
        for part in 0..parts {
            let offset = (heads.start + part) * head_bytes;
            let rows = RowPointers { at: next, offset, ..RowPointers::default() };
            let mut ahead = Prefetch { rows, bytes, next: (0, 0) };
            // SAFETY: the caller guarantees the instruction set.
            unsafe { ahead.issue::<S>(ahead.lines(1)) };
        }
    }
}

/// Copies each row's `N` scales to `to`, row by row.
///
/// # Safety
/// Each row must have `N` 16-bit scales, and `to` must have room for all of them.
#[inline(always)]
unsafe fn put<const N: usize>(rows: RowPointers<'_>, to: *mut u16) {
    for t in 0..rows.len() {
        // SAFETY: each row has `N` scales, and `to` has room for `rows.len()` times as many by contract.
        unsafe { to.cast::<[u16; N]>().add(t).write_unaligned(rows.row::<[u16; N]>(t).read_unaligned()) };
    }
}
