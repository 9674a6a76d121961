//! Rotation of rows, in the reference's arithmetic: products and sums are rounded one by one, so that the
//! results are the same bits.

use std::sync::Arc;

use half::{bf16, f16};
use kvcore::{DType, Pairing, Result, Rope, RopeTable, Rotation};

use crate::raw::{Origin, Target};
use crate::simd::{Lane, Simd, Task};

/// A table that holds all positions of a call.
pub(super) struct Turn {
    table: Arc<RopeTable>,
    half: usize,
    pairing: Pairing,
    /// What a first rotation multiplies by.
    pub(super) factor: f32,
}

impl Turn {
    pub(super) fn new(rope: &Rope, positions: &[i64]) -> Result<Self> {
        let table = rope.table(positions.iter().copied())?;
        let (half, factor) = (rope.frequencies().len(), rope.attention_factor());
        Ok(Self { table, half, pairing: rope.pairing(), factor })
    }

    pub(super) fn of_rotation(rotation: &Rotation) -> Result<Self> {
        Self::new(&rotation.rope, &[rotation.delta])
    }

    /// For an operation whose check has grown the table to all its positions.
    pub(super) fn of_checked(rope: &Rope) -> Result<Self> {
        Self::new(rope, &[])
    }

    /// Cosines and sines at the distance of a position from 0, and the sign of the sines.
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

/// One rotation.
#[derive(Clone, Copy)]
pub(super) struct Angle<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    sign: f32,
    pairing: Pairing,
}

/// The heads' rows of tokens at `(from, to, position)`, in bytes. A row may be rotated in place.
///
/// No other thread touches the rows written.
pub(super) struct RotateRows<'a, I> {
    pub(super) from: Origin<'a>,
    pub(super) to: Target<'a>,
    pub(super) heads: usize,
    /// Bytes from one head's row to the next, on both sides.
    pub(super) head_strides: (usize, usize),
    /// Elements of a row.
    pub(super) dim: usize,
    pub(super) dtype: DType,
    pub(super) turn: &'a Turn,
    pub(super) factor: f32,
    /// Whether to go past the caches, which rows in place cannot.
    pub(super) stream: bool,
    pub(super) tokens: I,
}

impl<I: Iterator<Item = (usize, usize, i64)>> Task for RotateRows<'_, I> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the instruction set is the caller's, and `at` checks both ends of each row.
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

/// Bytes ahead of a row that are asked for.
const AHEAD: usize = 2048;

/// A row on its way past the caches.
#[repr(align(64))]
struct Buffer([u8; 1024]);

#[inline(always)]
unsafe fn each<S: Simd, E: Lane, I: Iterator<Item = (usize, usize, i64)>>(task: RotateRows<'_, I>) {
    let bytes = task.dim * size_of::<E>();
    let mut buffer = Buffer([0; 1024]);
    let stream = task.stream && S::STREAMS && bytes <= 1024 && bytes.is_multiple_of(64);
    for (a, b, position) in task.tokens {
        let angle = task.turn.at(position);
        for head in 0..task.heads {
            let (a, b) = (a + head * task.head_strides.0, b + head * task.head_strides.1);
            let (from, to) = (task.from.at(a, bytes).cast::<E>(), task.to.at(b, bytes));
            // SAFETY: the row lies inside on both sides; the buffer holds `bytes` bytes, whole lines of them.
            unsafe {
                // Rows follow each other more often than not.
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

/// Rotates one row, which may be in place, and copies what is past the rotary dimension.
///
/// # Safety
/// Both rows have `dim` elements, and the rotary dimension is at most that.
#[inline(always)]
pub(super) unsafe fn rotate<S: Simd, E: Lane>(
    from: *const E,
    to: *mut E,
    dim: usize,
    angle: Angle<'_>,
    factor: f32,
) {
    // SAFETY: the caller's.
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

/// Pairs `i` to `i + LANES` of a row, rotated. `PLAIN`: without factor and sign.
///
/// # Safety
/// `i + LANES <= half`, and the row has `2 * half` elements.
#[inline(always)]
unsafe fn turned<S: Simd, E: Lane, const PLAIN: bool>(
    from: *const E,
    i: usize,
    angle: Angle<'_>,
    factor: f32,
) -> (S::V, S::V) {
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (E::load::<S>(from.add(i)), E::load::<S>(from.add(angle.cos.len() + i)));
        let (c, s) = (S::load(angle.cos.as_ptr().add(i)), S::load(angle.sin.as_ptr().add(i)));
        let s = if PLAIN { s } else { S::mul(S::splat(angle.sign), s) };
        let x = S::sub(S::mul(a, c), S::mul(b, s));
        let y = S::add(S::mul(a, s), S::mul(b, c));
        if PLAIN { (x, y) } else { (S::mul(x, S::splat(factor)), S::mul(y, S::splat(factor))) }
    }
}

#[inline(always)]
unsafe fn half_split<S: Simd, E: Lane, const PLAIN: bool>(
    from: *const E,
    to: *mut E,
    angle: Angle<'_>,
    factor: f32,
) {
    let half = angle.cos.len();
    let mut i = 0;
    // SAFETY: `i + LANES <= half` wherever a vector is touched, and rows have `2 * half` elements.
    unsafe {
        while i + 2 * S::LANES <= half {
            let (x0, y0) = turned::<S, E, PLAIN>(from, i, angle, factor);
            let (x1, y1) = turned::<S, E, PLAIN>(from, i + S::LANES, angle, factor);
            E::store_twice::<S>(to.add(i), x0, x1);
            E::store_twice::<S>(to.add(half + i), y0, y1);
            i += 2 * S::LANES;
        }
        while i + S::LANES <= half {
            let (x, y) = turned::<S, E, PLAIN>(from, i, angle, factor);
            E::store::<S>(to.add(i), x);
            E::store::<S>(to.add(half + i), y);
            i += S::LANES;
        }
        for i in i..half {
            pair(from, to, (i, half + i), (angle.cos[i], angle.sign * angle.sin[i]), factor);
        }
    }
}

/// `−1, 1, −1, 1, …` for the longest vector.
const ALTERNATING: [f32; 16] = {
    let mut signs = [1.0; 16];
    let mut i = 0;
    while i < 16 {
        signs[i] = -1.0;
        i += 2;
    }
    signs
};

#[inline(always)]
unsafe fn interleaved<S: Simd, E: Lane>(from: *const E, to: *mut E, angle: Angle<'_>, factor: f32) {
    let half = angle.cos.len();
    let (cos, sin) = (angle.cos.as_ptr(), angle.sin.as_ptr());
    let (step, mut i) = (S::LANES / 2, 0);
    // SAFETY: `i + LANES / 2 <= half`, and rows have `2 * half` elements.
    unsafe {
        let (sign, scale) = (S::mul(S::splat(angle.sign), S::load(ALTERNATING.as_ptr())), S::splat(factor));
        while i + step <= half {
            let x = E::load::<S>(from.add(2 * i));
            let (c, s) = (S::load_twice(cos.add(i)), S::mul(sign, S::load_twice(sin.add(i))));
            let turned = S::add(S::mul(x, c), S::mul(S::swap_pairs(x), s));
            E::store::<S>(to.add(2 * i), S::mul(turned, scale));
            i += step;
        }
        for i in i..half {
            pair(from, to, (2 * i, 2 * i + 1), (angle.cos[i], angle.sign * angle.sin[i]), factor);
        }
    }
}

/// One pair of elements.
#[inline(always)]
unsafe fn pair<E: Lane>(
    from: *const E,
    to: *mut E,
    (x, y): (usize, usize),
    (cos, sin): (f32, f32),
    factor: f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (from.add(x).read().to_f32(), from.add(y).read().to_f32());
        to.add(x).write(E::from_f32((a * cos - b * sin) * factor));
        to.add(y).write(E::from_f32((a * sin + b * cos) * factor));
    }
}
