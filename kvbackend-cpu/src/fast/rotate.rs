//! Rotates rows with the reference's arithmetic: each product and each sum is rounded separately, so the
//! results have the same bits.

use std::sync::Arc;

use half::{bf16, f16};
use kvcore::{DType, Pairing, Result, Rope, RopeTable, Rotation};

use crate::raw::{Destination, Origin};
use crate::simd::{Simd, SimdElement, SimdTask};

/// A RoPE table that contains all positions that a call needs.
pub(super) struct RotationTable {
    table: Arc<RopeTable>,
    half: usize,
    pairing: Pairing,
    /// The factor to multiply a row by when it is rotated for the first time.
    pub(super) factor: f32,
}

impl RotationTable {
    pub(super) fn new(rope: &Rope, positions: &[i64]) -> Result<Self> {
        let table = rope.table(positions.iter().copied())?;
        let (half, factor) = (rope.frequencies().len(), rope.attention_factor());
        Ok(Self { table, half, pairing: rope.pairing(), factor })
    }

    pub(super) fn of_rotation(rotation: &Rotation) -> Result<Self> {
        Self::new(&rotation.rope, &[rotation.delta])
    }

    /// Creates a table for an operation whose check has already extended the RoPE's table to all positions.
    pub(super) fn of_checked(rope: &Rope) -> Result<Self> {
        Self::new(rope, &[])
    }

    /// Returns the cosines and sines for `position`, which may be negative.
    #[inline(always)]
    pub(super) fn at(&self, position: i64) -> Angle<'_> {
        let at = position.unsigned_abs() as usize * self.half;
        Angle {
            cos: &self.table.cos()[at..at + self.half],
            sin: &self.table.sin()[at..at + self.half],
            sign: if position < 0 { -1.0 } else { 1.0 },
            pairing: self.pairing,
        }
    }
}

/// The cosines and sines of one rotation.
#[derive(Clone, Copy)]
pub(super) struct Angle<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    sign: f32,
    pairing: Pairing,
}

/// Rotates the rows of all heads of the given tokens. A token is given as `(from, to, position)`, with
/// offsets in bytes. Rows may be rotated in place.
///
/// # Safety
/// No other thread may access the rows being written. A row's source and destination must be equal or must
/// not overlap, and the rotary dimension of `table` must be at most `dim`.
pub(super) struct RotateRows<'a, I> {
    pub(super) from: Origin<'a>,
    pub(super) to: Destination<'a>,
    pub(super) heads: usize,
    /// Distance in bytes between the rows of consecutive heads, in the source and in the destination.
    pub(super) head_strides: (usize, usize),
    /// Number of elements per row.
    pub(super) dim: usize,
    pub(super) dtype: DType,
    pub(super) table: &'a RotationTable,
    pub(super) factor: f32,
    /// True to bypass the caches. Rows rotated in place cannot bypass them.
    pub(super) stream: bool,
    pub(super) tokens: I,
}

impl<I: Iterator<Item = (usize, usize, i64)>> SimdTask for RotateRows<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the instruction set of `S` is available by contract, and `each` requires only what
        // `RotateRows` does.
        unsafe {
            match self.dtype {
                DType::F16 => each::<S, f16, I>(self),
                DType::BF16 => each::<S, bf16, I>(self),
                _ => each::<S, f32, I>(self),
            }
            S::fence();
        }
    }
}

/// Distance from a row to the bytes prefetched with it, in bytes.
const AHEAD: usize = 2048;

/// A buffer in which a row is rotated before it is stored past the caches.
#[repr(align(64))]
struct RowBuffer([u8; 1024]);

/// Rotates all rows of `task`.
///
/// # Safety
/// The conditions of [`RotateRows`] must hold, and the caller must be compiled for the instruction set of
/// `S`.
#[inline(always)]
unsafe fn each<S: Simd, E: SimdElement, I: Iterator<Item = (usize, usize, i64)>>(task: RotateRows<'_, I>) {
    let bytes = task.dim * size_of::<E>();
    let mut buffer = RowBuffer([0; 1024]);
    let stream = task.stream && S::STREAMS && bytes <= 1024 && bytes.is_multiple_of(64);
    for (a, b, position) in task.tokens {
        let angle = task.table.at(position);
        for head in 0..task.heads {
            let (a, b) = (a + head * task.head_strides.0, b + head * task.head_strides.1);
            let (from, to) = (task.from.at(a, bytes).cast::<E>(), task.to.at(b, bytes));
            // SAFETY: `at` checked that `bytes` bytes are in bounds on both sides. If `stream` is true,
            // `bytes` is a multiple of 64 and at most the 1024 bytes of `buffer`, and `is_line` found the
            // destination aligned. The caller guarantees that source and destination are equal or do not
            // overlap, and that the rotary dimension is at most `dim`.
            unsafe {
                // Rows are usually contiguous, so the bytes ahead are the next rows.
                let mut ahead = 0;
                while ahead < bytes {
                    S::prefetch(from.cast::<u8>().wrapping_add(AHEAD + ahead));
                    ahead += 64;
                }
                if stream && task.to.is_line(b) {
                    let row = buffer.0.as_mut_ptr();
                    rotate::<S, E>(from, row.cast(), task.dim, angle, task.factor);
                    let mut at = 0;
                    while at < bytes {
                        S::stream_line(to.add(at), row.add(at));
                        at += 64;
                    }
                } else {
                    rotate::<S, E>(from, to.cast(), task.dim, angle, task.factor);
                }
            }
        }
    }
}

/// Rotates one row, and copies the elements past the rotary dimension. The row may be rotated in place.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `dim` aligned elements, and the two rows must be
/// equal or must not overlap. The rotary dimension, `2 * angle.cos.len()`, must be at most `dim`. The caller
/// must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn rotate<S: Simd, E: SimdElement>(
    from: *const E,
    to: *mut E,
    dim: usize,
    angle: Angle<'_>,
    factor: f32,
) {
    // SAFETY: by contract, `from` and `to` have `dim` elements each and are equal or do not overlap, and
    // `rotary <= dim`, so `dim - rotary` elements remain past the rotary ones.
    unsafe {
        match (angle.pairing, factor == 1.0 && angle.sign == 1.0) {
            (Pairing::HalfSplit, true) => half_split::<S, E, true>(from, to, angle, factor),
            (Pairing::HalfSplit, false) => half_split::<S, E, false>(from, to, angle, factor),
            (Pairing::Interleaved, _) => interleaved::<S, E>(from, to, angle, factor),
        }
        let rotary = 2 * angle.cos.len();
        if !std::ptr::eq(from, to) {
            std::ptr::copy_nonoverlapping(from.add(rotary), to.add(rotary), dim - rotary);
        }
    }
}

/// Returns pairs `i..i + LANES` of a row after rotation. If `PLAIN` is true, factor and sign are ignored.
///
/// # Safety
/// With `half = angle.cos.len()`, `i + LANES` must be at most `half`, and `from` must be valid for reads of
/// `2 * half` elements.
#[inline(always)]
unsafe fn rotated_pairs<S: Simd, E: SimdElement, const PLAIN: bool>(
    from: *const E,
    i: usize,
    angle: Angle<'_>,
    factor: f32,
) -> (S::V, S::V) {
    // SAFETY: by contract, `i + LANES <= half` and `from` has `2 * half` elements; `cos` and `sin` have
    // `half` elements each.
    unsafe {
        let (a, b) = (E::load::<S>(from.add(i)), E::load::<S>(from.add(angle.cos.len() + i)));
        let (c, s) = (S::load(angle.cos.as_ptr().add(i)), S::load(angle.sin.as_ptr().add(i)));
        let s = if PLAIN { s } else { S::mul(S::splat(angle.sign), s) };
        let x = S::sub(S::mul(a, c), S::mul(b, s));
        let y = S::add(S::mul(a, s), S::mul(b, c));
        if PLAIN { (x, y) } else { (S::mul(x, S::splat(factor)), S::mul(y, S::splat(factor))) }
    }
}

/// Rotates the pairs `(i, half + i)` of a row.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `2 * angle.cos.len()` elements, and they must be
/// equal or must not overlap. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn half_split<S: Simd, E: SimdElement, const PLAIN: bool>(
    from: *const E,
    to: *mut E,
    angle: Angle<'_>,
    factor: f32,
) {
    let half = angle.cos.len();
    let mut i = 0;
    // SAFETY: with `half = angle.cos.len()`, `i + LANES <= half` where a vector is accessed and `i < half`
    // where a single pair is accessed; the caller guarantees `2 * half` elements at `from` and at `to`.
    unsafe {
        while i + 2 * S::LANES <= half {
            let (x0, y0) = rotated_pairs::<S, E, PLAIN>(from, i, angle, factor);
            let (x1, y1) = rotated_pairs::<S, E, PLAIN>(from, i + S::LANES, angle, factor);
            E::store_twice::<S>(to.add(i), x0, x1);
            E::store_twice::<S>(to.add(half + i), y0, y1);
            i += 2 * S::LANES;
        }
        while i + S::LANES <= half {
            let (x, y) = rotated_pairs::<S, E, PLAIN>(from, i, angle, factor);
            E::store::<S>(to.add(i), x);
            E::store::<S>(to.add(half + i), y);
            i += S::LANES;
        }
        for i in i..half {
            pair(from, to, (i, half + i), (angle.cos[i], angle.sign * angle.sin[i]), factor);
        }
    }
}

/// The signs `−1, 1, −1, 1, …` for the lanes of the longest vector.
const ALTERNATING: [f32; 16] = {
    let mut signs = [1.0; 16];
    let mut i = 0;
    while i < 16 {
        signs[i] = -1.0;
        i += 2;
    }
    signs
};

/// Rotates the pairs `(2 i, 2 i + 1)` of a row.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `2 * angle.cos.len()` elements, and they must be
/// equal or must not overlap. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn interleaved<S: Simd, E: SimdElement>(from: *const E, to: *mut E, angle: Angle<'_>, factor: f32) {
    let half = angle.cos.len();
    let (cos, sin) = (angle.cos.as_ptr(), angle.sin.as_ptr());
    let (step, mut i) = (S::LANES / 2, 0);
    // SAFETY: with `half = angle.cos.len()`, `i + LANES / 2 <= half` where a vector is accessed, and `i <
    // half` where a single pair is accessed; the caller guarantees `2 * half` elements at `from` and at `to`.
    // `ALTERNATING` is as long as the longest vector.
    unsafe {
        let (sign, scale) = (S::mul(S::splat(angle.sign), S::load(ALTERNATING.as_ptr())), S::splat(factor));
        while i + step <= half {
            let x = E::load::<S>(from.add(2 * i));
            let (c, s) = (S::load_twice(cos.add(i)), S::mul(sign, S::load_twice(sin.add(i))));
            let rotated = S::add(S::mul(x, c), S::mul(S::swap_pairs(x), s));
            E::store::<S>(to.add(2 * i), S::mul(rotated, scale));
            i += step;
        }
        for i in i..half {
            pair(from, to, (2 * i, 2 * i + 1), (angle.cos[i], angle.sign * angle.sin[i]), factor);
        }
    }
}

/// Rotates the pair of elements `x` and `y`.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of elements `x` and `y`.
#[inline(always)]
unsafe fn pair<E: SimdElement>(
    from: *const E,
    to: *mut E,
    (x, y): (usize, usize),
    (cos, sin): (f32, f32),
    factor: f32,
) {
    // SAFETY: by contract, elements `x` and `y` are readable in `from` and writable in `to`.
    unsafe {
        let (a, b) = (from.add(x).read().to_f32(), from.add(y).read().to_f32());
        to.add(x).write(E::from_f32((a * cos - b * sin) * factor));
        to.add(y).write(E::from_f32((a * sin + b * cos) * factor));
    }
}
