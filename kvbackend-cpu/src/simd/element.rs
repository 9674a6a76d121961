//! Element types that can be loaded as f32 vectors and rounded back, and conversions of whole rows.

use half::{bf16, f16};
use kvcore::DType;

use super::Simd;
use crate::element::Element;

/// An element type that every instruction set can convert to and from f32 vectors.
///
/// # Safety
/// The instruction set of `S` must be available, as for [`Simd`]. The pointer must be valid for the
/// `S::LANES` elements loaded or stored, or for `2 * S::LANES` elements in
/// [`store_twice`](Self::store_twice).
#[allow(clippy::missing_safety_doc, reason = "stated once, at the trait")]
pub(crate) trait SimdElement: Element {
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    unsafe fn store<S: Simd>(to: *mut Self, a: S::V);
    /// Stores `2 * S::LANES` elements: first `a`, and then `b`.
    #[inline(always)]
    unsafe fn store_twice<S: Simd>(to: *mut Self, a: S::V, b: S::V) {
        // SAFETY: by contract, the instruction set of `S` is available, and `to` is valid for writes of two
        // vectors.
        unsafe {
            Self::store::<S>(to, a);
            Self::store::<S>(to.add(S::LANES), b);
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at Simd")]
impl SimdElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, a: S::V) {
        unsafe { S::store(to, a) }
    }
}

/// Implements [`SimdElement`] for a 2-byte element type with functions of [`Simd`].
macro_rules! half {
    ($element:ty, $load:ident, $store:ident, $store_twice:ident) => {
        #[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at Simd")]
        impl SimdElement for $element {
            #[inline(always)]
            unsafe fn load<S: Simd>(from: *const Self) -> S::V {
                unsafe { S::$load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(to: *mut Self, a: S::V) {
                unsafe { S::$store(to.cast(), a) }
            }
            #[inline(always)]
            unsafe fn store_twice<S: Simd>(to: *mut Self, a: S::V, b: S::V) {
                unsafe { S::$store_twice(to.cast(), a, b) }
            }
        }
    };
}

half!(bf16, load_bf16, store_bf16, store_bf16_twice);
half!(f16, load_f16, store_f16, store_f16_twice);

/// Converts `n` elements of a float type to f32.
///
/// # Safety
/// The caller must be compiled for the instruction set of `S`, as [`Simd`] requires. `from` must be valid for
/// reads of `n` elements of `dtype`, and `to` for writes of `n` f32 elements. Both must be aligned for their
/// elements, and they must not overlap.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd>(dtype: DType, from: *const u8, to: *mut f32, n: usize) {
    // SAFETY: by contract, `from` has `n` elements of `dtype` and `to` has room for `n` f32 elements, without
    // overlap.
    unsafe {
        match dtype {
            DType::F16 => convert::<S, f16, f32>(from.cast(), to, n),
            DType::BF16 => convert::<S, bf16, f32>(from.cast(), to, n),
            _ => std::ptr::copy_nonoverlapping(from.cast::<f32>(), to, n),
        }
    }
}

/// Rounds `n` f32 elements to a float type.
///
/// # Safety
/// The caller must be compiled for the instruction set of `S`, as [`Simd`] requires. `from` must be valid for
/// reads of `n` f32 elements, and `to` for writes of `n` elements of `dtype`. Both must be aligned for their
/// elements, and they must not overlap.
#[inline(always)]
pub(crate) unsafe fn narrow<S: Simd>(dtype: DType, from: *const f32, to: *mut u8, n: usize) {
    // SAFETY: by contract, `from` has `n` f32 elements and `to` has room for `n` elements of `dtype`, without
    // overlap.
    unsafe {
        match dtype {
            DType::F16 => convert::<S, f32, f16>(from, to.cast(), n),
            DType::BF16 => convert::<S, f32, bf16>(from, to.cast(), n),
            _ => std::ptr::copy_nonoverlapping(from, to.cast::<f32>(), n),
        }
    }
}

/// Converts `n` elements from one type to another.
///
/// # Safety
/// The same as for [`widen`]: `from` must be valid for reads and `to` for writes of `n` elements, without
/// overlap.
#[inline(always)]
unsafe fn convert<S: Simd, A: SimdElement, B: SimdElement>(from: *const A, to: *mut B, n: usize) {
    let mut i = 0;
    // SAFETY: `i + 2 * LANES <= n` where two vectors are accessed and `i < n` where a single element is
    // accessed, and the caller guarantees `n` elements at `from` and at `to`.
    unsafe {
        while i + 2 * S::LANES <= n {
            let (a, b) = (A::load::<S>(from.add(i)), A::load::<S>(from.add(i + S::LANES)));
            B::store_twice::<S>(to.add(i), a, b);
            i += 2 * S::LANES;
        }
        while i < n {
            to.add(i).write(B::from_f32(from.add(i).read().to_f32()));
            i += 1;
        }
    }
}
