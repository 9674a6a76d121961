//! Products of a matrix in blocks and rows that are rounded to eight bits.
//!
//! Each block of 32 row elements becomes a step and 32 signed bytes: the step is the largest magnitude
//! divided by 127, and each byte is its element divided by the step, rounded to nearest. (ggml multiplies in
//! the same way, with an f16 step for `Q8_0`.) Nothing else is rounded but sums: the bytes are multiplied by the
//! matrix's codes in integers, and each group's sum by the group's factors.
//!
//! With the instructions of `AVX512_VNNI`, integers are multiplied four at a time in each lane. Without them, and for
//! very few rows, the rounded rows are multiplied in f32, as exactly as other rows.

#[cfg(target_arch = "x86_64")]
use std::cell::RefCell;

use super::{Matrix, Products};
use crate::raw::Destination;
use crate::simd::{Simd, SimdLevel, SimdTask};

#[cfg(target_arch = "x86_64")]
mod rounded;
#[cfg(target_arch = "x86_64")]
mod vnni;

#[cfg(target_arch = "x86_64")]
use rounded::RoundedRows;

/// Number of row elements that share a step.
const BLOCK: usize = 32;

/// The number of f32 elements that a thread rounds in the time that it takes to wake another thread.
#[cfg(target_arch = "x86_64")]
const ELEMENTS_PER_THREAD: usize = 32 << 10;

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// The rounded rows. All threads of a call read the calling thread's buffer.
    static ROUNDED: RefCell<RoundedRows> = const { RefCell::new(RoundedRows::new()) };
}

/// Returns whether a level may use eight-bit dot products, and the processor has them.
pub(super) fn has_dot_products(level: SimdLevel) -> bool {
    #[cfg(target_arch = "x86_64")]
    return level >= SimdLevel::Avx512 && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = level;
        false
    }
}

/// Computes `y = x̂ · matrixᵀ`, where `x̂` are the rows of `x` rounded to eight bits. The matrix must be stored in
/// blocks, `x` and `y` must have `rows` rows, and there must be at least one row and one matrix row.
pub(super) fn multiply(
    products: &Products,
    (x, rows): (&[f32], usize),
    matrix: &Matrix<'_>,
    y: Destination<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if vnni::is_worthwhile(products.level.level(), rows, matrix.dtype) {
        // SAFETY: the processor supports AVX-512 and `AVX512_VNNI`. `y` has `rows` rows by contract.
        ROUNDED.with_borrow_mut(|rounded| unsafe {
            rounded.round(products, (x, rows), matrix);
            vnni::multiply(products, rounded, matrix, y);
        });
        return;
    }
    // SAFETY: the task has no safety conditions.
    products.exact_of_rounded((x, rows), matrix, y, |x| unsafe { products.level.run(RoundInPlace(x)) });
}

/// A task that replaces the elements of rows by the nearest multiples of their block's step.
struct RoundInPlace<'a>(&'a mut [f32]);

impl SimdTask for RoundInPlace<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for block in self.0.as_chunks_mut::<BLOCK>().0 {
            // SAFETY: the caller is compiled for `S`, and vectors stay inside the block, since `LANES` divides 32.
            unsafe {
                let (step, inverse) = step_of::<S>(block);
                for i in (0..BLOCK).step_by(S::LANES) {
                    let at = block.as_mut_ptr().add(i);
                    let code = S::round(S::mul(S::load(at), S::splat(inverse)));
                    S::store(at, S::mul(code, S::splat(step)));
                }
            }
        }
    }
}

/// Returns a block's step and the step's inverse, or zeros for a block of zeros. The step is NaN if an element is NaN
/// or infinite, so that no product with the block is a number.
///
/// # Safety
/// The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn step_of<S: Simd>(block: &[f32; BLOCK]) -> (f32, f32) {
    // SAFETY: the caller is compiled for `S`, and vectors stay inside the block, since `LANES` divides 32.
    unsafe {
        let (zero, mut most, mut faults) = (S::splat(0.0), S::splat(0.0), S::splat(0.0));
        for i in (0..BLOCK).step_by(S::LANES) {
            let x = S::load(block.as_ptr().add(i));
            most = S::max(most, S::max(x, S::sub(zero, x)));
            faults = S::mul_add(x, zero, faults);
        }
        // Zero, unless an element is NaN or infinite.
        let fault = S::sum(faults);
        let step = S::largest(most) / 127.0;
        // A step that is too small to have an inverse rounds its elements to zero.
        let inverse = if step < f32::MIN_POSITIVE { 0.0 } else { 1.0 / step };
        (step + fault, inverse)
    }
}
