//! Products of a bf16 matrix and rows that are rounded to bf16.
//!
//! Each element of a row is rounded to the nearest bf16 number, ties to even, as a model in bf16 does in other programs.
//! Products are summed in f32.
//!
//! One instruction of `AVX512_BF16` adds two products to each of 16 sums, and treats denormals as zero. Without it, and for
//! a single row, the rounded rows are multiplied in f32, or by the matrix unit.

#[cfg(target_arch = "x86_64")]
use std::cell::RefCell;

#[cfg(target_arch = "x86_64")]
use super::StoredType;
use super::{Matrix, Products};
use crate::raw::Destination;
use crate::simd::{Simd, SimdLevel, SimdTask};

#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(target_arch = "x86_64")]
mod rounded;

#[cfg(target_arch = "x86_64")]
use rounded::RoundedRows;

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// The rounded rows. All threads of a call read the calling thread's buffer.
    static ROUNDED: RefCell<RoundedRows> = const { RefCell::new(RoundedRows::new()) };
}

/// Returns whether a level may use bf16 dot products, and the processor has them.
pub(super) fn has_dot_products(level: SimdLevel) -> bool {
    #[cfg(target_arch = "x86_64")]
    return level >= SimdLevel::Avx512 && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = level;
        false
    }
}

/// Returns whether a level may use bf16 dot products, the processor has them, and they are the fastest way to multiply so
/// many rows.
#[cfg(target_arch = "x86_64")]
fn is_worthwhile(level: SimdLevel, rows: usize) -> bool {
    // A single row waits for memory, which a loop over one matrix row after another reads faster.
    rows > 1 && has_dot_products(level) && !super::unit::is_worthwhile(level, rows, StoredType::BF16)
}

/// Computes `y = x̂ · matrixᵀ`, where `x̂` are the rows of `x` rounded to bf16. The matrix must be stored in bf16, `x` and
/// `y` must have `rows` rows, and there must be at least one row and one matrix row.
pub(super) fn multiply(
    products: &Products,
    (x, rows): (&[f32], usize),
    matrix: &Matrix<'_>,
    y: Destination<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if is_worthwhile(products.level.level(), rows) {
        ROUNDED.with_borrow_mut(|rounded| {
            // SAFETY: the processor supports AVX-512 and `AVX512_BF16`.
            unsafe { rounded.round(products, (x, rows), matrix.input) };
            let threads = products.threads(matrix, rows);
            super::in_parts((&products.workers, threads), matrix.out, dots::UNIT, &|columns| {
                // SAFETY: the instructions are available, `y` has `rows` rows by contract, and no other part has these
                // columns.
                unsafe { dots::columns(rounded, matrix, columns, y) };
            });
        });
        return;
    }
    // SAFETY: the task has no safety conditions.
    products.exact_of_rounded((x, rows), matrix, y, |x| unsafe { products.level.run(RoundInPlace(x)) });
}

/// A task that replaces numbers by the nearest bf16 numbers.
struct RoundInPlace<'a>(&'a mut [f32]);

impl SimdTask for RoundInPlace<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut narrow = [0u16; 16];
        let (whole, rest) = self.0.as_chunks_mut::<16>();
        for chunk in whole {
            for i in (0..16).step_by(S::LANES) {
                // SAFETY: the caller is compiled for `S`, and vectors stay inside the chunk, since `LANES` divides 16.
                unsafe {
                    let at = chunk.as_mut_ptr().add(i);
                    S::store_bf16(narrow.as_mut_ptr(), S::load(at));
                    S::store(at, S::load_bf16(narrow.as_ptr()));
                }
            }
        }
        for x in rest {
            *x = half::bf16::from_f32(*x).to_f32();
        }
    }
}
