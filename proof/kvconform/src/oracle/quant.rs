//! The values of stored codes, computed from the definition of each format.

use half::f16;
use kvcore::{Fp8Kind, KvFormat, KvLayout, KvPlane};

/// Returns the value of an 8-bit float, as defined in the OCP specification.
pub fn fp8(kind: Fp8Kind, code: u8) -> f64 {
    let (mantissa_bits, bias, exponents) = match kind {
        Fp8Kind::E4M3 => (3, 7, 15),
        Fp8Kind::E5M2 => (2, 15, 31),
    };
    let steps = 1 << mantissa_bits;
    let (exponent, mantissa) =
        (i32::from(code & 0x7f) / steps, f64::from(i32::from(code) % steps) / f64::from(steps));
    let magnitude = match (kind, exponent) {
        (Fp8Kind::E4M3, e) if e == exponents && mantissa == 0.875 => f64::NAN,
        (Fp8Kind::E5M2, e) if e == exponents && mantissa == 0.0 => f64::INFINITY,
        (Fp8Kind::E5M2, e) if e == exponents => f64::NAN,
        (_, 0) => mantissa * 2f64.powi(1 - bias),
        (_, e) => (1.0 + mantissa) * 2f64.powi(e - bias),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

/// Returns all elements of a quantised plane, each at its code's index: code times scale, rounded once.
pub fn dequantized(layout: &KvLayout, plane: &KvPlane, codes: &[u8], scales: &[u8]) -> Vec<f32> {
    let s = layout.shape();
    let mut values = vec![0.0; codes.len() * 8 / plane.format.storage_dtype().bits()];
    let Some((_, scale_layout)) = plane.scales else { return values };
    for layer in 0..s.num_layers {
        for block in 0..s.num_blocks {
            for token in 0..s.block_size {
                for head in 0..plane.heads {
                    let at = |x: kvcore::PlaneStrides| {
                        layer * x.layer + block * x.block + token * x.token + head * x.head
                    };
                    let (row, first) = (at(plane.strides), at(scale_layout.strides));
                    for i in 0..plane.dim {
                        let scale = first + i * scale_layout.per_row / plane.dim;
                        values[row + i] = value(plane.format, row + i, codes, scale, scales) as f32;
                    }
                }
            }
        }
    }
    values
}

fn value(format: KvFormat, at: usize, codes: &[u8], scale: usize, scales: &[u8]) -> f64 {
    let half = || f64::from(f16::from_le_bytes([scales[2 * scale], scales[2 * scale + 1]]));
    let single = || {
        let bytes = &scales[4 * scale..4 * scale + 4];
        f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };
    match format {
        KvFormat::Int8 { .. } => f64::from(i8::from_le_bytes([codes[at]])) * half(),
        KvFormat::Int4 { .. } => {
            let nibble = i32::from(codes[at / 2] >> (4 * (at % 2)) & 0xf);
            f64::from(if nibble > 7 { nibble - 16 } else { nibble }) * half()
        }
        KvFormat::Fp8 { kind, .. } => fp8(kind, codes[at]) * single(),
        _ => f64::NAN,
    }
}

/// Returns the largest allowed difference between an element and its stored value: half a step for a group of
/// integers with largest magnitude `amax` (whose scale is rounded up to f16), or half a spacing for an 8-bit
/// float with scale `scale`.
pub fn error_bound(format: KvFormat, x: f64, amax: f64, scale: f64) -> f64 {
    let half_step = |limit: f64| 0.5 * (amax / limit * (1.0 + 2f64.powi(-10)) + 2f64.powi(-24));
    match format {
        KvFormat::Int8 { .. } => half_step(127.0),
        KvFormat::Int4 { .. } => half_step(7.0),
        KvFormat::Fp8 { kind: Fp8Kind::E4M3, .. } => x.abs() * 2f64.powi(-4) + scale * 2f64.powi(-10),
        KvFormat::Fp8 { kind: Fp8Kind::E5M2, .. } => x.abs() * 2f64.powi(-3) + scale * 2f64.powi(-17),
        _ => 0.0,
    }
}
