//! Vectors with eight lanes in plain Rust, which are compiled to the instructions available to the whole
//! program.

use half::{bf16, f16};
use kvcore::Fp8Kind;

use super::{E4M3_NAN, E4M3_UNIT, Simd, SimdTask, from_f16};

/// The instruction set that the program is compiled for.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const LANES: usize = 8;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const STREAMS: bool = false;

    #[inline(never)]
    unsafe fn call<T: SimdTask>(task: T) -> T::Output {
        // SAFETY: `Self` needs only the instructions that the program is compiled for; the caller guarantees
        // the conditions of `task`.
        unsafe { task.run::<Self>() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] / b[i])
    }

    /// Fuses the operations only if there is an instruction that does so, because otherwise each fused
    /// operation would be a function call.
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    /// Adds and subtracts 1.5 · 2²³, which rounds away all fraction bits. This is correct for |a| < 2²².
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        const MAGIC: f32 = 12_582_912.0;
        each(|i| (a[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V {
        each(|i| a[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        (a[0] + a[4] + (a[2] + a[6])) + (a[1] + a[5] + (a[3] + a[7]))
    }

    #[inline(always)]
    unsafe fn largest(a: Self::V) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |m, &x| if m > x { m } else { x })
    }

    #[inline(always)]
    unsafe fn transpose(square: &mut [Self::V; 16]) {
        let before = *square;
        for (i, row) in square[..LANES].iter_mut().enumerate() {
            *row = each(|j| before[j][i]);
        }
    }

    #[inline(always)]
    unsafe fn swap_pairs(a: Self::V) -> Self::V {
        each(|i| a[i ^ 1])
    }

    #[inline(always)]
    unsafe fn load_twice(from: *const f32) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES / 2` elements, and `i / 2 < LANES / 2`.
        each(|i| unsafe { from.add(i / 2).read() })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` elements and aligned for f32, and an
        // array of f32 needs no larger alignment.
        unsafe { from.cast::<Self::V>().read() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, a: Self::V) {
        // SAFETY: by contract, `to` is valid for writes of `LANES` elements and aligned for f32, and an array
        // of f32 needs no larger alignment.
        unsafe { to.cast::<Self::V>().write(a) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` elements, and `i < LANES`.
        each(|i| unsafe { f32::from_bits(u32::from(from.add(i).read()) << 16) })
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, a: Self::V) {
        // SAFETY: by contract, `to` is valid for writes of `LANES` elements, and `i < LANES`.
        (0..LANES).for_each(|i| unsafe { to.add(i).write(bf16::from_f32(a[i]).to_bits()) });
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` elements, and `i < LANES`.
        each(|i| unsafe { f16::from_bits(from.add(i).read()).to_f32() })
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, a: Self::V) {
        // SAFETY: by contract, `to` is valid for writes of `LANES` elements, and `i < LANES`.
        (0..LANES).for_each(|i| unsafe { to.add(i).write(f16::from_f32(a[i]).to_bits()) });
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` elements, and `i < LANES`.
        each(|i| unsafe { f32::from(from.add(i).read()) })
    }

    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self::V {
        [from_f16(bits); LANES]
    }

    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> [Self::V; 2] {
        // SAFETY: by contract, `from` is valid for reads of `LANES` bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read() };
        [each(|i| f32::from(bytes[i] & 15)), each(|i| f32::from(bytes[i] >> 4))]
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: usize, mask: u8) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read() };
        each(|i| f32::from((bytes[i] >> shift) & mask))
    }

    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES / 2` bytes.
        let codes = u32::from_le_bytes(unsafe { from.cast::<[u8; LANES / 2]>().read() });
        each(|i| (((codes << (28 - 4 * i)).cast_signed()) >> 28) as f32)
    }

    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` codes, and `i < LANES`.
        each(|i| Fp8Kind::E4M3.decode(unsafe { from.add(i).read() }) / E4M3_UNIT)
    }

    #[inline(always)]
    unsafe fn any_nan_e4m3(rows: &[*const u8], offset: usize, n: usize) -> bool {
        rows.iter().any(|row| {
            // SAFETY: by contract, each row is valid for reads of `n` codes after `offset`.
            let codes = unsafe { std::slice::from_raw_parts(row.add(offset), n) };
            codes.iter().fold(0, |largest, code| (code & E4M3_NAN).max(largest)) == E4M3_NAN
        })
    }

    #[inline(always)]
    unsafe fn load_e5m2(from: *const u8) -> Self::V {
        // SAFETY: by contract, `from` is valid for reads of `LANES` codes, and `i < LANES`.
        each(|i| Fp8Kind::E5M2.decode(unsafe { from.add(i).read() }))
    }

    #[inline(always)]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        // SAFETY: by contract, `from` is valid for reads of 64 bytes and `to` for writes of 64 bytes.
        unsafe { to.cast::<[u64; 8]>().write_unaligned(from.cast::<[u64; 8]>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn fence() {}

    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_at: *const u8) {}
}
