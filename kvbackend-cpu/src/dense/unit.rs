//! Products of many rows and a matrix on the matrix unit (AMX). They are as exact as in f32, because each
//! element of both operands is split into a sum of bf16 numbers.
//!
//! The rows of `x` are written to tile columns, once for the whole matrix. The matrix rows are written to
//! tile rows, 32 at a time, and stay in the second-level cache while all rows of `x` are multiplied by them.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_castsi512_ps, _mm512_fpclass_ps_mask, _mm512_loadu_ps,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_storeu_si512,
};
use std::cell::RefCell;
use std::ops::Range;

use super::{Matrix, StoredType, in_parts, stored, tile};
use crate::raw::Destination;
use crate::simd::amx::squares::{SQUARES, Square, split, two_by_two};
use crate::simd::amx::{AmxTiles, PARTS, ROW, ROWS, TILE_BYTES};
use crate::simd::avx512::Avx512;
use crate::simd::{Simd, SimdLevel};
use crate::workers::Workers;

// Decision: docs/decisions/backend-cpu.md#the-matrix-unit-multiplies-many-rows-in-bf16-parts
/// Minimum number of rows for which the matrix unit is faster than vectors, for one, two and three bf16 parts
/// per matrix element.
const LEAST: [usize; PARTS] = [16, 20, 24];
/// Number of elements per row of a bf16 tile.
const PAIRS: usize = 2 * ROWS;
/// Number of matrix rows to process at a time.
const COLUMNS: usize = 2 * ROWS;
/// Maximum number of elements of a row to process at a time. Longer sums lose precision.
const DEPTH: usize = 1024;
/// A multiple of every stored type's number of elements per block.
const BLOCK: usize = 256;
/// Approximate size of the parts of `x` to process at a time, in bytes. They fit in the second-level cache
/// together with the parts of the matrix.
const BYTES: usize = 1280 << 10;

thread_local! {
    /// The rows of `x`, split into bf16 parts. All threads of a call read the calling thread's buffer.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// This thread's buffer for matrix rows and sums.
    static MEMORY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Grows a vector if needed, and returns `bytes` bytes of it, aligned to a cache line.
fn lines(memory: &mut Vec<f32>, bytes: usize) -> &mut [u8] {
    let len = (bytes + ROW).div_ceil(size_of::<f32>());
    if memory.len() < len {
        memory.resize(len, 0.0);
    }
    let memory = bytemuck::cast_slice_mut::<f32, u8>(memory);
    let start = memory.as_ptr().align_offset(ROW);
    &mut memory[start..start + bytes]
}

/// Returns the number of bf16 parts needed to represent any element of a type exactly.
fn parts(dtype: StoredType) -> usize {
    match dtype {
        StoredType::BF16 => 1,
        // f16 has 11 significant bits. Elements of the other two types are an 11-bit factor times a code of
        // at most 4 bits.
        StoredType::F16 | StoredType::Q4_0 | StoredType::Q5_0 => 2,
        _ => PARTS,
    }
}

/// Returns whether a level has a matrix unit, and so many rows are worth using it.
pub(super) fn is_worthwhile(level: SimdLevel, rows: usize, dtype: StoredType) -> bool {
    level >= SimdLevel::Amx && rows >= LEAST[parts(dtype) - 1]
}

/// Computes `y = x · matrixᵀ` on the given number of threads. Does nothing and returns false if there is no
/// matrix unit at this level, or if there are too few rows.
///
/// Both `x` and `y` must have `rows` rows.
pub(super) fn multiply(
    level: SimdLevel,
    (workers, threads): (&Workers, usize),
    (x, rows): (&[f32], usize),
    matrix: &Matrix<'_>,
    y: Destination<'_>,
) -> bool {
    if !is_worthwhile(level, rows, matrix.dtype) {
        return false;
    }
    let input = matrix.input;
    assert!(x.len() == rows * input, "whole rows");
    // The elements of the rows, and the rows themselves, are split into runs of about equal length.
    let depths = input.div_ceil(DEPTH);
    let depth = |i: usize| (input * i / depths).next_multiple_of(BLOCK).min(input);
    let most = (0..depths).map(|i| depth(i + 1) - depth(i)).max().unwrap_or(0);
    let tile_bytes = most.div_ceil(PAIRS) * PARTS * TILE_BYTES;
    let tiles = rows.div_ceil(ROWS);
    let runs = tiles.div_ceil((BYTES / tile_bytes).next_multiple_of(2));
    let row = |i: usize| ((tiles * i / runs).next_multiple_of(2) * ROWS).min(rows);
    PACKED.with_borrow_mut(|packed| {
        let packed = Destination::new(lines(packed, tile_bytes * (tiles.div_ceil(runs) + 1)));
        for rows in (0..runs).map(|run| row(run)..row(run + 1)) {
            for depth in (0..depths).map(|i| depth(i)..depth(i + 1)) {
                let pass = UnitPass { x, matrix, rows: rows.clone(), depth, packed, y };
                let tiles = rows.len().div_ceil(ROWS);
                let parts = if threads > 1 { tiles } else { 1 };
                workers.run(parts, &|part| {
                    for tile in tiles * part / parts..tiles * (part + 1) / parts {
                        // SAFETY: the level guarantees that the processor has AMX, and therefore AVX-512. The
                        // tile's rows are rows of `x`, `packed` has room for them, and no other part writes
                        // them.
                        unsafe { pass.put_rows(tile) };
                    }
                });
                in_parts((workers, threads), matrix.out, COLUMNS, &|columns| {
                    // SAFETY: levels starting at `Amx` have AMX and AVX-512. All tiles of the pass have been
                    // written, no code writes them now, and no other part has these columns of `y`.
                    MEMORY.with_borrow_mut(|memory| unsafe { pass.multiply(columns, memory) });
                });
            }
        }
    });
    true
}

/// One pass: multiplies a range of elements in some rows of `x` by the same elements of all matrix rows.
///
/// `packed` must have room for the rows' tiles. `y` must have rows of `matrix.out` f32 elements and include
/// `rows`.
struct UnitPass<'a> {
    x: &'a [f32],
    matrix: &'a Matrix<'a>,
    rows: Range<usize>,
    depth: Range<usize>,
    packed: Destination<'a>,
    y: Destination<'a>,
}

impl UnitPass<'_> {
    /// Returns the number of steps of 32 elements.
    fn steps(&self) -> usize {
        self.depth.len().div_ceil(PAIRS)
    }

    /// Returns a pointer to the bf16 parts of tile `tile` of `x`'s rows.
    fn tile(&self, tile: usize) -> *mut u8 {
        let bytes = self.steps() * PARTS * TILE_BYTES;
        self.packed.at(tile * bytes, bytes)
    }

    /// Writes the rows of a tile to `packed` as columns, with zeros for missing rows.
    ///
    /// # Safety
    /// The processor must support AVX-512. `rows` and `depth` must be inside `x`, and no other code may
    /// access the tile.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn put_rows(&self, tile: usize) {
        let first = self.rows.start + tile * ROWS;
        let count = ROWS.min(self.rows.end - first);
        let mut to = self.tile(tile);
        for step in 0..self.steps() {
            // SAFETY: `first + j` is one of the rows, `halves` reads only its elements in `depth`, and `to`
            // moves through the `steps() * PARTS` tiles.
            unsafe {
                let mut squares = [[_mm512_setzero_ps(); ROWS]; PARTS];
                for j in 0..count {
                    let row = self.x.as_ptr().add((first + j) * self.matrix.input + self.depth.start);
                    let halves = halves::<PARTS>(row, self.depth.len(), step);
                    for (square, half) in squares.iter_mut().zip(halves) {
                        square[j] = _mm512_castsi512_ps(half);
                    }
                }
                for square in &mut squares {
                    Avx512::transpose(square);
                    for (row, vector) in square.iter().enumerate() {
                        _mm512_storeu_ps(to.add(row * ROW).cast(), *vector);
                    }
                    to = to.add(TILE_BYTES);
                }
            }
        }
    }

    /// Computes a range of columns of `y`, or adds to them if this is not the first range of elements.
    ///
    /// # Safety
    /// The processor must support AMX with bf16, and this thread must not hold [`AmxTiles`]. `put_rows` must
    /// have written all tiles, no code may write them now, and no other code may access these columns of `y`.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn multiply(&self, columns: Range<usize>, memory: &mut Vec<f32>) {
        let (steps, parts) = (self.steps(), parts(self.matrix.dtype));
        let tile_bytes = steps * parts * TILE_BYTES;
        let (sums_bytes, decoded_bytes) = (SQUARES * TILE_BYTES, self.depth.len() * size_of::<f32>());
        let memory = lines(memory, sums_bytes + 2 * tile_bytes + decoded_bytes);
        let (sums, memory) = memory.split_at_mut(sums_bytes);
        let (weights, decoded) = memory.split_at_mut(2 * tile_bytes);
        let (sums, weights) = (sums.as_mut_ptr().cast::<f32>(), weights.as_mut_ptr());
        let decoded = bytemuck::cast_slice_mut(decoded);
        let row_tiles = self.rows.len().div_ceil(ROWS);
        // SAFETY: AMX is available, and this thread holds no other tiles, by contract. `weights` has two
        // tiles in `parts` parts for each step, `packed` has `row_tiles` tiles, and `sums` has room for
        // `SQUARES` tiles. The columns and rows to store belong to `y` in this part and this pass.
        unsafe {
            let tiles = AmxTiles::new();
            for from in columns.clone().step_by(COLUMNS) {
                let taken = from..(from + COLUMNS).min(columns.end);
                match parts {
                    1 => self.put_brains(taken.clone(), weights),
                    2 => self.put_columns::<2>(taken.clone(), weights, decoded),
                    _ => self.put_columns::<PARTS>(taken.clone(), weights, decoded),
                }
                // If there is no second tile, the first tile is multiplied twice, and the second sums are not
                // read.
                let second = if taken.len() > ROWS { tile_bytes } else { 0 };
                let rows = [weights.cast_const(), weights.add(second).cast_const()];
                for i in (0..row_tiles).step_by(2) {
                    let columns =
                        [self.tile(i).cast_const(), self.tile((i + 1).min(row_tiles - 1)).cast_const()];
                    two_by_two(&tiles, Square { rows, columns, parts }, steps, sums);
                    for j in 0..2.min(row_tiles - i) {
                        for (k, from) in taken.clone().step_by(ROWS).enumerate() {
                            let sums = sums.add((2 * k + j) * ROWS * ROWS);
                            self.store(sums, i + j, from..(from + ROWS).min(taken.end));
                        }
                    }
                }
            }
        }
    }

    /// Writes matrix rows `columns` to tiles in `N` parts, with zeros for missing elements. There may be at
    /// most [`COLUMNS`] rows.
    ///
    /// # Safety
    /// `to` must be valid for writes of two tiles in `N` parts for each step, and `decoded` must have room
    /// for the elements in `depth`. The caller must be compiled for AVX-512.
    #[inline(always)]
    unsafe fn put_columns<const N: usize>(&self, columns: Range<usize>, to: *mut u8, decoded: &mut [f32]) {
        let (dtype, steps) = (self.matrix.dtype, self.steps());
        for (i, column) in columns.enumerate() {
            let bytes = self.matrix.elements(column, &self.depth);
            // SAFETY: `bytes` holds `depth` elements, and `decoded` holds them as f32 if they are not f32
            // already. `i` is one of the rows of two tiles.
            unsafe {
                let row = if dtype == StoredType::F32 {
                    bytes.as_ptr().cast::<f32>()
                } else {
                    stored::decode::<Avx512>(dtype, bytes, decoded);
                    decoded.as_ptr()
                };
                let to = to.add(i / ROWS * steps * N * TILE_BYTES + i % ROWS * ROW);
                for step in 0..steps {
                    for (part, half) in halves::<N>(row, self.depth.len(), step).into_iter().enumerate() {
                        _mm512_storeu_si512(to.add((step * N + part) * TILE_BYTES).cast::<__m512i>(), half);
                    }
                }
            }
        }
    }

    /// Writes rows of a bf16 matrix to tiles without splitting them; otherwise like
    /// [`put_columns`](Self::put_columns).
    ///
    /// # Safety
    /// The same as for `put_columns` with one part. The elements must be bf16.
    #[inline(always)]
    unsafe fn put_brains(&self, columns: Range<usize>, to: *mut u8) {
        for (i, column) in columns.enumerate() {
            let row = self.matrix.elements(column, &self.depth).as_ptr().cast::<i16>();
            // SAFETY: the mask loads only elements in `depth`, and `i` is one of the rows of two tiles.
            unsafe {
                let to = to.add(i / ROWS * self.steps() * TILE_BYTES + i % ROWS * ROW);
                for step in 0..self.steps() {
                    let lanes = first_lanes(self.depth.len() - step * PAIRS);
                    let half = _mm512_maskz_loadu_epi16(lanes, row.wrapping_add(step * PAIRS));
                    _mm512_storeu_si512(to.add(step * TILE_BYTES).cast::<__m512i>(), half);
                }
            }
        }
    }

    /// Stores a tile of sums in `y`. The tile's rows are `columns` of `y`, of which there may be at most 16,
    /// and its columns are the rows of tile `tile` of `x`. Sums that are not finite are recomputed in f32.
    ///
    /// # Safety
    /// `sums` must be an f32 tile. The rows must be rows of this pass, and no other code may access these
    /// columns of `y`. The caller must be compiled for AVX-512.
    #[inline(always)]
    unsafe fn store(&self, sums: *const f32, tile: usize, columns: Range<usize>) {
        let (out, lanes) = (self.matrix.out, first_lanes(columns.len()) as u16);
        let first = self.rows.start + tile * ROWS;
        let count = ROWS.min(self.rows.end - first);
        let y = self.y.at(first * out * size_of::<f32>(), count * out * size_of::<f32>()).cast::<f32>();
        // SAFETY: `sums` has `ROWS` rows, and row `j < count` of `y` has the columns selected by `lanes`.
        unsafe {
            let y = y.add(columns.start);
            let mut square = [_mm512_setzero_ps(); ROWS];
            for (row, vector) in square.iter_mut().enumerate() {
                *vector = _mm512_loadu_ps(sums.add(row * ROWS));
            }
            Avx512::transpose(&mut square);
            let (mut not_finite, mut any) = ([0; ROWS], 0);
            for (j, vector) in square[..count].iter().enumerate() {
                let y = y.add(j * out);
                let mut sum = *vector;
                if self.depth.start > 0 {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, y), sum);
                }
                _mm512_mask_storeu_ps(y, lanes, sum);
                // The mask selects quiet and signalling NaN, and both infinities.
                not_finite[j] = _mm512_fpclass_ps_mask::<0b1001_1001>(sum) & lanes;
                any |= not_finite[j];
            }
            if any != 0 && self.depth.end == self.matrix.input {
                self.once_more(&not_finite[..count], first, columns.start);
            }
        }
    }

    /// Recomputes the selected results without splitting operands into bf16 parts, because infinity times a
    /// part of 0 gives NaN. Bit `j` of `masks[i]` selects column `from + j` of row `first + i`.
    ///
    /// # Safety
    /// The same as for [`store`](Self::store), with the same tile. The processor must support AVX-512.
    #[cold]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn once_more(&self, masks: &[u16], first: usize, from: usize) {
        let (out, input) = (self.matrix.out, self.matrix.input);
        let mut decoded = Vec::new();
        for i in (0..ROWS).filter(|i| masks.iter().any(|mask| (mask >> i) & 1 == 1)) {
            let column = from + i;
            // SAFETY: the caller is compiled for AVX-512, and `column` in a row of the tile is one of this
            // part's products.
            unsafe {
                let w = self.matrix.in_f32::<Avx512>(column..column + 1, &mut decoded);
                for row in (0..masks.len()).filter(|row| (masks[*row] >> i) & 1 == 1).map(|row| first + row) {
                    let y = self.y.at((row * out + column) * size_of::<f32>(), size_of::<f32>()).cast();
                    tile::columns::<Avx512>((&self.x[row * input..][..input], 1, input), w, (y, out), false);
                }
            }
        }
    }
}

/// Returns a mask of the first `n` lanes, or of all lanes if `n` exceeds their number.
#[inline(always)]
fn first_lanes(n: usize) -> u32 {
    ((1u64 << n.min(PAIRS)) - 1) as u32
}

/// Returns the elements of one step of a row, split into `N` parts, with zeros past the end of the row. The
/// row has `depth` elements.
///
/// # Safety
/// The row must be valid for reads, and have the step's first element. The caller must be compiled for
/// AVX-512.
#[inline(always)]
unsafe fn halves<const N: usize>(row: *const f32, depth: usize, step: usize) -> [__m512i; N] {
    let at = step * PAIRS;
    // SAFETY: whole vectors are loaded if the row has them; otherwise masks limit the loads to its elements.
    unsafe {
        let row = row.add(at);
        let (a, b): (__m512, __m512) = if at + PAIRS <= depth {
            (_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(ROWS)))
        } else {
            let lanes = first_lanes(depth - at);
            let upper = _mm512_maskz_loadu_ps((lanes >> ROWS) as u16, row.wrapping_add(ROWS));
            (_mm512_maskz_loadu_ps(lanes as u16, row), upper)
        };
        split::<N>(a, b)
    }
}
