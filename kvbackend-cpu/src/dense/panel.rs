//! Multiplies many rows by panels. A panel is a few matrix rows that are first decoded and transposed, so that
//! their elements are side by side.
//!
//! A panel is two vectors wide and fits in the first-level cache. Depending on the instruction set, up to six
//! or eight rows at a time are multiplied by a panel: each of the rows' elements is broadcast to a vector,
//! and every sum stays in a register until the end of the panel. (Goto and van de Geijn, *Anatomy of
//! high-performance matrix multiplication*, 2008.)

use std::ops::Range;

use super::{Matrix, PAD, StoredType, stored};
use crate::simd::Simd;

/// Minimum number of rows for which a panel saves more time than its transposition costs.
pub(super) const FEWEST_ROWS: usize = 24;
/// Minimum number of lanes with which panels of decoded elements are faster than tiles.
pub(super) const DECODED_LANES: usize = 16;
/// Each thread's columns begin at a multiple of this number, so panels are whole with every instruction set.
pub(super) const UNIT: usize = 32;
/// Maximum number of elements per column in a panel.
const DEPTH: usize = 256;
/// Maximum number of rows to multiply by one panel before the next panel is built. The row elements that the
/// panel is multiplied by stay in the second-level cache.
const ROWS: usize = 384;
/// Distance between elements that map to the same set of the first-level cache. Rows whose length is a
/// multiple of this distance are copied to spread them over more sets.
const SAME_SETS: usize = 1024;
/// The number of row elements that fit in the second-level cache next to a panel.
const FEW: usize = 64 << 10;
/// Maximum number of rows per tile.
const TILE_ROWS: usize = 8;
/// Maximum number of columns per panel.
const WIDTH: usize = 32;

/// Computes `y[r * out + c] = x[r] · matrix[c]` for all `rows` rows of `x` and matrix rows `columns`.
/// Overwrites `scratch`.
///
/// # Safety
/// `y` must be valid for writes of `columns` in each of `rows` rows of `matrix.out` elements, and no other
/// code may access them. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn columns<S: Simd>(
    (x, rows): (&[f32], usize),
    matrix: &Matrix<'_>,
    columns: Range<usize>,
    y: *mut f32,
    scratch: &mut Vec<f32>,
) {
    let (input, width) = (matrix.input, 2 * S::LANES);
    assert!(x.len() == rows * input && columns.end <= matrix.out, "whole rows");
    let floats: Option<&[f32]> = match matrix.dtype {
        StoredType::F32 => bytemuck::try_cast_slice(matrix.bytes).ok(),
        _ => None,
    };
    // Each row is split into parts of about equal length, which consist of whole blocks.
    let unit = S::LANES.max(matrix.dtype.block_elements());
    let depth = input.div_ceil(input.div_ceil(DEPTH).max(1)).next_multiple_of(unit);
    let runs = rows.div_ceil(ROWS);
    let apart = input.is_multiple_of(SAME_SETS) && rows * input > FEW;
    let copies = if apart { rows.div_ceil(runs) * (depth + PAD) } else { 0 };
    // Matrix rows that are not f32 are decoded first.
    let decoded = if floats.is_some() { 0 } else { width * (depth + PAD) };
    if scratch.len() < width * depth + decoded + copies {
        scratch.resize(width * depth + decoded + copies, 0.0);
    }
    let (panel, rest) = scratch.split_at_mut(width * depth);
    let (decoded, copies) = rest.split_at_mut(decoded);
    for run in 0..runs {
        let (first, end) = (rows * run / runs, rows * (run + 1) / runs);
        // A few rows fit in the cache completely, so the matrix is read row by row. If there are many rows,
        // one part of every row is multiplied by all columns before the next part.
        let few = (end - first) * input <= FEW;
        for group in columns.clone().step_by(if few { width } else { columns.len().max(1) }) {
            let group = group..if few { (group + width).min(columns.end) } else { columns.end };
            for from in (0..input).step_by(depth) {
                let part = from..(from + depth).min(input);
                let (x, stride) = if few || !apart {
                    (&x[first * input + from..], input)
                } else {
                    copy(&x[first * input..end * input], input, part.clone(), copies);
                    (&*copies, part.len() + PAD)
                };
                let depth = part.len();
                for column in group.clone().step_by(width) {
                    let count = width.min(columns.end - column);
                    // SAFETY: the caller is compiled for `S`. The panel has `width` columns of `depth`
                    // elements. The matrix has `count` rows starting at `column`, with the elements `part`,
                    // and `x` has these elements in rows `first..end`, which are `stride` elements apart. By
                    // contract, `y` may be written at `count` columns of these rows.
                    unsafe {
                        let source = if let Some(floats) = floats {
                            let elements = floats.as_ptr().add(column * input + from);
                            MatrixRows { elements, stride: input, rows: count }
                        } else {
                            decode::<S>(matrix, column..column + count, &part, decoded);
                            MatrixRows { elements: decoded.as_ptr(), stride: depth + PAD, rows: count }
                        };
                        source.transpose::<S>(depth, panel.as_mut_ptr());
                        let panel = Panel { elements: panel.as_ptr(), depth, columns: count, add: from > 0 };
                        let y = y.add(first * matrix.out + column);
                        panel.multiply::<S>((x.as_ptr(), end - first, stride), (y, matrix.out));
                    }
                }
            }
        }
    }
}

/// Decodes a range of elements of a few matrix rows, leaving a cache line between the rows.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn decode<S: Simd>(matrix: &Matrix<'_>, rows: Range<usize>, part: &Range<usize>, to: &mut [f32]) {
    for (row, to) in rows.zip(to.chunks_exact_mut(part.len() + PAD)) {
        // SAFETY: the caller is compiled for `S`, by contract.
        unsafe { stored::decode::<S>(matrix.dtype, matrix.elements(row, part), &mut to[..part.len()]) };
    }
}

/// Copies a range of each row's elements, leaving a cache line between the copies.
fn copy(x: &[f32], input: usize, part: Range<usize>, to: &mut [f32]) {
    for (row, to) in x.chunks_exact(input).zip(to.chunks_exact_mut(part.len() + PAD)) {
        to[..part.len()].copy_from_slice(&row[part.clone()]);
    }
}

/// A few matrix rows, restricted to a range of their elements. The rows begin `stride` elements apart.
struct MatrixRows {
    elements: *const f32,
    stride: usize,
    rows: usize,
}

impl MatrixRows {
    /// Writes `depth` elements of each row as a column of a panel. Columns without a row are filled with 0.
    ///
    /// # Safety
    /// Every row must have `depth` elements, and `panel` must be valid for writes of `depth` times
    /// `2 * LANES` elements. The caller must be compiled for `S`.
    #[inline(always)]
    unsafe fn transpose<S: Simd>(&self, depth: usize, panel: *mut f32) {
        let width = 2 * S::LANES;
        // Distance to the following rows, which are prefetched.
        let ahead = width * self.stride;
        for first in [0, S::LANES] {
            let rows = self.rows.saturating_sub(first).min(S::LANES);
            let mut i = 0;
            // SAFETY: rows `first..first + rows` have elements `i..i + LANES` where a vector is loaded, and
            // element `i` where a single element is loaded; the panel has `depth` times `width` elements.
            unsafe {
                let at = |row: usize, i: usize| self.elements.add((first + row) * self.stride + i);
                while i + S::LANES <= depth {
                    let mut square = [S::splat(0.0); 16];
                    for (row, vector) in square.iter_mut().enumerate().take(rows) {
                        *vector = S::load(at(row, i));
                        S::prefetch(at(row, i).wrapping_add(ahead).cast());
                    }
                    S::transpose(&mut square);
                    for (j, vector) in square.into_iter().enumerate().take(S::LANES) {
                        S::store(panel.add((i + j) * width + first), vector);
                    }
                    i += S::LANES;
                }
                for i in i..depth {
                    for row in 0..S::LANES {
                        let x = if row < rows { *at(row, i) } else { 0.0 };
                        panel.add(i * width + first + row).write(x);
                    }
                }
            }
        }
    }
}

/// A panel: matrix rows that were transposed to columns, in `depth` pairs of vectors. Only the first
/// `columns` elements of each pair are used.
#[derive(Clone, Copy)]
struct Panel {
    elements: *const f32,
    depth: usize,
    columns: usize,
    /// True if the products are added to the contents of `y`.
    add: bool,
}

impl Panel {
    /// Multiplies rows that begin `input` elements apart by the panel, and writes products whose rows begin
    /// `stride` elements apart.
    ///
    /// # Safety
    /// `x` must have `depth` elements in each of `rows` rows, and `y` must be valid for `columns` products in
    /// each of them. The caller must be compiled for `S`.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(
        self,
        (x, rows, input): (*const f32, usize, usize),
        (y, stride): (*mut f32, usize),
    ) {
        let tiles = rows.div_ceil(if S::REGISTERS >= 32 { 8 } else { 6 });
        for tile in 0..tiles {
            let at = rows * tile / tiles;
            let (taken, x) = (rows * (tile + 1) / tiles - at, (x.wrapping_add(at * input), input));
            let to = (y.wrapping_add(at * stride), stride);
            // SAFETY: `at + taken <= rows`, and a tile has at most that many rows.
            unsafe {
                match taken {
                    1 => self.tile::<S, 1>(x, to),
                    2 => self.tile::<S, 2>(x, to),
                    3 => self.tile::<S, 3>(x, to),
                    4 => self.tile::<S, 4>(x, to),
                    5 => self.tile::<S, 5>(x, to),
                    6 => self.tile::<S, 6>(x, to),
                    7 => self.tile::<S, 7>(x, to),
                    _ => self.tile::<S, 8>(x, to),
                }
            }
        }
    }

    /// Multiplies `R` rows by the panel.
    ///
    /// # Safety
    /// The same as for [`multiply`](Self::multiply), with `R` rows.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize>(
        self,
        (x, input): (*const f32, usize),
        (y, stride): (*mut f32, usize),
    ) {
        let width = 2 * S::LANES;
        // SAFETY: `x` has `depth` elements in each of `R` rows, and the panel has `depth` times `width`.
        // Whole vectors of products are written where `y` has enough columns, and otherwise to `lanes`, which
        // has room for the largest tile.
        unsafe {
            let mut sums = [[S::splat(0.0); 2]; R];
            let mut column = self.elements;
            for i in 0..self.depth {
                let (low, high) = (S::load(column), S::load(column.add(S::LANES)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat(*x.add(r * input + i));
                    sums[0] = S::mul_add(x, low, sums[0]);
                    sums[1] = S::mul_add(x, high, sums[1]);
                }
                column = column.add(width);
            }
            if self.columns == width {
                for (r, sums) in sums.into_iter().enumerate() {
                    for (half, mut sum) in sums.into_iter().enumerate() {
                        let to = y.add(r * stride + half * S::LANES);
                        if self.add {
                            sum = S::add(S::load(to), sum);
                        }
                        S::store(to, sum);
                    }
                }
                return;
            }
            let mut lanes = [0.0f32; TILE_ROWS * WIDTH];
            for (r, sums) in sums.into_iter().enumerate() {
                let lanes = &mut lanes[r * width..(r + 1) * width];
                S::store(lanes.as_mut_ptr(), sums[0]);
                S::store(lanes[S::LANES..].as_mut_ptr(), sums[1]);
                for (c, sum) in lanes[..self.columns].iter().enumerate() {
                    let to = y.add(r * stride + c);
                    to.write(if self.add { *to + sum } else { *sum });
                }
            }
        }
    }
}
