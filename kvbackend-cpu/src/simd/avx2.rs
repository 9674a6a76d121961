//! Vectors with eight lanes, for AVX2 with FMA and F16C.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0,
    _MM_HINT_T1, _mm_add_ps, _mm_add_ss, _mm_and_si128, _mm_cvtepi8_epi16, _mm_cvtsi32_si128, _mm_cvtss_f32,
    _mm_loadl_epi64, _mm_loadu_ps, _mm_loadu_si128, _mm_max_ps, _mm_max_ss, _mm_movehdup_ps, _mm_movehl_ps,
    _mm_packus_epi32, _mm_prefetch, _mm_set1_epi16, _mm_setzero_si128, _mm_sfence, _mm_slli_epi16,
    _mm_storeu_ps, _mm_storeu_si128, _mm_unpacklo_epi8, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256,
    _mm256_blendv_epi8, _mm256_castps_si256, _mm256_castps128_ps256, _mm256_castps256_ps128,
    _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cmpeq_epi8, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32,
    _mm256_cvtps_ph, _mm256_div_ps, _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_fmadd_ps,
    _mm256_insertf128_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_epu8, _mm256_max_ps, _mm256_min_ps,
    _mm256_movemask_epi8, _mm256_mul_ps, _mm256_or_si256, _mm256_permute_ps, _mm256_permute2f128_ps,
    _mm256_round_ps, _mm256_set1_epi8, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32,
    _mm256_setzero_si256, _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srai_epi32,
    _mm256_srl_epi32, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_stream_si256, _mm256_sub_ps,
    _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

use super::level::with_avx2;
use super::{E4M3_NAN, Simd, SimdTask};

/// The AVX2 instruction set, with FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[allow(clippy::undocumented_unsafe_blocks, reason = "the contract of Simd covers all of them alike")]
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const STREAMS: bool = true;

    intrinsics! { splat: _mm256_set1_ps, add: _mm256_add_ps, sub: _mm256_sub_ps, mul: _mm256_mul_ps, div: _mm256_div_ps, mul_add: _mm256_fmadd_ps, max: _mm256_max_ps, min: _mm256_min_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps }

    #[inline(always)]
    unsafe fn call<T: SimdTask>(task: T) -> T::Output {
        unsafe { with_avx2(task) }
    }

    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<NEAREST>(a) }
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: __m256, n: __m256) -> __m256 {
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn sum(a: __m256) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    unsafe fn largest(a: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }

    /// Adds while transposing, so that the four sums share most instructions.
    #[inline(always)]
    unsafe fn sum_four(a: __m256, b: __m256, c: __m256, d: __m256) -> [f32; 4] {
        unsafe {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let x = _mm256_add_ps(low, high);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), x);
            sums
        }
    }

    #[inline(always)]
    unsafe fn transpose(square: &mut [__m256; 16]) {
        unsafe {
            // First exchange elements between pairs of rows, then quarters of rows, and finally halves.
            let mut pairs = *square;
            for i in (0..8).step_by(2) {
                pairs[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
                pairs[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
            }
            let mut fours = pairs;
            for i in [0, 4] {
                fours[i] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[i], pairs[i + 2]);
                fours[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[i], pairs[i + 2]);
                fours[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[i + 1], pairs[i + 3]);
                fours[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[i + 1], pairs[i + 3]);
            }
            for i in 0..4 {
                square[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
                square[i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
            }
        }
    }

    #[inline(always)]
    unsafe fn swap_pairs(a: __m256) -> __m256 {
        unsafe { _mm256_permute_ps::<0b10_11_00_01>(a) }
    }

    #[inline(always)]
    unsafe fn load_twice(from: *const f32) -> __m256 {
        unsafe {
            let x = _mm256_castps128_ps256(_mm_loadu_ps(from));
            let (low, high) = (_mm256_unpacklo_ps(x, x), _mm256_unpackhi_ps(x, x));
            _mm256_insertf128_ps::<1>(low, _mm256_castps256_ps128(high))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast::<__m128i>()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    /// Rounds to nearest, ties to even. NaN becomes quiet.
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, a: __m256) {
        unsafe {
            let bits = _mm256_castps_si256(a);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
            let kept: __m256i = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let (low, high) = (_mm256_castsi256_si128(kept), _mm256_extracti128_si256::<1>(kept));
            _mm_storeu_si128(to.cast::<__m128i>(), _mm_packus_epi32(low, high));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast::<__m128i>())) }
    }

    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, a: __m256) {
        unsafe { _mm_storeu_si128(to.cast::<__m128i>(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast::<__m128i>()))) }
    }

    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(bits.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> [__m256; 2] {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast::<__m128i>()));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes))]
        }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: usize, mask: u8) -> __m256 {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast::<__m128i>()));
            let shifted = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(i32::from(mask))))
        }
    }

    /// Shifts each code to the top of its lane and back down, which extends the sign.
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> __m256 {
        unsafe {
            let codes = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
            let top = _mm256_sllv_epi32(codes, _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top))
        }
    }

    /// Moves the seven magnitude bits to the upper bits of an f16, below the top bit of its exponent.
    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> __m256 {
        unsafe {
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast::<__m128i>())));
            _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(!0x4000)))
        }
    }

    #[inline(always)]
    unsafe fn any_nan_e4m3(rows: &[*const u8], offset: usize, n: usize) -> bool {
        unsafe {
            let nan = _mm256_set1_epi8(E4M3_NAN.cast_signed());
            let (mut largest, mut last) = (_mm256_setzero_si256(), 0);
            for row in rows {
                let (row, mut i) = (row.add(offset), 0);
                while i + 32 <= n {
                    let codes = _mm256_loadu_si256(row.add(i).cast::<__m256i>());
                    largest = _mm256_max_epu8(largest, _mm256_and_si256(codes, nan));
                    i += 32;
                }
                for i in i..n {
                    last = last.max(*row.add(i) & E4M3_NAN);
                }
            }
            last == E4M3_NAN || _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, nan)) != 0
        }
    }

    /// Uses each code as the upper half of an f16.
    #[inline(always)]
    unsafe fn load_e5m2(from: *const u8) -> __m256 {
        unsafe {
            let codes = _mm_loadl_epi64(from.cast::<__m128i>());
            _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes))
        }
    }

    #[inline(always)]
    unsafe fn stream_line(to: *mut u8, from: *const u8) {
        unsafe {
            let (from, to) = (from.cast::<__m256i>(), to.cast::<__m256i>());
            let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, a);
            _mm256_stream_si256(to.add(1), b);
        }
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
