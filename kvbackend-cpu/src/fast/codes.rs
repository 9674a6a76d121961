//! Converts codes to f32 and back, one row at a time. The results have the same bits as the reference's
//! (`kvcore::base::quant`).
//!
//! The loops have no branches, so that the compiler can vectorise them for the instruction set in use.

use half::f16;
use kvcore::{Fp8Kind, IntKind, KvFormat, Result};

use crate::plane::unsupported;
use crate::simd::{Simd, SimdTask, narrow, widen};

// Decision: docs/decisions/backend-cpu.md#the-compiler-vectorises-the-codecs
/// Adding this to a number below 2²² in magnitude leaves the nearest integer, ties to even, in the lowest
/// bits.
const NEAREST: f32 = 12_582_912.0; // 1.5 · 2²³

/// Checks that this module can decode and encode rows of a format.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] for any other format.
pub(super) fn check(format: KvFormat) -> Result<()> {
    match format {
        KvFormat::Dense(_) | KvFormat::Int8 { .. } | KvFormat::Int4 { .. } | KvFormat::Fp8 { .. } => Ok(()),
        other => Err(unsupported(other)),
    }
}

/// Decodes one row to f32. The row has `dim` elements of a float type, or whole groups of codes and their
/// scales.
///
/// # Safety
/// `codes` must be valid for reads of `dim` codes of `format`, `scales` for reads of their scales if the
/// format has scales, and `to` for writes of `dim` f32 elements. Elements of a dense format must be aligned.
/// `to` must not overlap `codes` or `scales`, and `dim` must be a multiple of the format's group. `check`
/// must have accepted the format.
pub(super) struct DecodeRow {
    pub(super) format: KvFormat,
    pub(super) codes: *const u8,
    pub(super) scales: *const u8,
    pub(super) to: *mut f32,
    pub(super) dim: usize,
}

/// Encodes one row of `dim` f32 elements.
///
/// # Safety
/// `from` must be valid for reads of `dim` f32 elements, and `codes` for writes of `dim` codes of `format`.
/// If the format has scales, `scales` must be valid for writes of the codes' scales, or for reads in fp8
/// formats. Elements of a dense format must be aligned. No other thread may access `codes` or `scales`, and
/// neither may overlap `from`. `dim` must be a multiple of the format's group. `check` must have accepted the
/// format.
pub(super) struct EncodeRow {
    pub(super) format: KvFormat,
    pub(super) from: *const f32,
    pub(super) codes: *mut u8,
    /// The row's scales, which are written for formats with groups, and only read for fp8.
    pub(super) scales: *mut u8,
    pub(super) dim: usize,
}

impl SimdTask for DecodeRow {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { format, mut codes, scales, mut to, dim } = self;
        // SAFETY: the contract of `DecodeRow` gives `dim` codes, their scales and `dim` writable elements at
        // `to`. Group `g < dim / group` covers the next `group` codes and elements, and uses scale `g`.
        unsafe {
            match format {
                KvFormat::Dense(dtype) => widen::<S>(dtype, codes, to, dim),
                KvFormat::Int8 { group } => {
                    for g in 0..dim / group {
                        times::<S>(codes.cast(), scale_at(scales, g), to, group);
                        (codes, to) = (codes.add(group), to.add(group));
                    }
                }
                KvFormat::Int4 { group } => {
                    for g in 0..dim / group {
                        nibbles::<S>(codes, scale_at(scales, g), to, group);
                        (codes, to) = (codes.add(group / 2), to.add(group));
                    }
                }
                KvFormat::Fp8 { kind, .. } => {
                    let scale = scales.cast::<f32>().read_unaligned();
                    kind.decode_row(slice(codes, dim), scale, std::slice::from_raw_parts_mut(to, dim));
                }
                _ => unreachable!("`check` refuses other formats"),
            }
        }
    }
}

impl SimdTask for EncodeRow {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { format, from, codes, scales, dim } = self;
        // SAFETY: the contract of `EncodeRow` gives `dim` readable elements at `from`, `dim` writable codes,
        // and a scale for each group `g < dim / group`; `codes` and `from` do not overlap.
        unsafe {
            let row = std::slice::from_raw_parts(from, dim);
            match format {
                KvFormat::Dense(dtype) => narrow::<S>(dtype, from, codes, dim),
                KvFormat::Int8 { group } => {
                    let codes = std::slice::from_raw_parts_mut(codes, dim);
                    for (g, (part, codes)) in row.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
                        let step = put_scale(IntKind::Int8, part, scales, g);
                        integers(part, step, 127.0, codes);
                    }
                }
                KvFormat::Int4 { group } => {
                    let codes = std::slice::from_raw_parts_mut(codes, dim / 2);
                    for (g, (part, codes)) in row.chunks(group).zip(codes.chunks_mut(group / 2)).enumerate() {
                        let step = put_scale(IntKind::Int4, part, scales, g);
                        for (part, codes) in part.chunks(64).zip(codes.chunks_mut(32)) {
                            let mut wide = [0; 64];
                            integers(part, step, 7.0, &mut wide);
                            for (byte, pair) in codes.iter_mut().zip(wide.chunks_exact(2)) {
                                *byte = pair[0] & 0xf | pair[1] << 4;
                            }
                        }
                    }
                }
                KvFormat::Fp8 { kind, .. } => {
                    let scale = scales.cast::<f32>().read_unaligned();
                    let codes = std::slice::from_raw_parts_mut(codes, dim);
                    match kind {
                        Fp8Kind::E4M3 => floats(&E4M3, row, scale, codes),
                        Fp8Kind::E5M2 => floats(&E5M2, row, scale, codes),
                    }
                }
                _ => unreachable!("`check` refuses other formats"),
            }
        }
    }
}

/// Returns `n` bytes at `at`.
///
/// # Safety
/// `at` must be valid for reads of `n` bytes, and no code may write them while the slice lives.
unsafe fn slice<'a>(at: *const u8, n: usize) -> &'a [u8] {
    // SAFETY: by contract, `at` is valid for reads of `n` bytes.
    unsafe { std::slice::from_raw_parts(at, n) }
}

/// Returns the scale of group `g`.
///
/// # Safety
/// `scales` must be valid for reads of `g + 1` f16 elements, which may be unaligned.
#[inline(always)]
unsafe fn scale_at(scales: *const u8, g: usize) -> f32 {
    // SAFETY: by contract, element `g` of `scales` is readable.
    unsafe { scales.cast::<f16>().add(g).read_unaligned() }.to_f32()
}

/// Computes `to[i] = codes[i] * step` for `n` elements.
///
/// # Safety
/// `codes` must be valid for reads of `n` bytes, and `to` for writes of `n` elements. The caller must be
/// compiled for `S`.
#[inline(always)]
unsafe fn times<S: Simd>(codes: *const i8, step: f32, to: *mut f32, n: usize) {
    let mut i = 0;
    // SAFETY: `i + LANES <= n` where a vector is accessed and `i < n` where a single element is accessed, and
    // the caller guarantees `n` elements at `codes` and at `to`.
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

/// Computes `to[i] = codes[i] * step` like [`times`], but for two codes per byte, with the first code in the
/// low half.
///
/// # Safety
/// `codes` must be valid for reads of `group / 2` bytes, and `to` for writes of `group` elements. The caller
/// must be compiled for `S`.
#[inline(always)]
unsafe fn nibbles<S: Simd>(codes: *const u8, step: f32, mut to: *mut f32, group: usize) {
    let mut wide = [0i8; 64];
    // SAFETY: by contract, `codes` has `group / 2` bytes and `to` has `group` elements. A part has at most 32
    // bytes, so its codes fit in `wide`, and the parts add up to `group` elements.
    unsafe {
        for part in slice(codes, group / 2).chunks(32) {
            for (pair, byte) in wide.chunks_exact_mut(2).zip(part) {
                // An arithmetic right shift extends the sign.
                pair[0] = (byte << 4).cast_signed() >> 4;
                pair[1] = byte.cast_signed() >> 4;
            }
            times::<S>(wide.as_ptr(), step, to, 2 * part.len());
            to = to.add(2 * part.len());
        }
    }
}

/// Writes the scale of group `g` and returns it. If an element of the group is not finite, the scale is NaN.
///
/// # Safety
/// `scales` must be valid for writes of `g + 1` f16 elements, which may be unaligned.
#[inline(always)]
unsafe fn put_scale(kind: IntKind, group: &[f32], scales: *mut u8, g: usize) -> f32 {
    // Magnitudes are ordered like their bits, and the bits of infinities and NaN are above all others.
    let largest = group.iter().fold(0u32, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
    let scale = kind.scale_of(&[f32::from_bits(largest)]);
    // SAFETY: by contract, element `g` of `scales` is writable.
    unsafe { scales.cast::<f16>().add(g).write_unaligned(scale) };
    scale.to_f32()
}

/// Writes the codes nearest to `row / step`, or only zeros if `step` is 0 or NaN.
#[inline(always)]
fn integers(row: &[f32], step: f32, limit: f32, codes: &mut [u8]) {
    if step > 0.0 {
        for (code, x) in codes.iter_mut().zip(row) {
            let x = x / step;
            let x = if x > limit { limit } else { x };
            let x = if x < -limit { -limit } else { x };
            *code = (x + NEAREST).to_bits() as u8;
        }
    } else {
        codes[..row.len()].fill(0);
    }
}

/// The parameters of an 8-bit float format.
struct Fp8Parameters {
    /// Number of f32 mantissa bits that the format drops.
    dropped: u32,
    /// Difference between the exponent biases of f32 and the format, shifted to the position of a code's
    /// exponent.
    bias: u32,
    max: f32,
    smallest_normal: f32,
    /// Reciprocal of the format's smallest positive number.
    per_smallest: f32,
    infinity: u32,
}

const E4M3: Fp8Parameters = Fp8Parameters {
    dropped: 20,
    bias: 120 << 3,
    max: 448.0,
    smallest_normal: 1.0 / 64.0,
    per_smallest: 512.0,
    infinity: 0x7f,
};

const E5M2: Fp8Parameters = Fp8Parameters {
    dropped: 21,
    bias: 112 << 2,
    max: 57_344.0,
    smallest_normal: 1.0 / 16_384.0,
    per_smallest: 65_536.0,
    infinity: 0x7c,
};

/// Writes the codes nearest to `row / scale`, rounding ties to even. Finite numbers that are too large
/// saturate.
#[inline(always)]
fn floats(float: &Fp8Parameters, row: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(row) {
        let bits = (x / scale).to_bits();
        let magnitude = f32::from_bits(bits & 0x7fff_ffff);
        let endless = x.to_bits() & 0x7fff_ffff >= 0x7f80_0000 && magnitude == f32::INFINITY;
        let kept = if magnitude > float.max { float.max } else { magnitude };
        let kept_bits = kept.to_bits();
        let even = (1 << (float.dropped - 1)) - 1 + ((kept_bits >> float.dropped) & 1);
        let normal = (kept_bits.wrapping_add(even) >> float.dropped).wrapping_sub(float.bias);
        let small = (kept * float.per_smallest + NEAREST).to_bits();
        let finite = if kept < float.smallest_normal { small } else { normal };
        let number = if endless { float.infinity } else { finite };
        let magnitude = if kept.is_nan() { 0x7f } else { number };
        *code = (magnitude as u8 & 0x7f) | (bits >> 24) as u8 & 0x80;
    }
}
