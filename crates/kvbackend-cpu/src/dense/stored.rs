//! Types of stored matrices: floats, and blocks of ggml.

use std::fmt;

use bytemuck::pod_read_unaligned;

use crate::simd::{AvailableLevel, Simd, Task};

/// The element type of a stored matrix. Blocks are those of ggml, and lie along the rows.
///
/// ```
/// use kvbackend_cpu::dense::StoredType;
/// assert_eq!((StoredType::Q8_0.block_elements(), StoredType::Q8_0.block_bytes()), (32, 34));
/// assert_eq!(StoredType::Q4_1.row_bytes(576), Some(360));
/// assert_eq!(StoredType::Q4_1.row_bytes(577), None, "rows consist of whole blocks");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// ggml's `Q8_0`: 32 elements in 34 bytes, an f16 scale and 32 signed bytes. An element is the scale times its
    /// byte.
    Q8_0,
    /// ggml's `Q4_K`: 256 elements in 144 bytes. Two f16 factors, for scales and for minima; 12 bytes with a scale
    /// and a minimum of six bits for each of the eight groups of 32 elements; 128 bytes with two elements of four
    /// bits each. An element is `factor · scale · q − factor · minimum`.
    Q4K,
    /// ggml's `Q4_0`: 32 elements in 18 bytes.
    Q4_0,
    /// ggml's `Q4_1`: 32 elements in 20 bytes.
    Q4_1,
    /// ggml's `Q5_0`: 32 elements in 22 bytes.
    Q5_0,
    /// ggml's `Q5_1`: 32 elements in 24 bytes.
    Q5_1,
    /// ggml's `Q2_K`: 256 elements in 84 bytes.
    Q2K,
    /// ggml's `Q3_K`: 256 elements in 110 bytes.
    Q3K,
    /// ggml's `Q5_K`: 256 elements in 176 bytes.
    Q5K,
    /// ggml's `Q6_K`: 256 elements in 210 bytes.
    Q6K,
}

impl StoredType {
    /// All element types.
    pub const ALL: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Returns the number of elements of a block: 1 for types without blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the number of bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns true if several elements share a scale.
    pub const fn is_blocks(self) -> bool {
        self.block_elements() > 1
    }

    /// Returns the bytes of a row of `width` elements, or `None` if the row does not consist of whole blocks or is too long
    /// to count.
    pub const fn row_bytes(self, width: usize) -> Option<usize> {
        if !width.is_multiple_of(self.block_elements()) {
            return None;
        }
        (width / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// Reads elements as f32, exactly for floats. Elements beyond the bytes, and bytes beyond the elements, stay as they are.
    pub fn decode(self, bytes: &[u8], to: &mut [f32]) {
        // SAFETY: the task states no condition that could fail.
        unsafe { AvailableLevel::best().run(Decode { dtype: self, bytes, to }) };
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        })
    }
}

/// Reads elements of rows as f32.
///
/// `bytes` and `to` hold equally many whole blocks; what is beyond stays as it is.
struct Decode<'a> {
    dtype: StoredType,
    bytes: &'a [u8],
    to: &'a mut [f32],
}

impl Task for Decode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller is compiled for `S`, by contract.
        unsafe { decode::<S>(self.dtype, self.bytes, self.to) }
    }
}

/// Calls a function with each block of some bytes and its elements. No closure: it would not be compiled for the instructions
/// of the caller.
macro_rules! each_block {
    ($bytes:expr, $to:expr, $decode:expr) => {
        for (block, y) in $bytes.as_chunks().0.iter().zip($to.as_chunks_mut().0) {
            $decode(block, y);
        }
    };
    ($bytes:expr, $to:expr, $read:ident of $elements:literal) => {
        for (block, y) in $bytes.as_chunks().0.iter().zip($to.as_chunks_mut().0) {
            $read::<S, Store<'_, $elements>>(block, &mut Store(y));
        }
    };
}

/// Decodes rows, as [`StoredType::decode`] does.
///
/// # Safety
/// The caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd>(dtype: StoredType, bytes: &[u8], to: &mut [f32]) {
    // SAFETY: the caller is compiled for `S`, and a block's elements are as many as its sink has.
    unsafe {
        match dtype {
            StoredType::F32 => {
                let n = (bytes.len() / 4).min(to.len()) * 4;
                bytemuck::cast_slice_mut::<f32, u8>(to)[..n].copy_from_slice(&bytes[..n]);
            }
            StoredType::F16 => each_block!(bytes, to, halves::<S>),
            StoredType::BF16 => each_block!(bytes, to, brains::<S>),
            StoredType::Q8_0 => each_block!(bytes, to, q8_0 of 32),
            StoredType::Q4_0 => each_block!(bytes, to, q4_0 of 32),
            StoredType::Q4_1 => each_block!(bytes, to, q4_1 of 32),
            StoredType::Q5_0 => each_block!(bytes, to, q5_0 of 32),
            StoredType::Q5_1 => each_block!(bytes, to, q5_1 of 32),
            StoredType::Q2K => each_block!(bytes, to, q2_k of 256),
            StoredType::Q3K => each_block!(bytes, to, q3_k of 256),
            StoredType::Q4K => each_block!(bytes, to, q4_k of 256),
            StoredType::Q5K => each_block!(bytes, to, q5_k of 256),
            StoredType::Q6K => each_block!(bytes, to, q6_k of 256),
        }
        // Floats that fill no vector.
        let (width, done) = match dtype {
            StoredType::F16 | StoredType::BF16 => (2, to.len().min(bytes.len() / 2) / FLOATS * FLOATS),
            _ => return,
        };
        for (y, x) in to[done..].iter_mut().zip(bytes[width * done..].as_chunks::<2>().0) {
            let high = f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
            *y = if dtype == StoredType::F16 { half_at(x, 0) } else { high };
        }
    }
}

/// Floats of 16 bits that are decoded at a time.
const FLOATS: usize = 16;

/// Decodes 16 elements of f16.
///
/// # Safety
/// The caller is compiled for `S`.
#[inline(always)]
unsafe fn halves<S: Simd>(block: &[u8; 2 * FLOATS], y: &mut [f32; FLOATS]) {
    for i in (0..FLOATS).step_by(S::LANES) {
        // SAFETY: `i + LANES <= FLOATS`, and vectors are loaded from any address.
        unsafe { S::store(y.as_mut_ptr().add(i), S::load_f16(block.as_ptr().add(2 * i).cast())) };
    }
}

/// Decodes 16 elements of bf16.
///
/// # Safety
/// The caller is compiled for `S`.
#[inline(always)]
unsafe fn brains<S: Simd>(block: &[u8; 2 * FLOATS], y: &mut [f32; FLOATS]) {
    for i in (0..FLOATS).step_by(S::LANES) {
        // SAFETY: `i + LANES <= FLOATS`, and vectors are loaded from any address.
        unsafe { S::store(y.as_mut_ptr().add(i), S::load_bf16(block.as_ptr().add(2 * i).cast())) };
    }
}

/// Returns the f16 at a byte of a block, without a branch.
///
/// (Marat Dukhan's FP16 library describes the arithmetic: normal numbers by a change of the exponent's bias, denormal ones by
/// a subtraction.)
#[inline(always)]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([block[at], block[at + 1]])) << 16;
    let (sign, twice) = (bits & 0x8000_0000, bits << 1);
    let normal = f32::from_bits((twice >> 4).wrapping_add(0xe0 << 23)) * f32::from_bits(0x0780_0000);
    let denormal = f32::from_bits((twice >> 17) | (126 << 23)) - 0.5;
    let magnitude = if twice < 1 << 27 { denormal } else { normal };
    f32::from_bits(sign | magnitude.to_bits())
}

/// Splits 16 bytes into their low and their high halves.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [i8; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = (bytes[j] & 15).cast_signed();
        q[j + 16] = (bytes[j] >> 4).cast_signed();
    }
    q
}

/// Splits 16 bytes as [`nibbles`] does, and adds the bits of `high` as fifth ones.
#[inline(always)]
fn fives(bytes: &[u8], high: u32) -> [i8; 32] {
    let mut q = nibbles(bytes);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (((high >> j) & 1) << 4) as i8;
    }
    q
}

/// Takes the elements of a block: stores them, or multiplies them.
pub(super) trait Sink<S: Simd> {
    /// Takes the elements `d · q + m` from `at` on, counted from the start of the block. `N` is 16 or 32.
    ///
    /// # Safety
    /// The caller is compiled for `S`. The sink has room for the block.
    unsafe fn group<const N: usize>(&mut self, at: usize, q: &[i8; N], d: f32, m: f32);
}

/// Stores elements, rounded after each step.
struct Store<'a, const N: usize>(&'a mut [f32; N]);

impl<S: Simd, const B: usize> Sink<S> for Store<'_, B> {
    #[inline(always)]
    unsafe fn group<const N: usize>(&mut self, at: usize, q: &[i8; N], d: f32, m: f32) {
        let y = &mut self.0[at..at + N];
        // SAFETY: `i + LANES <= N`: all `N` are multiples of 16, which all numbers of lanes divide.
        unsafe {
            let (d, m) = (S::splat(d), S::splat(m));
            for i in (0..N).step_by(S::LANES) {
                let q = S::load_i8(q.as_ptr().add(i));
                S::store(y.as_mut_ptr().add(i), S::add(S::mul(d, q), m));
            }
        }
    }
}

/// Defines the reader of a format, `unsafe` because the caller is compiled for `S`, and the sink has room for the block.
macro_rules! format {
    ($(#[$doc:meta])* $name:ident($block:ident: $bytes:literal, $sink:ident) $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The caller is compiled for `S`. The sink has room for the block.
        #[inline(always)]
        pub(super) unsafe fn $name<S: Simd, G: Sink<S>>($block: &[u8; $bytes], $sink: &mut G) {
            // SAFETY: the caller is compiled for `S`, and groups lie within the block.
            unsafe { $body }
        }
    };
}

format! {
    /// A factor, and 32 signed bytes.
    q8_0(block: 34, sink) {
        let mut q = [0; 32];
        q.copy_from_slice(bytemuck::cast_slice(&block[2..]));
        sink.group(0, &q, half_at(block, 0), 0.0);
    }
}

format! {
    /// A factor, and 32 elements of four bits, 8 for zero.
    q4_0(block: 18, sink) {
        let mut q = nibbles(&block[2..]);
        for q in &mut q {
            *q -= 8;
        }
        sink.group(0, &q, half_at(block, 0), 0.0);
    }
}

format! {
    /// A factor, a minimum, and 32 elements of four bits.
    q4_1(block: 20, sink) {
        sink.group(0, &nibbles(&block[4..]), half_at(block, 0), half_at(block, 2));
    }
}

format! {
    /// A factor, 32 fifth bits, and 32 elements of four bits, 16 for zero.
    q5_0(block: 22, sink) {
        let mut q = fives(&block[6..], pod_read_unaligned(&block[2..6]));
        for q in &mut q {
            *q -= 16;
        }
        sink.group(0, &q, half_at(block, 0), 0.0);
    }
}

format! {
    /// A factor, a minimum, 32 fifth bits, and 32 elements of four bits.
    q5_1(block: 24, sink) {
        let q = fives(&block[8..], pod_read_unaligned(&block[4..8]));
        sink.group(0, &q, half_at(block, 0), half_at(block, 2));
    }
}

format! {
    /// 16 scales with minima in four bits each, 64 bytes of two bits, and two factors.
    q2_k(block: 84, sink) {
        let (d, minimum) = (half_at(block, 80), half_at(block, 82));
        for group in 0..16 {
            let (half, pair, side) = (group / 8, group % 8 / 2, group % 2);
            let bytes = &block[16 + 32 * half + 16 * side..];
            let mut q = [0; 16];
            for (q, byte) in q.iter_mut().zip(bytes) {
                *q = ((byte >> (2 * pair)) & 3).cast_signed();
            }
            let scale = block[group];
            sink.group::<16>(16 * group, &q, d * f32::from(scale & 15), -(minimum * f32::from(scale >> 4)));
        }
    }
}

format! {
    /// 32 bytes of third bits, 64 bytes of two bits, 16 scales of six bits, and a factor.
    q3_k(block: 110, sink) {
        let (d, packed) = (half_at(block, 108), &block[96..108]);
        for group in 0..16 {
            let (half, pair, side) = (group / 8, group % 8 / 2, group % 2);
            let (low, high) = (&block[32 + 32 * half + 16 * side..], &block[16 * side..]);
            let mut q = [0; 16];
            for (l, q) in q.iter_mut().enumerate() {
                let third = (high[l] >> (4 * half + pair)) & 1;
                *q = (((low[l] >> (2 * pair)) & 3) | (third << 2)).cast_signed() - 4;
            }
            let low = (packed[group % 8] >> (4 * (group / 8))) & 15;
            let high = (packed[8 + group % 4] >> (2 * (group / 4))) & 3;
            sink.group::<16>(16 * group, &q, d * (f32::from(low | (high << 4)) - 32.0), 0.0);
        }
    }
}

/// Returns the scale and the minimum, of six bits each, of a group of `Q4_K` and `Q5_K`.
#[inline(always)]
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let (low, high) = (packed[group + 4], [packed[group - 4] >> 6, packed[group] >> 6]);
        ((low & 15) | (high[0] << 4), (low >> 4) | (high[1] << 4))
    };
    (f32::from(scale), f32::from(minimum))
}

format! {
    /// Two factors, eight scales with minima in six bits each, and 256 elements of four bits.
    q4_k(block: 144, sink) {
        let (d, minimum) = (half_at(block, 0), half_at(block, 2));
        for group in 0..8 {
            let mut q = [0; 32];
            for (q, byte) in q.iter_mut().zip(&block[16 + 32 * (group / 2)..]) {
                *q = ((byte >> (4 * (group % 2))) & 15).cast_signed();
            }
            let (scale, least) = scale_and_minimum(&block[4..16], group);
            sink.group::<32>(32 * group, &q, d * scale, -(minimum * least));
        }
    }
}

format! {
    /// As `Q4_K`, with 32 bytes of fifth bits.
    q5_k(block: 176, sink) {
        let (d, minimum) = (half_at(block, 0), half_at(block, 2));
        for group in 0..8 {
            let (low, high) = (&block[48 + 32 * (group / 2)..], &block[16..48]);
            let mut q = [0; 32];
            for (l, q) in q.iter_mut().enumerate() {
                let fifth = (high[l] >> group) & 1;
                *q = (((low[l] >> (4 * (group % 2))) & 15) | (fifth << 4)).cast_signed();
            }
            let (scale, least) = scale_and_minimum(&block[4..16], group);
            sink.group::<32>(32 * group, &q, d * scale, -(minimum * least));
        }
    }
}

format! {
    /// 128 bytes of four bits, 64 of two, 16 signed scales, and a factor.
    q6_k(block: 210, sink) {
        let d = half_at(block, 208);
        for group in 0..16 {
            // A half has four runs of 32 elements: the low nibbles of 64 bytes, and after them the high ones.
            let (half, run, side) = (group / 8, group % 8 / 2, group % 2);
            let low = &block[64 * half + 32 * (run % 2) + 16 * side..];
            let high = &block[128 + 32 * half + 16 * side..];
            let mut q = [0; 16];
            for (l, q) in q.iter_mut().enumerate() {
                let six = ((low[l] >> (4 * (run / 2))) & 15) | (((high[l] >> (2 * run)) & 3) << 4);
                *q = six.cast_signed() - 32;
            }
            sink.group::<16>(16 * group, &q, d * f32::from(block[192 + group].cast_signed()), 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn every_half_is_read_exactly() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (half_at(&bits.to_le_bytes(), 0), f16::from_bits(bits).to_f32());
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{bits:#x}: {got} and {expected}");
        }
    }

    #[test]
    fn what_lies_beyond_whole_blocks_stays() {
        let mut to = [7.0; 40];
        StoredType::Q8_0.decode(&[0; 34 + 5], &mut to);
        assert_eq!((&to[..32], &to[32..]), (&[0.0; 32][..], &[7.0; 8][..]));
    }
}
