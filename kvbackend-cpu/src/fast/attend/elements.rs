//! Reads the stored elements of a cache's rows as f32, without applying their scales.

use std::marker::PhantomData;

use kvcore::Fp8Kind;

use super::pointers::RowPointers;
use crate::simd::{E4M3_UNIT, Simd, SimdElement, SimdTask};

/// The point at which scales are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scaling {
    /// Elements have no scales.
    None,
    /// All elements of a row share a scale. The row's logits and weights are multiplied by the scale.
    Rows,
    /// Each group of a row's elements shares a scale. Every element is multiplied by its group's scale. A
    /// group must be a whole number of vectors.
    Groups,
}

/// The element type of stored rows.
///
/// # Safety
/// The row must have element `i`. For [`load`](Self::load), it must have `S::LANES` elements starting at `i`,
/// and `i` must be a multiple of that number. The caller must be compiled for the instruction set of `S`.
#[allow(clippy::missing_safety_doc, reason = "stated once, at the trait")]
pub(super) trait RowElement: Copy + 'static {
    const SCALING: Scaling;

    /// Returns a vector of elements, starting at element `i`.
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V;

    /// Returns element `i`.
    unsafe fn one(row: *const u8, i: usize) -> f32;
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl<E: SimdElement> RowElement for E {
    const SCALING: Scaling = Scaling::None;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { <E as SimdElement>::load::<S>(row.cast::<E>().add(i)) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        unsafe { row.cast::<E>().add(i).read() }.to_f32()
    }
}

/// An `int8` code, in rows that have a single scale.
#[derive(Clone, Copy)]
pub(super) struct Int8;

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl RowElement for Int8 {
    const SCALING: Scaling = Scaling::Rows;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { S::load_i8(row.cast::<i8>().add(i)) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        f32::from(unsafe { row.cast::<i8>().add(i).read() })
    }
}

/// An `int4` code, in rows that have two codes per byte and a single scale.
#[derive(Clone, Copy)]
pub(super) struct Int4;

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl RowElement for Int4 {
    const SCALING: Scaling = Scaling::Rows;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { S::load_i4(row.add(i / 2)) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        let byte = unsafe { row.add(i / 2).read() };
        // An arithmetic right shift extends the sign of the upper four bits.
        f32::from((if i.is_multiple_of(2) { byte << 4 } else { byte }).cast_signed() >> 4)
    }
}

/// An `fp8-e4m3` code that is not NaN, divided by [`E4M3_UNIT`].
#[derive(Clone, Copy)]
pub(super) struct E4M3;

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl RowElement for E4M3 {
    const SCALING: Scaling = Scaling::Rows;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { S::load_e4m3(row.add(i)) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        Fp8Kind::E4M3.decode(unsafe { row.add(i).read() }) / E4M3_UNIT
    }
}

/// An `fp8-e5m2` code.
#[derive(Clone, Copy)]
pub(super) struct E5M2;

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl RowElement for E5M2 {
    const SCALING: Scaling = Scaling::Rows;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { S::load_e5m2(row.add(i)) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        Fp8Kind::E5M2.decode(unsafe { row.add(i).read() })
    }
}

/// A code in rows that have a scale for each group.
#[derive(Clone, Copy)]
pub(super) struct Grouped<E>(PhantomData<E>);

#[allow(clippy::undocumented_unsafe_blocks, reason = "passed on to the caller, as stated at RowElement")]
impl<E: RowElement> RowElement for Grouped<E> {
    const SCALING: Scaling = Scaling::Groups;

    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, i: usize) -> S::V {
        unsafe { E::load::<S>(row, i) }
    }

    #[inline(always)]
    unsafe fn one(row: *const u8, i: usize) -> f32 {
        unsafe { E::one(row, i) }
    }
}

/// Checks whether any code in the given `fp8-e4m3` rows is NaN.
///
/// # Safety
/// Each row must have `dim` codes.
pub(super) struct AnyNan<'a> {
    pub(super) rows: RowPointers<'a>,
    pub(super) dim: usize,
}

impl SimdTask for AnyNan<'_> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> bool {
        let RowPointers { at, offset, .. } = self.rows;
        // SAFETY: each row has `dim` codes, and the caller is compiled for `S`, by contract.
        unsafe { S::any_nan_e4m3(at, offset, self.dim) }
    }
}
