// A model's weights as stored on the device: dense rows, or the codes of ggml blocks with separate scales.
#pragma once

#include "element.cuh"

// Stored types that are not element types. The values match `StoredKind` in src/dense/weight.rs.
enum : int {
    // Signed bytes. Every 32 elements of a row share an f16 scale.
    Q8_0 = 16,
    // Four bits per element; the first of two neighbours is in the low half. Every 32 elements of a row share
    // a scale and a minimum of one byte each, and every 256 elements share f16 factors for both.
    Q4_K = 17,
};

// A matrix [rows, width], or several matrices one after another.
struct Weight {
    const unsigned char* codes;
    const unsigned char* scales;
    const unsigned char* factors;
    uint32_t width;
    uint32_t kind;
};

static_assert(sizeof(Weight) == 32, "as in src/dense/weight.rs");

// Returns the scale and minimum of the group of 32 elements that contains element `i` of a row.
__device__ __forceinline__ float2 q4_k_step(const Weight& weight, int64_t row, uint32_t i) {
    const unsigned char* pair = weight.scales + (row * (weight.width / 32) + i / 32) * 2;
    const uint16_t* factors = reinterpret_cast<const uint16_t*>(weight.factors) + (row * (weight.width / 256) + i / 256) * 2;
    return make_float2(f16_to_f32(factors[0]) * pair[0], f16_to_f32(factors[1]) * pair[1]);
}

__device__ __forceinline__ float q8_0_step(const Weight& weight, int64_t row, uint32_t i) {
    return f16_to_f32(reinterpret_cast<const uint16_t*>(weight.scales)[row * (weight.width / 32) + i / 32]);
}

// Returns element `i` of a row.
__device__ __forceinline__ float weight1(const Weight& weight, int64_t row, uint32_t i) {
    const int64_t at = row * weight.width + i;
    switch (weight.kind) {
        case F32: return load1<F32>(weight.codes, at);
        case F16: return load1<F16>(weight.codes, at);
        case BF16: return load1<BF16>(weight.codes, at);
        case Q8_0: return load1<I8>(weight.codes, at) * q8_0_step(weight, row, i);
        default: {
            const float2 step = q4_k_step(weight, row, i);
            return static_cast<float>(weight.codes[at >> 1] >> (at & 1) * 4 & 0xf) * step.x - step.y;
        }
    }
}

// Reads eight elements of a row, starting at `i`. Both `i` and the row's width must be multiples of eight.
template <int KIND>
__device__ __forceinline__ void weight8(const Weight& weight, int64_t row, uint32_t i, float (&x)[8]) {
    const int64_t at = row * weight.width + i;
    if constexpr (KIND == F32) {
        load8<F32>(weight.codes + 4 * at, x);
    } else if constexpr (KIND == F16) {
        load8<F16>(weight.codes + 2 * at, x);
    } else if constexpr (KIND == BF16) {
        load8<BF16>(weight.codes + 2 * at, x);
    } else if constexpr (KIND == Q8_0) {
        load8<I8>(weight.codes + at, x);
        const float step = q8_0_step(weight, row, i);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= step;
    } else {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(weight.codes + (at >> 1));
        const float2 step = q4_k_step(weight, row, i);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = static_cast<float>(word >> 4 * j & 0xf) * step.x - step.y;
    }
}
