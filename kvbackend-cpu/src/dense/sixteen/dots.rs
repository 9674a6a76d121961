//! Dot products of rounded rows and the rows of a bf16 matrix, as they are stored.
//!
//! Six rows times four matrix rows are summed in registers. Rows are processed in runs whose elements stay in the second-level
//! cache while all matrix rows are read once.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_reduce_add_ps, _mm512_setzero_ps,
};
use std::ops::Range;

use super::rounded::{LANES, RoundedRows};
use crate::dense::Matrix;
use crate::raw::Destination;
use crate::simd::Simd;
use crate::simd::avx512::Avx512;

/// Maximum number of rows per tile. With four columns, their sums take 24 of 32 registers.
const TILE: usize = 6;
/// Number of columns per tile.
const COLUMNS: usize = 4;
/// Each thread's columns begin at a multiple of this number.
pub(super) const UNIT: usize = 4 * COLUMNS;
/// Maximum number of elements per sum. A tile's elements stay in the first-level cache.
const DEPTH: usize = 1536;
/// Approximate number of elements in a run of rows.
const ELEMENTS: usize = 256 << 10;
/// Distance at which matrix rows are prefetched, in bytes.
const AHEAD: usize = 1024;

/// Computes a range of columns of `y`.
///
/// # Safety
/// The processor must support AVX-512 F, BW, DQ and VL, and `AVX512_BF16`. The matrix must be stored in bf16 and have as
/// many elements per row as the rounded rows. `y` must have a row of `matrix.out` f32 elements for each rounded row, and no
/// other code may access these columns.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn columns(
    rows: &RoundedRows,
    matrix: &Matrix<'_>,
    columns: Range<usize>,
    y: Destination<'_>,
) {
    let (count, input, out) = (rows.rows(), matrix.input, matrix.out);
    let y = y.at(0, 4 * count * out).cast::<f32>();
    let runs = (count * input).div_ceil(ELEMENTS).min(count.div_ceil(TILE));
    // The parts of rows have about equal lengths.
    let depth = input.div_ceil(input.div_ceil(DEPTH)).next_multiple_of(LANES);
    for run in (0..runs).map(|run| count * run / runs..count * (run + 1) / runs) {
        let tiles = run.len().div_ceil(TILE);
        for from in columns.clone().step_by(COLUMNS) {
            let taken = COLUMNS.min(columns.end - from);
            let w = matrix.rows(from..from + taken).as_ptr().cast::<u16>();
            for start in (0..input).step_by(depth) {
                let part = start..(start + depth).min(input);
                for tile in 0..tiles {
                    let at = |tile: usize| run.start + run.len() * tile / tiles;
                    let of = DotTile { rows, first: at(tile), w, input, part: part.clone() };
                    // SAFETY: this function is compiled for the instructions. The rows are rounded rows, the matrix has
                    // `taken` rows from `w` on, and `y` has the products.
                    unsafe {
                        let y = y.add(at(tile) * out + from);
                        match at(tile + 1) - at(tile) {
                            1 => of.store::<1>(taken, y, out),
                            2 => of.store::<2>(taken, y, out),
                            3 => of.store::<3>(taken, y, out),
                            4 => of.store::<4>(taken, y, out),
                            5 => of.store::<5>(taken, y, out),
                            _ => of.store::<6>(taken, y, out),
                        }
                    }
                }
            }
        }
    }
}

/// A part of a few rounded rows, and of the matrix rows that begin at `w`, which need not be aligned.
#[derive(Clone)]
struct DotTile<'a> {
    rows: &'a RoundedRows,
    first: usize,
    w: *const u16,
    input: usize,
    /// The elements to multiply, starting with a whole vector.
    part: Range<usize>,
}

impl DotTile<'_> {
    /// Writes the products of `R` rows and `columns` matrix rows, at most [`COLUMNS`], to `y`, whose rows begin `out`
    /// elements apart. If the part is not the first one, adds them to the contents of `y`.
    ///
    /// # Safety
    /// There must be so many rows, and `y` must be valid for their products. The caller must be compiled for AVX-512 with
    /// `AVX512_BF16`.
    #[inline(always)]
    unsafe fn store<const R: usize>(self, columns: usize, y: *mut f32, out: usize) {
        let add = self.part.start > 0;
        // SAFETY: as by contract.
        unsafe {
            if columns == COLUMNS {
                for (r, [a, b, c, d]) in self.sums::<R, COLUMNS>().into_iter().enumerate() {
                    let mut four = Avx512::sum_four(a, b, c, d);
                    let to = y.add(r * out).cast::<[f32; COLUMNS]>();
                    if add {
                        let before = to.read_unaligned();
                        four = std::array::from_fn(|j| before[j] + four[j]);
                    }
                    to.write_unaligned(four);
                }
                return;
            }
            for column in 0..columns {
                let one = Self { w: self.w.wrapping_add(column * self.input), ..self.clone() };
                for (r, [sum]) in one.sums::<R, 1>().into_iter().enumerate() {
                    let (to, sum) = (y.add(r * out + column), _mm512_reduce_add_ps(sum));
                    to.write(if add { *to + sum } else { sum });
                }
            }
        }
    }

    /// Returns the products of `R` rows and `C` matrix rows, each as a vector whose lanes add up to the product.
    ///
    /// # Safety
    /// The same as for [`store`](Self::store), with `C` matrix rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn sums<const R: usize, const C: usize>(&self) -> [[__m512; C]; R] {
        let x: [_; R] = std::array::from_fn(|r| self.rows.row(self.first + r).as_ptr());
        let w: [_; C] = std::array::from_fn(|c| self.w.wrapping_add(c * self.input));
        let mut sums = [[_mm512_setzero_ps(); C]; R];
        let (mut i, end) = (self.part.start, self.part.end);
        // SAFETY: whole vectors are loaded while the matrix rows have them. At their end, a mask limits the loads to their
        // elements. The rounded rows have zeros there.
        unsafe {
            while i + LANES <= end {
                let of_x: [__m512bh; R] = x.map(|x| vector(x.add(i)));
                for (c, w) in w.into_iter().enumerate() {
                    Avx512::prefetch(w.wrapping_add(i).cast::<u8>().wrapping_add(AHEAD));
                    let of_w = vector(w.add(i));
                    for (sums, of_x) in sums.iter_mut().zip(of_x) {
                        sums[c] = _mm512_dpbf16_ps(sums[c], of_x, of_w);
                    }
                }
                i += LANES;
            }
            if i < end {
                let lanes = (1u32 << (end - i)) - 1;
                for (c, w) in w.into_iter().enumerate() {
                    let of_w = of_words(_mm512_maskz_loadu_epi16(lanes, w.add(i).cast()));
                    for (sums, x) in sums.iter_mut().zip(x) {
                        sums[c] = _mm512_dpbf16_ps(sums[c], vector(x.add(i)), of_w);
                    }
                }
            }
        }
        sums
    }
}

/// Loads 32 bf16 numbers.
///
/// # Safety
/// `from` must be valid for reads of them, and the caller must be compiled for AVX-512.
#[inline(always)]
unsafe fn vector(from: *const u16) -> __m512bh {
    // SAFETY: as by contract.
    of_words(unsafe { _mm512_loadu_si512(from.cast()) })
}

/// Returns the same bits as bf16 numbers.
#[inline(always)]
fn of_words(bits: __m512i) -> __m512bh {
    // SAFETY: both types are vectors of 512 bits, all of which are valid.
    unsafe { std::mem::transmute(bits) }
}
