//! Products of a single row and a matrix, as in decode steps. Matrix elements are converted just before they
//! are multiplied.

use std::ops::Range;

use half::{bf16, f16};

use super::stored::{self, BlockFactors, Sink};
use super::{Matrix, StoredType};
use crate::simd::{Simd, SimdElement};

/// Multiplies matrix rows stored as blocks of `$bytes` bytes and `$elements` elements.
macro_rules! blocks {
    ($read:ident, $bytes:literal, $elements:literal, $x:expr, $sums:expr, $rows:expr, $count:expr, $y:expr) => {{
        let blocks = $x.len() / $elements;
        for c in 0..$count {
            let row = $rows.add(c * blocks * $bytes);
            let mut dot = Dot::<S> { x: $x.as_ptr(), of_x: $sums, sums: [S::splat(0.0); 2] };
            for b in 0..blocks {
                stored::$read::<S, Dot<S>>(&*row.add(b * $bytes).cast(), &mut dot);
                dot.x = dot.x.add($elements);
                dot.of_x = dot.of_x.wrapping_add($elements / 16 * S::LANES);
            }
            *$y.add(c) = S::sum(S::add(dot.sums[0], dot.sums[1]));
        }
    }};
}

/// Computes the dot product of a matrix row and `x`, which must have the same length. A group's products are
/// summed first and then multiplied by the group's factor. The group's minimum is multiplied by the sum of
/// the corresponding elements of `x`.
struct Dot<S: Simd> {
    x: *const f32,
    /// If the matrix has minima, points to one vector for every 16 elements of `x`. The sum of the vector's
    /// lanes equals the sum of these elements.
    of_x: *const f32,
    sums: [S::V; 2],
}

impl<S: Simd> Sink<S> for Dot<S> {
    #[inline(always)]
    unsafe fn take(&mut self, group: BlockFactors<S::V>, i: usize, q: S::V, sum: S::V) -> S::V {
        // SAFETY: `x` has the block's elements, by contract.
        unsafe { S::mul_add(S::load(self.x.add(group.at + i)), q, sum) }
    }

    #[inline(always)]
    unsafe fn end(&mut self, group: BlockFactors<S::V>, elements: usize, sum: S::V) {
        // SAFETY: `of_x` has a vector for every 16 elements of a block with minima, and a group's length is a
        // multiple of 16.
        unsafe {
            self.sums[0] = S::mul_add(sum, group.factor, self.sums[0]);
            if let Some(minimum) = group.minimum {
                let mut of_x = S::load(self.of_x.add(group.at / 16 * S::LANES));
                for i in (16..elements).step_by(16) {
                    of_x = S::add(of_x, S::load(self.of_x.add((group.at + i) / 16 * S::LANES)));
                }
                self.sums[1] = S::mul_add(of_x, minimum, self.sums[1]);
            }
        }
    }
}

/// Returns a pointer to one vector for every 16 elements of `x`; the sum of a vector's lanes equals the sum
/// of its 16 elements. The vectors are in `x` itself or in `sums`, which is overwritten. They are valid until
/// `x` or `sums` changes.
///
/// # Safety
/// The caller must be compiled for `S`. The length of `x` must be a multiple of 16.
#[inline(always)]
unsafe fn sums_of<S: Simd>(x: &[f32], sums: &mut Vec<f32>) -> *const f32 {
    if S::LANES == 16 {
        return x.as_ptr();
    }
    let len = x.len() / 16 * S::LANES;
    if sums.len() < len {
        sums.resize(len, 0.0);
    }
    for group in 0..x.len() / 16 {
        // SAFETY: `x` has the group's 16 elements, `LANES` divides 16, and `sums` has room for the group's
        // vector.
        unsafe {
            let x = x.as_ptr().add(16 * group);
            let mut sum = S::load(x);
            for i in (S::LANES..16).step_by(S::LANES) {
                sum = S::add(sum, S::load(x.add(i)));
            }
            S::store(sums.as_mut_ptr().add(group * S::LANES), sum);
        }
    }
    sums.as_ptr()
}

/// Computes `y[c] = x · matrix[c]` for matrix rows `columns`. Returns false without computing anything if the
/// matrix stores floats that are not aligned. Overwrites `scratch`.
///
/// # Safety
/// `y` must be valid for writes of the elements `columns`, and no other code may access them. The caller must
/// be compiled for `S`.
#[inline(always)]
pub(super) unsafe fn columns<S: Simd>(
    x: &[f32],
    matrix: &Matrix<'_>,
    columns: Range<usize>,
    y: *mut f32,
    scratch: &mut Vec<f32>,
) -> bool {
    assert_eq!(x.len(), matrix.input, "one row");
    let rows = matrix.rows(columns.clone()).as_ptr();
    // SAFETY: `rows` has as many rows as there are columns, `x` has the elements of a row, and by contract
    // `y` has the columns. Rows of floats are aligned where they are read as floats.
    unsafe {
        let (count, y) = (columns.len(), y.add(columns.start));
        let sums = if matrix.dtype.has_minima() { sums_of::<S>(x, scratch) } else { std::ptr::null() };
        match matrix.dtype {
            StoredType::F32 if rows.cast::<f32>().is_aligned() => floats::<S, f32>(x, rows.cast(), count, y),
            StoredType::F16 if rows.cast::<f16>().is_aligned() => floats::<S, f16>(x, rows.cast(), count, y),
            StoredType::BF16 if rows.cast::<bf16>().is_aligned() => {
                floats::<S, bf16>(x, rows.cast(), count, y);
            }
            StoredType::Q8_0 => blocks!(q8_0, 34, 32, x, sums, rows, count, y),
            StoredType::Q4_0 => blocks!(q4_0, 18, 32, x, sums, rows, count, y),
            StoredType::Iq4Nl => blocks!(iq4_nl, 18, 32, x, sums, rows, count, y),
            StoredType::Q4_1 => blocks!(q4_1, 20, 32, x, sums, rows, count, y),
            StoredType::Q5_0 => blocks!(q5_0, 22, 32, x, sums, rows, count, y),
            StoredType::Q5_1 => blocks!(q5_1, 24, 32, x, sums, rows, count, y),
            StoredType::Q2K => blocks!(q2_k, 84, 256, x, sums, rows, count, y),
            StoredType::Q3K => blocks!(q3_k, 110, 256, x, sums, rows, count, y),
            StoredType::Q4K => blocks!(q4_k, 144, 256, x, sums, rows, count, y),
            StoredType::Q5K => blocks!(q5_k, 176, 256, x, sums, rows, count, y),
            StoredType::Q6K => blocks!(q6_k, 210, 256, x, sums, rows, count, y),
            _ => return false,
        }
    }
    true
}

/// Multiplies rows of floats one after another, so that memory is read sequentially. Several independent sums
/// hide the latency of the additions.
///
/// # Safety
/// `w` must have `count` rows of `x.len()` elements, and `y` must be valid for writes of `count` elements.
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn floats<S: Simd, E: SimdElement>(x: &[f32], w: *const E, count: usize, y: *mut f32) {
    let width = x.len();
    let x = x.as_ptr();
    for c in 0..count {
        // SAFETY: `i + 4 * LANES <= width` where four vectors are loaded, `i + LANES <= width` where one
        // vector is loaded, and `i < width` where a single element is loaded, both in `x` and in row `c <
        // count`; `y` has `count` elements by contract.
        unsafe {
            let w = w.add(c * width);
            let mut four = [S::splat(0.0); 4];
            let mut i = 0;
            while i + 4 * S::LANES <= width {
                for (j, sum) in four.iter_mut().enumerate() {
                    let at = i + j * S::LANES;
                    *sum = S::mul_add(S::load(x.add(at)), E::load::<S>(w.add(at)), *sum);
                }
                i += 4 * S::LANES;
            }
            while i + S::LANES <= width {
                four[0] = S::mul_add(S::load(x.add(i)), E::load::<S>(w.add(i)), four[0]);
                i += S::LANES;
            }
            let mut sum = S::sum(S::add(S::add(four[0], four[1]), S::add(four[2], four[3])));
            for i in i..width {
                sum += *x.add(i) * w.add(i).read().to_f32();
            }
            *y.add(c) = sum;
        }
    }
}
