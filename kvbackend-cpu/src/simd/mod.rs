//! f32 vectors, with one implementation per instruction set. The instruction set is chosen at run time.
//!
//! A kernel is a [`SimdTask`], which is a function that is generic over [`Simd`]. [`AvailableLevel::run`]
//! calls the task inside a function that is compiled for the instruction set, and everything inlined into the
//! task is compiled for the same instructions. Functions on this path are `#[inline(always)]`, because a
//! function that is not inlined would be compiled without these instructions. Large code and code used in
//! many places are separate tasks, which are called by [`Simd::call`] and therefore compiled only once.
//! Otherwise, compile time would grow with every path through such code.

/// Defines the functions of [`Simd`] that consist of a single intrinsic.
#[cfg(target_arch = "x86_64")]
macro_rules! intrinsics {
    (splat: $splat:ident, $($name:ident: $intrinsic:ident),* $(,)?) => {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self::V {
            unsafe { $splat(x) }
        }
        $(intrinsic! { $name: $intrinsic })*
    };
}

/// Defines one function of [`Simd`] as a single intrinsic.
#[cfg(target_arch = "x86_64")]
macro_rules! intrinsic {
    (load: $intrinsic:ident) => {
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self::V {
            unsafe { $intrinsic(from) }
        }
    };
    (store: $intrinsic:ident) => {
        #[inline(always)]
        unsafe fn store(to: *mut f32, a: Self::V) {
            unsafe { $intrinsic(to, a) }
        }
    };
    (mul_add: $intrinsic:ident) => {
        #[inline(always)]
        unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            unsafe { $intrinsic(a, b, c) }
        }
    };
    ($name:ident: $intrinsic:ident) => {
        #[inline(always)]
        unsafe fn $name(a: Self::V, b: Self::V) -> Self::V {
            unsafe { $intrinsic(a, b) }
        }
    };
}

mod element;
mod level;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

pub(crate) use element::{SimdElement, narrow, widen};
pub use level::SimdLevel;
pub(crate) use level::{AvailableLevel, SimdTask};
pub(crate) use math::{exp, from_f16};

/// The factor by which the results of [`Simd::load_e4m3`] are too small. The function moves the E4M3 exponent
/// to an f16 without correcting the bias (7 instead of 15), which divides the value by 2⁸.
pub(crate) const E4M3_UNIT: f32 = 256.0;

/// The magnitude bits of an E4M3 NaN. No other code has larger magnitude bits.
const E4M3_NAN: u8 = 0x7f;

// Decision: docs/decisions/backend-cpu.md#kernels-are-generic-functions-over-an-instruction-set
/// The f32 vector operations of an instruction set.
///
/// # Safety
/// For every function, the processor must support the implementation's instruction set, and the caller must
/// be compiled for it. A pointer argument must be valid for as many elements as the function reads or writes
/// through it, and aligned for its element type; [`stream_line`](Self::stream_line) requires more.
#[allow(clippy::missing_safety_doc, reason = "stated once, at the trait")]
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// The vector type.
    type V: Copy;
    /// Number of elements per vector.
    const LANES: usize;
    /// Number of vector registers, which limits the size of a block of products.
    const REGISTERS: usize;
    /// True if [`stream_line`](Self::stream_line) bypasses the caches.
    const STREAMS: bool;

    // Decision: docs/decisions/backend-cpu.md#large-parts-of-a-task-are-separate-tasks
    /// Runs a task in a separate function, so that the task is compiled only once.
    unsafe fn call<T: SimdTask>(task: T) -> T::Output;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b + c`, rounded once if the instruction set has a fused instruction.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the larger element of each pair, or `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Returns the smaller element of each pair, or `b` if either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// Returns `a * 2^n`, where each `n` must be an integer from −127 to 127. The result is 0 for −127.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;
    unsafe fn sum(a: Self::V) -> f32;
    unsafe fn largest(a: Self::V) -> f32;
    /// Returns the sum of the elements of each of four vectors.
    #[inline(always)]
    unsafe fn sum_four(a: Self::V, b: Self::V, c: Self::V, d: Self::V) -> [f32; 4] {
        // SAFETY: `Self`'s instruction set is available by contract, and no pointers are involved.
        unsafe { [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)] }
    }
    /// Transposes the matrix whose rows are the first `LANES` vectors of `square`.
    unsafe fn transpose(square: &mut [Self::V; 16]);
    /// Swaps the elements of each pair `(2 i, 2 i + 1)`.
    unsafe fn swap_pairs(a: Self::V) -> Self::V;
    /// Returns `(x0, x0, x1, x1, …)` for the `LANES / 2` elements at `from`.
    unsafe fn load_twice(from: *const f32) -> Self::V;

    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, a: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn store_bf16(to: *mut u16, a: Self::V);
    /// Stores `2 * LANES` elements: first `a`, and then `b`.
    #[inline(always)]
    unsafe fn store_bf16_twice(to: *mut u16, a: Self::V, b: Self::V) {
        // SAFETY: by contract, `to` is valid for writes of `2 * LANES` elements.
        unsafe {
            Self::store_bf16(to, a);
            Self::store_bf16(to.add(Self::LANES), b);
        }
    }
    unsafe fn load_f16(from: *const u16) -> Self::V;
    unsafe fn store_f16(to: *mut u16, a: Self::V);
    /// Stores `2 * LANES` elements: first `a`, and then `b`.
    #[inline(always)]
    unsafe fn store_f16_twice(to: *mut u16, a: Self::V, b: Self::V) {
        // SAFETY: by contract, `to` is valid for writes of `2 * LANES` elements.
        unsafe {
            Self::store_f16(to, a);
            Self::store_f16(to.add(Self::LANES), b);
        }
    }
    /// Returns a vector in which every element is the f16 with the given bits.
    unsafe fn splat_f16(bits: u16) -> Self::V;
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Loads `LANES` bytes, and returns their low halves and their high halves as numbers from 0 to 15.
    unsafe fn load_nibbles(from: *const u8) -> [Self::V; 2];
    /// Loads `LANES` bytes, shifts them right by `shift`, which must be less than 8, and returns the bits
    /// selected by `mask` as unsigned numbers.
    unsafe fn load_bits(from: *const u8, shift: usize, mask: u8) -> Self::V;
    /// Loads `LANES` signed 4-bit integers from `LANES / 2` bytes. The first integer of a byte is in its low
    /// half.
    unsafe fn load_i4(from: *const u8) -> Self::V;
    /// Loads E4M3 floats, divided by [`E4M3_UNIT`]. The result for a NaN code is unspecified.
    unsafe fn load_e4m3(from: *const u8) -> Self::V;
    /// Returns whether any E4M3 code is NaN. Each row has `n` codes, which begin `offset` bytes after its
    /// address in `rows`.
    unsafe fn any_nan_e4m3(rows: &[*const u8], offset: usize, n: usize) -> bool;
    /// Loads E5M2 floats.
    unsafe fn load_e5m2(from: *const u8) -> Self::V;
    /// Copies 64 bytes, bypassing the caches if [`STREAMS`](Self::STREAMS) is true. `to` must be aligned to
    /// 64 bytes.
    unsafe fn stream_line(to: *mut u8, from: *const u8);
    /// Orders all earlier streamed stores before all later stores.
    unsafe fn fence();
    /// Prefetches the cache line at `at`, which may be any address.
    unsafe fn prefetch(at: *const u8);
    /// Like [`prefetch`](Self::prefetch), but prefetches only into the second-level cache.
    unsafe fn prefetch_far(at: *const u8);
}
