// Conversions of 16-bit floating-point elements on raw bits, rounded to nearest even as on the device.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.hpp"

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }

inline float f16_to_f32(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t exponent = (x >> 10) & 0x1fu;
    const uint32_t fraction = x & 0x3ffu;
    if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
    // A subnormal is its fraction times 2^-24.
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline uint16_t f32_to_f16(float x) {
    const uint32_t bits = __float_as_uint(x);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;                                  // The device's NaN.
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more are infinite.
    if (magnitude < 0x38800000u) {
        // For values below 2^-14, the sum's last place is 2^-24, so the addition rounds to nearest even.
        const float sum = __uint_as_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (__float_as_uint(sum) - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline float bf16_to_f32(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

inline uint16_t f32_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // The device's NaN.
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Packs two elements into a word, with the first one in the low half.
inline uint32_t pack_f16x2(float low, float high) {
    return f32_to_f16(low) | (static_cast<uint32_t>(f32_to_f16(high)) << 16);
}
inline uint32_t pack_bf16x2(float low, float high) {
    return f32_to_bf16(low) | (static_cast<uint32_t>(f32_to_bf16(high)) << 16);
}
inline float2 unpack_f16x2(uint32_t pair) {
    return make_float2(f16_to_f32(static_cast<uint16_t>(pair)), f16_to_f32(static_cast<uint16_t>(pair >> 16)));
}
inline float2 unpack_bf16x2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
