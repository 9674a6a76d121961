//! Vectors with sixteen lanes, for AVX-512 F, BW, DQ and VL.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _MM_HINT_T0, _MM_HINT_T1, _mm_add_ps, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch,
    _mm_sfence, _mm_storeu_ps, _mm256_add_ps, _mm256_and_si256, _mm256_castps256_ps128, _mm256_cvtepi8_epi16,
    _mm256_cvtepu8_epi16, _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi16,
    _mm256_slli_epi16, _mm256_storeu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castps256_ps512, _mm512_castps512_ps256, _mm512_castsi128_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cmpeq_epi8_mask, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_cvtps_epi32, _mm512_cvtps_ph, _mm512_div_ps, _mm512_extractf32x8_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_epi32, _mm512_maskz_loadu_epi8, _mm512_max_epu8,
    _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_permute_ps,
    _mm512_permutex2var_epi16, _mm512_permutexvar_epi32, _mm512_permutexvar_ps, _mm512_reduce_add_ps,
    _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setr_epi32, _mm512_setzero_si512, _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_slli_epi32,
    _mm512_srl_epi32, _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_sub_ps, _mm512_unpackhi_ps, _mm512_unpacklo_ps,
};

use super::level::with_avx512;
use super::{E4M3_NAN, Simd, SimdTask};

/// The AVX-512 instruction set: F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// The indices `1, 3, 5, …` of the upper halves of 32-bit elements, in units of 16-bit elements.
const UPPER: [u16; 32] = {
    let mut places = [0; 32];
    let mut i = 0;
    while i < 32 {
        places[i] = 2 * i as u16 + 1;
        i += 1;
    }
    places
};

/// Returns the upper halves of the 32-bit elements of `a`, followed by the upper halves of the elements of
/// `b`.
///
/// # Safety
/// The processor must support AVX-512 F and BW, and the caller must be compiled for them.
#[inline(always)]
pub(crate) unsafe fn upper_halves(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: AVX-512 F and BW are available by contract, and `UPPER` has 32 16-bit elements, a whole vector.
    unsafe {
        let upper = _mm512_loadu_si512(UPPER.as_ptr().cast::<__m512i>());
        _mm512_permutex2var_epi16(a, upper, b)
    }
}

/// The value of each signed 4-bit integer, indexed by its bits.
const NUMBERS_OF_4_BITS: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

/// The value of each unsigned 4-bit integer, indexed by its bits.
const NIBBLES: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// Decision: docs/decisions/backend-cpu.md#conversions-to-bf16-are-integer-arithmetic
/// Rounds each element to bf16, ties to even. The result is in the upper half of the element's bits.
#[inline(always)]
unsafe fn rounded(a: __m512) -> __m512i {
    // SAFETY: AVX-512 F is available by contract, and no pointers are involved.
    unsafe {
        let bits = _mm512_castps_si512(a);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)))
    }
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "the contract of Simd covers all of them alike")]
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const STREAMS: bool = true;

    intrinsics! { splat: _mm512_set1_ps, add: _mm512_add_ps, sub: _mm512_sub_ps, mul: _mm512_mul_ps, div: _mm512_div_ps, mul_add: _mm512_fmadd_ps, max: _mm512_max_ps, min: _mm512_min_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps }

    #[inline(always)]
    unsafe fn call<T: SimdTask>(task: T) -> T::Output {
        unsafe { with_avx512(task) }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<NEAREST>(a) }
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: __m512, n: __m512) -> __m512 {
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    unsafe fn largest(a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }

    /// Adds while transposing. The four sums share instructions and take 13 in total.
    #[inline(always)]
    unsafe fn sum_four(a: __m512, b: __m512, c: __m512, d: __m512) -> [f32; 4] {
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let low = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let x = _mm512_add_ps(low, high);
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), x);
            sums
        }
    }

    #[inline(always)]
    unsafe fn transpose(square: &mut [__m512; 16]) {
        unsafe {
            // First exchange elements between pairs of rows and then between groups of four, as AVX2 does in
            // each quarter. Finally, move the quarters to their positions.
            let mut pairs = *square;
            for i in (0..16).step_by(2) {
                pairs[i] = _mm512_unpacklo_ps(square[i], square[i + 1]);
                pairs[i + 1] = _mm512_unpackhi_ps(square[i], square[i + 1]);
            }
            let mut fours = pairs;
            for i in (0..16).step_by(4) {
                fours[i] = _mm512_shuffle_ps::<0b01_00_01_00>(pairs[i], pairs[i + 2]);
                fours[i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(pairs[i], pairs[i + 2]);
                fours[i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(pairs[i + 1], pairs[i + 3]);
                fours[i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(pairs[i + 1], pairs[i + 3]);
            }
            for i in 0..4 {
                let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(fours[i], fours[i + 4]);
                let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(fours[i], fours[i + 4]);
                let low_b = _mm512_shuffle_f32x4::<0b10_00_10_00>(fours[i + 8], fours[i + 12]);
                let odd_b = _mm512_shuffle_f32x4::<0b11_01_11_01>(fours[i + 8], fours[i + 12]);
                square[i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, low_b);
                square[i + 4] = _mm512_shuffle_f32x4::<0b10_00_10_00>(odd, odd_b);
                square[i + 8] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, low_b);
                square[i + 12] = _mm512_shuffle_f32x4::<0b11_01_11_01>(odd, odd_b);
            }
        }
    }

    #[inline(always)]
    unsafe fn swap_pairs(a: __m512) -> __m512 {
        unsafe { _mm512_permute_ps::<0b10_11_00_01>(a) }
    }

    #[inline(always)]
    unsafe fn load_twice(from: *const f32) -> __m512 {
        unsafe {
            let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(from)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast::<__m256i>()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    /// Rounds to nearest, ties to even. NaN becomes quiet.
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, a: __m512) {
        unsafe {
            let quiet = _mm512_or_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            let kept: __m512i = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded(a), nan, quiet));
            _mm256_storeu_si256(to.cast::<__m256i>(), _mm512_cvtepi32_epi16(kept));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_twice(to: *mut u16, a: __m512, b: __m512) {
        unsafe {
            if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b) != 0 {
                Self::store_bf16(to, a);
                Self::store_bf16(to.add(16), b);
                return;
            }
            let (a, b) = (rounded(a), rounded(b));
            _mm512_storeu_si512(to.cast::<__m512i>(), upper_halves(a, b));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast::<__m256i>())) }
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, a: __m512) {
        unsafe { _mm256_storeu_si256(to.cast::<__m256i>(), _mm512_cvtps_ph::<NEAREST>(a)) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits.cast_signed())) }
    }

    /// Looks up the values of the lowest four bits of each lane, and of the four bits above them.
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> [__m512; 2] {
        unsafe {
            let numbers = _mm512_loadu_ps(NIBBLES.as_ptr());
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast::<__m128i>()));
            let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), numbers);
            [_mm512_permutexvar_ps(bytes, numbers), high]
        }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: usize, mask: u8) -> __m512 {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast::<__m128i>()));
            let shifted = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
            _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(i32::from(mask))))
        }
    }

    /// Shifts each code to the bottom of its lane, and looks up its value.
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> __m512 {
        unsafe {
            let halves = _mm512_castsi128_si512(_mm_loadl_epi64(from.cast::<__m128i>()));
            let places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(places, halves), shifts);
            _mm512_permutexvar_ps(codes, _mm512_loadu_ps(NUMBERS_OF_4_BITS.as_ptr()))
        }
    }

    /// Moves the seven magnitude bits to the upper bits of an f16, below the top bit of its exponent.
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m512 {
        unsafe {
            let codes = _mm_loadu_si128(from.cast::<__m128i>());
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
            _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(!0x4000)))
        }
    }

    #[inline(always)]
    unsafe fn any_nan_e4m3(rows: &[*const u8], offset: usize, n: usize) -> bool {
        unsafe {
            let nan = _mm512_set1_epi8(E4M3_NAN.cast_signed());
            let mut largest = _mm512_setzero_si512();
            for row in rows {
                let row = row.add(offset).cast::<i8>();
                for i in (0..n).step_by(64) {
                    let here = u64::MAX >> (64 - (n - i).min(64));
                    let codes = _mm512_maskz_loadu_epi8(here, row.add(i));
                    largest = _mm512_max_epu8(largest, _mm512_and_si512(codes, nan));
                }
            }
            _mm512_cmpeq_epi8_mask(largest, nan) != 0
        }
    }

    /// Uses each code as the upper half of an f16.
    #[inline(always)]
    unsafe fn load_e5m2(from: *const u8) -> __m512 {
        unsafe {
            let codes = _mm_loadu_si128(from.cast::<__m128i>());
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(codes)))
        }
    }

    #[inline(always)]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        unsafe { _mm512_stream_si512(to.cast::<__m512i>(), _mm512_loadu_si512(from.cast::<__m512i>())) }
    }

    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() };
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast::<i8>()) }
    }
}
