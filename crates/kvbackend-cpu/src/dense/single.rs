//! The products of a single row, as it is multiplied in decode steps: elements are converted on their way to the sums.

use std::ops::Range;

use half::{bf16, f16};

use super::stored::half_at;
use super::{Matrix, StoredType};
use crate::simd::{Simd, SimdElement};

/// Computes `y[c] = x · matrix[c]` for the rows `columns` of the matrix. Returns false for matrices that have to be decoded
/// first.
///
/// # Safety
/// `y` is valid for writes of the elements `columns`, and nobody else accesses them. The caller is compiled for `S`.
#[inline(always)]
pub(super) unsafe fn columns<S: Simd>(
    x: &[f32],
    matrix: &Matrix<'_>,
    columns: Range<usize>,
    y: *mut f32,
) -> bool {
    assert_eq!(x.len(), matrix.input, "one row");
    let rows = matrix.rows(columns.clone()).as_ptr();
    // SAFETY: `rows` has as many rows as there are columns, `x` has the elements of a row, and by contract `y` has the
    // columns. Rows of floats are aligned where they are read as floats.
    unsafe {
        let (count, y) = (columns.len(), y.add(columns.start));
        match matrix.dtype {
            StoredType::F32 if rows.cast::<f32>().is_aligned() => floats::<S, f32>(x, rows.cast(), count, y),
            StoredType::F16 if rows.cast::<f16>().is_aligned() => floats::<S, f16>(x, rows.cast(), count, y),
            StoredType::BF16 if rows.cast::<bf16>().is_aligned() => {
                floats::<S, bf16>(x, rows.cast(), count, y)
            }
            StoredType::Q8_0 => bytes::<S>(x, rows, matrix.row_bytes, count, y),
            _ => return false,
        }
    }
    true
}

/// Multiplies rows of floats, one after another: memory is read in one stream, and several sums hide how long an addition takes.
///
/// # Safety
/// `w` has `count` rows of `x.len()` elements, and `y` is valid for writes of `count`. The caller is compiled for `S`.
#[inline(always)]
unsafe fn floats<S: Simd, E: SimdElement>(x: &[f32], w: *const E, count: usize, y: *mut f32) {
    let width = x.len();
    let x = x.as_ptr();
    for c in 0..count {
        // SAFETY: `i + 4 * LANES <= width` where four vectors are loaded, `i + LANES <= width` where one is, and `i < width`
        // where one element is, of `x` and of row `c < count`; `y` has `count` elements by contract.
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

/// Bytes and elements of a block of `Q8_0`.
const BLOCK: usize = 34;
const ELEMENTS: usize = 32;

/// Multiplies rows of `Q8_0`. The products of a block are summed before its factor multiplies them.
///
/// # Safety
/// `w` has `count` rows of `row` bytes, whole blocks of `x.len()` elements, and `y` is valid for writes of `count`. The
/// caller is compiled for `S`.
#[inline(always)]
unsafe fn bytes<S: Simd>(x: &[f32], w: *const u8, row: usize, count: usize, y: *mut f32) {
    let blocks = x.len() / ELEMENTS;
    let x = x.as_ptr();
    for c in 0..count {
        // SAFETY: `b < blocks` and `i + LANES <= ELEMENTS`, for which `x` and row `c < count` have elements by contract, as
        // `y` has `count`.
        unsafe {
            let w = w.add(c * row);
            let mut sums = [S::splat(0.0); 2];
            for b in 0..blocks {
                let block = w.add(b * BLOCK);
                let (x, q) = (x.add(b * ELEMENTS), block.add(2).cast::<i8>());
                let mut products = S::mul(S::load(x), S::load_i8(q));
                for i in (S::LANES..ELEMENTS).step_by(S::LANES) {
                    products = S::mul_add(S::load(x.add(i)), S::load_i8(q.add(i)), products);
                }
                let d = half_at(&block.cast::<[u8; 2]>().read(), 0);
                sums[b % 2] = S::mul_add(products, S::splat(d), sums[b % 2]);
            }
            *y.add(c) = S::sum(S::add(sums[0], sums[1]));
        }
    }
}
