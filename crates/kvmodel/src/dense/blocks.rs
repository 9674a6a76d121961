//! Decoding of ggml's blocks, for weights that are not multiplied as blocks.

use half::f16;

/// The elements of a group of `Q4_K`, which share a scale and a minimum.
const GROUP: usize = 32;

/// Appends the 32 elements of a block of `Q8_0` (34 bytes).
pub(super) fn decode_q8_0(block: &[u8], values: &mut Vec<f32>) {
    let scale = half_at(block, 0);
    values.extend(block[2..].iter().map(|&q| scale * f32::from(q as i8)));
}

/// Appends the 256 elements of a block of `Q4_K` (144 bytes).
///
/// The low halves of 32 bytes are one group of elements, their high halves are the next one.
pub(super) fn decode_q4_k(block: &[u8], values: &mut Vec<f32>) {
    let (scales, minima) = (half_at(block, 0), half_at(block, 2));
    let (packed, elements) = (&block[4..16], &block[16..]);
    for (pair, bytes) in elements.chunks_exact(GROUP).enumerate() {
        for (half, shift) in [(0, 0), (1, 4)] {
            let (scale, minimum) = six_bits(packed, 2 * pair + half);
            let (scale, minimum) = (scales * f32::from(scale), minima * f32::from(minimum));
            values.extend(bytes.iter().map(|&q| scale * f32::from((q >> shift) & 0xf) - minimum));
        }
    }
}

/// Returns the scale and the minimum of a group. The first four groups have them in the low six bits of bytes 0 to 7;
/// of the others, four bits are in bytes 8 to 11 and the upper two on top of bytes 0 to 7.
fn six_bits(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let low = packed[group + 4];
    ((low & 0xf) | (packed[group - 4] >> 6 << 4), (low >> 4) | (packed[group] >> 6 << 4))
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
