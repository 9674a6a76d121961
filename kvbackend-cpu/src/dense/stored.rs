//! Decodes the elements of stored matrices: floats, and ggml blocks.

use bytemuck::pod_read_unaligned;

use super::types::StoredType;
use crate::simd::{AvailableLevel, Simd, SimdTask, from_f16};

impl StoredType {
    /// Decodes elements to f32. Floats are decoded exactly. Stops at the end of `bytes` or `to`, whichever
    /// comes first.
    pub fn decode(self, bytes: &[u8], to: &mut [f32]) {
        // SAFETY: the task has no safety conditions.
        unsafe { AvailableLevel::best().run(DecodeRows { dtype: self, bytes, to }) };
    }
}

/// A task that decodes the elements of rows to f32.
///
/// Decodes as many whole blocks as there are in `bytes` and fit in `to`, and ignores the remaining bytes.
struct DecodeRows<'a> {
    dtype: StoredType,
    bytes: &'a [u8],
    to: &'a mut [f32],
}

impl SimdTask for DecodeRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller is compiled for `S`, by contract.
        unsafe { decode::<S>(self.dtype, self.bytes, self.to) }
    }
}

/// Calls a function with each block and the slice for its decoded elements. The function cannot be a closure,
/// because closures are not compiled for the caller's instruction set.
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

/// Decodes rows like [`StoredType::decode`].
///
/// # Safety
/// The caller must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd>(dtype: StoredType, bytes: &[u8], to: &mut [f32]) {
    // SAFETY: the caller is compiled for `S`, and a sink has room for a block's elements.
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
            StoredType::Iq4Nl => each_block!(bytes, to, iq4_nl of 32),
            StoredType::Q4_1 => each_block!(bytes, to, q4_1 of 32),
            StoredType::Q5_0 => each_block!(bytes, to, q5_0 of 32),
            StoredType::Q5_1 => each_block!(bytes, to, q5_1 of 32),
            StoredType::Q2K => each_block!(bytes, to, q2_k of 256),
            StoredType::Q3K => each_block!(bytes, to, q3_k of 256),
            StoredType::Q4K => each_block!(bytes, to, q4_k of 256),
            StoredType::Q5K => each_block!(bytes, to, q5_k of 256),
            StoredType::Q6K => each_block!(bytes, to, q6_k of 256),
        }
        // Decode the remaining floats, which do not fill a vector.
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

/// Number of 16-bit floats to decode at a time.
const FLOATS: usize = 16;

/// Decodes 16 f16 elements.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn halves<S: Simd>(block: &[u8; 2 * FLOATS], y: &mut [f32; FLOATS]) {
    for i in (0..FLOATS).step_by(S::LANES) {
        // SAFETY: `i + LANES <= FLOATS`, and vector loads need no alignment.
        unsafe { S::store(y.as_mut_ptr().add(i), S::load_f16(block.as_ptr().add(2 * i).cast())) };
    }
}

/// Decodes 16 bf16 elements.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn brains<S: Simd>(block: &[u8; 2 * FLOATS], y: &mut [f32; FLOATS]) {
    for i in (0..FLOATS).step_by(S::LANES) {
        // SAFETY: `i + LANES <= FLOATS`, and vector loads need no alignment.
        unsafe { S::store(y.as_mut_ptr().add(i), S::load_bf16(block.as_ptr().add(2 * i).cast())) };
    }
}

/// Returns the bits of the f16 at byte `at` of a block.
#[inline(always)]
fn bits_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The sign bit of an f16.
const SIGN: u16 = 0x8000;

/// Returns the f16 at byte `at` of a block.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    from_f16(bits_at(block, at))
}

/// Splits 16 bytes into their low halves and their high halves, and adds a fifth bit from `high` to each
/// half.
#[inline(always)]
fn fives(bytes: &[u8], high: u32) -> [i8; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = (bytes[j] & 15).cast_signed();
        q[j + 16] = (bytes[j] >> 4).cast_signed();
    }
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (((high >> j) & 1) << 4) as i8;
    }
    q
}

/// The factor and minimum of a group of elements. An element is `factor · q + minimum`.
#[derive(Clone, Copy)]
pub(super) struct BlockFactors<V> {
    /// Index of the first element within the block, a multiple of 16.
    pub at: usize,
    pub factor: V,
    pub minimum: Option<V>,
}

/// A consumer of block elements, for example one that stores or multiplies them.
pub(super) trait Sink<S: Simd> {
    /// Consumes `LANES` elements of a group, starting at `i`, and returns the updated `sum`.
    ///
    /// # Safety
    /// The caller must be compiled for `S`. The elements must be inside the block.
    unsafe fn take(&mut self, group: BlockFactors<S::V>, i: usize, q: S::V, sum: S::V) -> S::V;

    /// Ends a group of `elements` elements, a multiple of 16. `sum` must be the last result of
    /// [`take`](Self::take).
    ///
    /// # Safety
    /// The same as for [`take`](Self::take).
    unsafe fn end(&mut self, group: BlockFactors<S::V>, elements: usize, sum: S::V);
}

/// Decodes elements and stores them. The multiplication and the addition are rounded separately, not fused.
struct Store<'a, const N: usize>(&'a mut [f32; N]);

impl<S: Simd, const N: usize> Sink<S> for Store<'_, N> {
    #[inline(always)]
    unsafe fn take(&mut self, group: BlockFactors<S::V>, i: usize, q: S::V, sum: S::V) -> S::V {
        // SAFETY: the elements are inside the block by contract, and the slice has room for them.
        unsafe {
            let scaled = S::mul(group.factor, q);
            let element = match group.minimum {
                Some(minimum) => S::add(scaled, minimum),
                None => scaled,
            };
            S::store(self.0[group.at + i..][..S::LANES].as_mut_ptr(), element);
        }
        sum
    }

    #[inline(always)]
    unsafe fn end(&mut self, _: BlockFactors<S::V>, _: usize, _: S::V) {}
}

/// Passes a group of signed bytes to a sink.
///
/// # Safety
/// The same as for [`Sink::take`]. `N` must be a multiple of 16.
#[inline(always)]
unsafe fn bytes<S: Simd, G: Sink<S>, const N: usize>(sink: &mut G, group: BlockFactors<S::V>, q: &[i8; N]) {
    // SAFETY: `i + LANES <= N`, since `LANES` divides 16.
    unsafe {
        let mut sum = S::splat(0.0);
        for i in (0..N).step_by(S::LANES) {
            sum = sink.take(group, i, S::load_i8(q.as_ptr().add(i)), sum);
        }
        sink.end(group, N, sum);
    }
}

/// Passes a group of 32 elements to a sink: the low halves of 16 bytes, then the high halves. `zero` is
/// subtracted from each element.
///
/// # Safety
/// The same as for [`bytes`].
#[inline(always)]
unsafe fn nibbles<S: Simd, G: Sink<S>>(sink: &mut G, group: BlockFactors<S::V>, q: &[u8; 16], zero: S::V) {
    // SAFETY: `i + LANES <= 16`, since `LANES` divides 16.
    unsafe {
        let mut sum = S::splat(0.0);
        for i in (0..16).step_by(S::LANES) {
            let [low, high] = S::load_nibbles(q.as_ptr().add(i));
            sum = sink.take(group, i, S::sub(low, zero), sum);
            sum = sink.take(group, i + 16, S::sub(high, zero), sum);
        }
        sink.end(group, 32, sum);
    }
}

/// Defines the reader of a block format. The reader is `unsafe` because the caller must be compiled for `S`,
/// and the sink must have room for the block.
macro_rules! format {
    ($(#[$doc:meta])* $name:ident($block:ident: $bytes:literal, $sink:ident) $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The caller must be compiled for `S`. The sink must have room for the block.
        #[inline(always)]
        pub(super) unsafe fn $name<S: Simd, G: Sink<S>>($block: &[u8; $bytes], $sink: &mut G) {
            // SAFETY: the caller is compiled for `S`. Groups and loads stay inside the block.
            unsafe { $body }
        }
    };
}

format! {
    /// A factor, and 32 signed bytes.
    q8_0(block: 34, sink) {
        let factor = S::splat_f16(bits_at(block, 0));
        bytes::<S, G, 32>(sink, BlockFactors { at: 0, factor, minimum: None }, &*block.as_ptr().add(2).cast());
    }
}

format! {
    /// A factor, and 32 4-bit elements; 8 means zero.
    q4_0(block: 18, sink) {
        let factor = S::splat_f16(bits_at(block, 0));
        let group = BlockFactors { at: 0, factor, minimum: None };
        nibbles(sink, group, &*block.as_ptr().add(2).cast(), S::splat(8.0));
    }
}

/// The values of `IQ4_NL`'s elements.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

format! {
    /// A factor, and 32 4-bit indices into [`VALUES`].
    iq4_nl(block: 18, sink) {
        let mut q = fives(&block[2..], 0);
        for q in &mut q {
            *q = VALUES[usize::from(q.cast_unsigned() & 15)];
        }
        bytes(sink, BlockFactors { at: 0, factor: S::splat_f16(bits_at(block, 0)), minimum: None }, &q);
    }
}

format! {
    /// A factor, a minimum, and 32 4-bit elements.
    q4_1(block: 20, sink) {
        let (factor, minimum) = (S::splat_f16(bits_at(block, 0)), Some(S::splat_f16(bits_at(block, 2))));
        let group = BlockFactors { at: 0, factor, minimum };
        nibbles(sink, group, &*block.as_ptr().add(4).cast(), S::splat(0.0));
    }
}

format! {
    /// A factor, 32 fifth bits, and 32 4-bit elements. Elements have an offset of 16.
    q5_0(block: 22, sink) {
        let mut q = fives(&block[6..], pod_read_unaligned(&block[2..6]));
        for q in &mut q {
            *q -= 16;
        }
        bytes(sink, BlockFactors { at: 0, factor: S::splat_f16(bits_at(block, 0)), minimum: None }, &q);
    }
}

format! {
    /// A factor, a minimum, 32 fifth bits, and 32 4-bit elements.
    q5_1(block: 24, sink) {
        let q = fives(&block[8..], pod_read_unaligned(&block[4..8]));
        let (factor, minimum) = (S::splat_f16(bits_at(block, 0)), Some(S::splat_f16(bits_at(block, 2))));
        bytes(sink, BlockFactors { at: 0, factor, minimum }, &q);
    }
}

/// Converts 16 signed bytes, which are packed in two words, to f32.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn sixteen<S: Simd>(words: [u64; 2]) -> [f32; 16] {
    let q: [i8; 16] = bytemuck::cast(words.map(u64::to_le));
    let mut numbers = [0.0; 16];
    for i in (0..16).step_by(S::LANES) {
        // SAFETY: the caller is compiled for `S` by contract, and `LANES` divides 16, the length of both
        // arrays.
        unsafe { S::store(numbers.as_mut_ptr().add(i), S::load_i8(q.as_ptr().add(i))) };
    }
    numbers
}

/// Returns eight bytes of a block as a little-endian word.
#[inline(always)]
fn word_at(block: &[u8], at: usize) -> u64 {
    u64::from_le(pod_read_unaligned(&block[at..at + 8]))
}

/// Returns a word with the same value in every byte.
const fn each(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

format! {
    /// 16 4-bit scales and 16 4-bit minima, 64 bytes of 2-bit elements, and two factors.
    q2_k(block: 84, sink) {
        let (d, least) = (S::splat_f16(bits_at(block, 80)), S::splat_f16(bits_at(block, 82) ^ SIGN));
        let packed = [word_at(block, 0), word_at(block, 8)];
        let scales = sixteen::<S>(packed.map(|word| word & each(15)));
        let minima = sixteen::<S>(packed.map(|word| (word >> 4) & each(15)));
        for group in 0..16 {
            let (half, run, side) = (group / 8, group % 8 / 2, group % 2);
            let q = block.as_ptr().add(16 + 32 * half + 16 * side);
            let factor = S::mul(d, S::splat(scales[group]));
            let minimum = Some(S::mul(least, S::splat(minima[group])));
            let (of, mut sum) = (BlockFactors { at: 16 * group, factor, minimum }, S::splat(0.0));
            for i in (0..16).step_by(S::LANES) {
                sum = sink.take(of, i, S::load_bits(q.add(i), 2 * run, 3), sum);
            }
            sink.end(of, 16, sum);
        }
    }
}

format! {
    /// 32 bytes of third bits, 64 bytes of 2-bit elements, 16 6-bit scales, and a factor.
    q3_k(block: 110, sink) {
        let (d, four) = (S::splat_f16(bits_at(block, 108)), word_at(block, 96));
        // Each byte holds the upper two bits of four scales.
        let top = u64::from(u32::from_le(pod_read_unaligned(&block[104..108])));
        let top = [top | ((top >> 2) << 32), (top >> 4) | ((top >> 6) << 32)];
        let scales = sixteen::<S>([
            (four & each(15)) | ((top[0] & each(3)) << 4),
            ((four >> 4) & each(15)) | ((top[1] & each(3)) << 4),
        ]);
        for (group, scale) in scales.iter().enumerate() {
            let (half, run, side) = (group / 8, group % 8 / 2, group % 2);
            let (low, high) = (block.as_ptr().add(32 + 32 * half + 16 * side), block.as_ptr().add(16 * side));
            let factor = S::mul(d, S::splat(scale - 32.0));
            let (of, mut sum) = (BlockFactors { at: 16 * group, factor, minimum: None }, S::splat(0.0));
            for i in (0..16).step_by(S::LANES) {
                // If the third bit of an element is 0, four is subtracted from the element.
                let two = S::sub(S::load_bits(low.add(i), 2 * run, 3), S::splat(4.0));
                let third = S::load_bits(high.add(i), 4 * half + run, 1);
                sum = sink.take(of, i, S::mul_add(third, S::splat(4.0), two), sum);
            }
            sink.end(of, 16, sum);
        }
    }
}

/// Returns the eight 6-bit scales, and then the eight 6-bit minima, of a `Q4_K` or `Q5_K` block.
///
/// # Safety
/// The caller must be compiled for `S`.
#[inline(always)]
unsafe fn scales_and_minima<S: Simd>(block: &[u8]) -> [f32; 16] {
    let word = |at: usize| u32::from_le(pod_read_unaligned(&block[at..at + 4]));
    let (first, last) = ([word(4), word(8)], word(12));
    // The first four scales and minima are the low six bits of a byte each. Each of the last four has its low
    // four bits in half a byte, and its upper two bits above one of the first four.
    let top = first.map(|word| ((word >> 6) & 0x0303_0303) << 4);
    let last = [(last & 0x0f0f_0f0f) | top[0], ((last >> 4) & 0x0f0f_0f0f) | top[1]];
    let eight = |i: usize| u64::from(first[i] & 0x3f3f_3f3f) | (u64::from(last[i]) << 32);
    // SAFETY: the caller is compiled for `S`, by contract.
    unsafe { sixteen::<S>([eight(0), eight(1)]) }
}

/// Passes a `Q4_K` or `Q5_K` block to a sink. 4-bit elements begin at byte `four`, fifth bits at `fifth`.
///
/// # Safety
/// The same as for [`bytes`]. `fifth` must have 32 bytes.
#[inline(always)]
unsafe fn fours<S: Simd, G: Sink<S>>(sink: &mut G, block: &[u8], four: usize, fifth: Option<*const u8>) {
    // SAFETY: the caller is compiled for `S`. Groups and loads stay inside the block.
    unsafe {
        let (d, least) = (S::splat_f16(bits_at(block, 0)), S::splat_f16(bits_at(block, 2) ^ SIGN));
        let numbers = scales_and_minima::<S>(block);
        for pair in 0..4 {
            let (at, at_high) = (2 * pair, 2 * pair + 1);
            let factor = S::mul(d, S::splat(numbers[at]));
            let minimum = Some(S::mul(least, S::splat(numbers[at + 8])));
            let low = BlockFactors { at: 32 * at, factor, minimum };
            let factor = S::mul(d, S::splat(numbers[at_high]));
            let minimum = Some(S::mul(least, S::splat(numbers[at_high + 8])));
            let high = BlockFactors { at: 32 * at_high, factor, minimum };
            let q = block[four + 32 * pair..][..32].as_ptr();
            let (mut sum, mut sum_high) = (S::splat(0.0), S::splat(0.0));
            for i in (0..32).step_by(S::LANES) {
                let [mut of_low, mut of_high] = S::load_nibbles(q.add(i));
                if let Some(fifth) = fifth {
                    let unit = S::splat(16.0);
                    of_low = S::mul_add(S::load_bits(fifth.add(i), at, 1), unit, of_low);
                    of_high = S::mul_add(S::load_bits(fifth.add(i), at_high, 1), unit, of_high);
                }
                sum = sink.take(low, i, of_low, sum);
                sum_high = sink.take(high, i, of_high, sum_high);
            }
            sink.end(low, 32, sum);
            sink.end(high, 32, sum_high);
        }
    }
}

format! {
    /// Two factors, eight 6-bit scales, eight 6-bit minima, and 256 4-bit elements.
    q4_k(block: 144, sink) {
        fours::<S, G>(sink, block, 16, None);
    }
}

format! {
    /// Like `Q4_K`, plus 32 bytes of fifth bits.
    q5_k(block: 176, sink) {
        fours::<S, G>(sink, block, 48, Some(block.as_ptr().add(16)));
    }
}

format! {
    /// 128 bytes with four bits per element, 64 bytes with two more bits per element, 16 signed scales, and a
    /// factor.
    q6_k(block: 210, sink) {
        let d = S::splat_f16(bits_at(block, 208));
        let scales = sixteen::<S>([word_at(block, 192), word_at(block, 200)]);
        // Each half has four runs of 32 elements: the low halves of 64 bytes, then the high halves.
        for pair in 0..8 {
            let (half, run, side) = (pair / 4, pair / 2 % 2, pair % 2);
            let low = block.as_ptr().add(64 * half + 32 * run + 16 * side);
            let high = block.as_ptr().add(128 + 32 * half + 16 * side);
            let at = 8 * half + 2 * run + side;
            let first = BlockFactors { at: 16 * at, factor: S::mul(d, S::splat(scales[at])), minimum: None };
            let factor = S::mul(d, S::splat(scales[at + 4]));
            let second = BlockFactors { at: 16 * (at + 4), factor, minimum: None };
            let (mut sum, mut sum_second) = (S::splat(0.0), S::splat(0.0));
            for i in (0..16).step_by(S::LANES) {
                let [four, four_second] = S::load_nibbles(low.add(i));
                let (unit, zero) = (S::splat(16.0), S::splat(32.0));
                let six = S::mul_add(S::load_bits(high.add(i), 2 * run, 3), unit, S::sub(four, zero));
                let two = S::load_bits(high.add(i), 2 * run + 4, 3);
                let six_second = S::mul_add(two, unit, S::sub(four_second, zero));
                sum = sink.take(first, i, six, sum);
                sum_second = sink.take(second, i, six_second, sum_second);
            }
            sink.end(first, 16, sum);
            sink.end(second, 16, sum_second);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_after_the_last_whole_block_stay() {
        let mut to = [7.0; 40];
        StoredType::Q8_0.decode(&[0; 34 + 5], &mut to);
        assert_eq!((&to[..32], &to[32..]), (&[0.0; 32][..], &[7.0; 8][..]));
    }
}
