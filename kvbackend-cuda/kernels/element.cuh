// Elements of every storage format as f32, one at a time or eight at once.
//
// A kernel gets the format either at compile time, as the template parameter KIND, or at run time, as an
// integer (`read`, `write`). The integers match `element_kind` in src/kernels/places.rs.
#pragma once

#include "device.cuh"

enum : int { F32 = 0, F16 = 1, BF16 = 2, E4M3 = 3, E5M2 = 4, I8 = 5, I4 = 6 };

// Returns the number of bits per element.
__device__ __forceinline__ constexpr int bits_of(int kind) {
    return kind == F32 ? 32 : kind == I4 ? 4 : kind == F16 || kind == BF16 ? 16 : 8;
}

// Returns the value of an 8-bit float with 4 exponent bits: 448 is the largest, 0x7f is NaN.
__device__ __forceinline__ float e4m3_to_f32(uint32_t code) {
    const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u | sign);
    // Read as an f32, the code's bits have an exponent that is 120 too small. The product that corrects it is
    // exact, even for subnormals.
    const float x = __uint_as_float(magnitude << 20) * __uint_as_float(0x7b800000u);
    return __uint_as_float(__float_as_uint(x) | sign);
}

// Returns the value of an 8-bit float with 5 exponent bits, which is the upper byte of an f16.
__device__ __forceinline__ float e5m2_to_f32(uint32_t code) { return f16_to_f32(static_cast<uint16_t>(code << 8)); }

// Returns the code of the nearest 8-bit float with `mantissa` mantissa bits, ties to even. Finite values
// saturate. Infinities and NaN are kept, except that infinity becomes NaN in E4M3.
__device__ __forceinline__ uint32_t f32_to_fp8(float x, int mantissa, int bias, uint32_t largest, bool infinite) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    if (magnitude == 0x7f800000u) return sign | (infinite ? largest + 1 : 0x7fu);
    const int dropped = 23 - mantissa;
    const uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - bias) << 23;
    uint32_t code;
    if (magnitude < smallest_normal) {
        // A subnormal is a multiple of the smallest value. Adding 2^23 such multiples rounds to even.
        const float step = __uint_as_float(static_cast<uint32_t>(127 + 1 - bias - mantissa) << 23);
        const float scaled = __uint_as_float(magnitude) / step;
        code = __float_as_uint(scaled + 8388608.0f) & 0xffu;
    } else {
        const uint32_t to_even = (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1u);
        code = ((magnitude + to_even) >> dropped) - (static_cast<uint32_t>(127 - bias) << mantissa);
        if (code > largest) code = largest;
    }
    return sign | code;
}
__device__ __forceinline__ uint32_t f32_to_e4m3(float x) { return f32_to_fp8(x, 3, 7, 0x7eu, false); }
__device__ __forceinline__ uint32_t f32_to_e5m2(float x) { return f32_to_fp8(x, 2, 15, 0x7bu, true); }

// Returns the value of the low four bits as a signed integer.
__device__ __forceinline__ float i4_to_f32(uint32_t code) {
    return static_cast<float>(static_cast<int>(code << 28) >> 28);
}

// Returns element `i` of a row that starts at a whole byte, without its scale.
template <int KIND>
__device__ __forceinline__ float load1(const unsigned char* row, int64_t i) {
    if constexpr (KIND == F32) return reinterpret_cast<const float*>(row)[i];
    if constexpr (KIND == F16) return f16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
    if constexpr (KIND == BF16) return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
    if constexpr (KIND == E4M3) return e4m3_to_f32(row[i]);
    if constexpr (KIND == E5M2) return e5m2_to_f32(row[i]);
    if constexpr (KIND == I8) return static_cast<float>(static_cast<int8_t>(row[i]));
    return i4_to_f32(row[i >> 1] >> (i & 1) * 4);
}

// Reads eight elements without their scale. Their address must be a multiple of their size, at most 16 bytes.
template <int KIND>
__device__ __forceinline__ void load8(const unsigned char* at, float (&x)[8]) {
    if constexpr (KIND == F32) {
        const float4 a = reinterpret_cast<const float4*>(at)[0], b = reinterpret_cast<const float4*>(at)[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else if constexpr (KIND == F16 || KIND == BF16) {
        const uint4 words = *reinterpret_cast<const uint4*>(at);
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = KIND == F16 ? unpack_f16x2(pairs[i]) : unpack_bf16x2(pairs[i]);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
    } else if constexpr (KIND == I4) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(at);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = i4_to_f32(word >> 4 * i);
    } else {
        const uint2 words = *reinterpret_cast<const uint2*>(at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t code = (i < 4 ? words.x : words.y) >> 8 * (i & 3) & 0xffu;
            x[i] = KIND == E4M3   ? e4m3_to_f32(code)
                   : KIND == E5M2 ? e5m2_to_f32(code)
                                  : static_cast<float>(static_cast<int8_t>(code));
        }
    }
}

// Returns element `i` of a row in any format, without its scale.
__device__ __forceinline__ float read(int kind, const unsigned char* row, int64_t i) {
    switch (kind) {
        case F32: return load1<F32>(row, i);
        case F16: return load1<F16>(row, i);
        case BF16: return load1<BF16>(row, i);
        case E4M3: return load1<E4M3>(row, i);
        case E5M2: return load1<E5M2>(row, i);
        case I8: return load1<I8>(row, i);
        default: return load1<I4>(row, i);
    }
}

// Writes element `i` of a row in f32, f16 or bf16, rounded to nearest even.
__device__ __forceinline__ void write(int kind, unsigned char* row, int64_t i, float x) {
    switch (kind) {
        case F32: reinterpret_cast<float*>(row)[i] = x; break;
        case F16: reinterpret_cast<uint16_t*>(row)[i] = f32_to_f16(x); break;
        default: reinterpret_cast<uint16_t*>(row)[i] = f32_to_bf16(x); break;
    }
}

// Writes eight f32, f16 or bf16 elements. Their address must be a multiple of their size, at most 16 bytes.
template <int KIND>
__device__ __forceinline__ void store8(unsigned char* at, const float (&x)[8]) {
    if constexpr (KIND == F32) {
        reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pairs[i] = KIND == F16 ? pack_f16x2(x[2 * i], x[2 * i + 1]) : pack_bf16x2(x[2 * i], x[2 * i + 1]);
        }
        *reinterpret_cast<uint4*>(at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
