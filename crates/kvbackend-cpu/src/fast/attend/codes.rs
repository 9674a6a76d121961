//! Integer codes as f32, a vector at a time: the reference's bits.

use half::f16;
use kvcore::KvFormat;

use crate::simd::Simd;

/// Decodes a row of int8 or int4 codes; other formats are left to the reference, which says so by `false`.
///
/// # Safety
/// `row` has room for as many elements as there are codes, in whole groups, and `scales` one for each group.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd>(format: KvFormat, codes: &[u8], scales: &[u8], row: *mut f32) -> bool {
    let (group, halves) = match format {
        KvFormat::Int8 { group } => (group, false),
        KvFormat::Int4 { group } => (group, true),
        _ => return false,
    };
    let bytes = if halves { group / 2 } else { group };
    let scales = scales.chunks_exact(2).map(|pair| f16::from_ne_bytes([pair[0], pair[1]]).to_f32());
    let mut to = row;
    for (codes, step) in codes.chunks_exact(bytes).zip(scales) {
        // SAFETY: a group's elements follow each other.
        unsafe {
            if halves {
                nibbles::<S>(codes, step, to);
            } else {
                times::<S>(codes.as_ptr().cast(), step, to, group);
            }
            to = to.add(group);
        }
    }
    true
}

/// `to[i] = codes[i] * step`.
#[inline(always)]
unsafe fn times<S: Simd>(codes: *const i8, step: f32, to: *mut f32, n: usize) {
    let mut i = 0;
    // SAFETY: `i` stays below `n`.
    unsafe {
        while i + S::LANES <= n {
            S::store(to.add(i), S::mul(S::load_i8(codes.add(i)), S::splat(step)));
            i += S::LANES;
        }
        for i in i..n {
            *to.add(i) = f32::from(*codes.add(i)) * step;
        }
    }
}

/// The same of two codes in a byte, the first in the low half.
#[inline(always)]
unsafe fn nibbles<S: Simd>(codes: &[u8], step: f32, mut to: *mut f32) {
    let mut wide = [0i8; 64];
    for part in codes.chunks(32) {
        for (pair, byte) in wide.chunks_exact_mut(2).zip(part) {
            // An arithmetic shift extends the sign.
            pair[0] = (byte << 4).cast_signed() >> 4;
            pair[1] = byte.cast_signed() >> 4;
        }
        // SAFETY: the caller's.
        unsafe {
            times::<S>(wide.as_ptr(), step, to, 2 * part.len());
            to = to.add(2 * part.len());
        }
    }
}
