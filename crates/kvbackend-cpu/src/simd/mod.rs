//! Vectors of f32, one implementation per instruction set, and the choice between them at run time.
//!
//! A kernel is a [`Task`]: one generic function over [`Simd`]. [`Available::run`] calls it inside a function
//! that is compiled for the instruction set, so that everything inlined into it is too. Functions on this
//! path are `#[inline(always)]`: one that is not inlined would be compiled without the instructions. What is
//! large, or used in many places, is a task of its own, called by [`Simd::call`]: one function for all places,
//! or compile time grows with every way through them.

/// Functions of [`Simd`] that are an intrinsic each.
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

/// One of them, by its name.
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

mod lane;
mod level;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

pub(crate) use lane::{Lane, narrow, widen};
pub use level::SimdLevel;
pub(crate) use level::{Available, Task};
pub(crate) use math::exp;

/// A vector of f32 of one instruction set.
///
/// # Safety
/// Every function needs the instruction set of its implementation; those that take a pointer need it to be
/// valid for as many elements as they touch, aligned for the element type alone.
#[allow(clippy::missing_safety_doc, reason = "said once, at the trait")]
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// The vector.
    type V: Copy;
    /// Its elements.
    const LANES: usize;
    /// Vectors that the processor holds in registers: how large a block of products may be.
    const REGISTERS: usize;
    /// Whether [`stream_line`](Self::stream_line) passes the caches.
    const STREAMS: bool;

    /// Runs a task in a function of its own.
    unsafe fn call<T: Task>(task: T) -> T::Output;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the set has such an instruction.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of each pair; `b` where one is not a number.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of each pair; `b` where one is not a number.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for whole numbers `n` of −127 (which gives 0) to 127.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;
    unsafe fn sum(a: Self::V) -> f32;
    unsafe fn largest(a: Self::V) -> f32;
    /// The sums of four vectors.
    #[inline(always)]
    unsafe fn sum_four(a: Self::V, b: Self::V, c: Self::V, d: Self::V) -> [f32; 4] {
        // SAFETY: the caller's.
        unsafe { [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)] }
    }
    /// Exchanges rows and columns of the first `LANES` vectors.
    unsafe fn transpose(square: &mut [Self::V; 16]);
    /// Exchanges the elements of each pair `(2 i, 2 i + 1)`.
    unsafe fn swap_pairs(a: Self::V) -> Self::V;
    /// `(x0, x0, x1, x1, …)` of the first half of the lanes at `from`.
    unsafe fn load_twice(from: *const f32) -> Self::V;

    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, a: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn store_bf16(to: *mut u16, a: Self::V);
    /// Two vectors, one after the other.
    #[inline(always)]
    unsafe fn store_bf16_twice(to: *mut u16, a: Self::V, b: Self::V) {
        // SAFETY: the caller's.
        unsafe {
            Self::store_bf16(to, a);
            Self::store_bf16(to.add(Self::LANES), b);
        }
    }
    unsafe fn load_f16(from: *const u16) -> Self::V;
    unsafe fn store_f16(to: *mut u16, a: Self::V);
    /// Two vectors, one after the other.
    #[inline(always)]
    unsafe fn store_f16_twice(to: *mut u16, a: Self::V, b: Self::V) {
        // SAFETY: the caller's.
        unsafe {
            Self::store_f16(to, a);
            Self::store_f16(to.add(Self::LANES), b);
        }
    }
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Copies 64 bytes past the caches; `to` is aligned to 64.
    unsafe fn stream_line(to: *mut u8, from: *const u8);
    /// Orders streamed stores before what follows.
    unsafe fn fence();
    /// Asks for the cache line at an address, which may be any.
    unsafe fn prefetch(at: *const u8);
    /// The same, no nearer than the second cache.
    unsafe fn prefetch_far(at: *const u8);
}
