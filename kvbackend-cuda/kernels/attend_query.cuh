// The tensor-core kernels' queries: rotated in f32 and split into terms of the matrices' type.
//
// A matrix instruction multiplies exactly and adds in f32, but its operands have only 8 (bf16) or 11 (f16)
// significant bits. Keys and values have this type in the pool, or are codes that the type represents
// exactly. The f32 operand, queries or weights, is split into a sum of terms. Each term is the rounded
// remainder after the terms before it: two bf16 terms have a relative error of 2^-18, three are exact, and
// two f16 terms have an error of 2^-23. Because f16 has a narrow range, a query is scaled by a power of two
// so that its largest element is between 2^11 and 2^12; the range then loses less than 2^-25, next to an
// element of at least 2^11. Queries that already have the matrices' type need a single term. Blocks of up to
// 32 queries use three bf16 terms, because they wait for memory anyway; larger blocks use two.
#pragma once

#include "attend.cuh"

template <int TYPE>
__device__ __forceinline__ uint16_t rounded(float x) {
    return TYPE == F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

template <int TYPE>
__device__ __forceinline__ float widened(uint16_t x) {
    return TYPE == F16 ? f16_to_f32(x) : bf16_to_f32(x);
}

template <int TYPE>
__device__ __forceinline__ uint32_t rounded2(float low, float high) {
    return TYPE == F16 ? pack_f16x2(low, high) : pack_bf16x2(low, high);
}

template <int TYPE>
__device__ __forceinline__ float2 widened2(uint32_t pair) {
    return TYPE == F16 ? unpack_f16x2(pair) : unpack_bf16x2(pair);
}

// The terms of a block's queries, as `terms` planes of rows in shared memory.
struct SplitRows {
    unsigned char* at;
    // The strides of a row and of a plane, in bytes.
    int row, plane;
    int terms;
};

template <int TYPE>
__device__ __forceinline__ void put(const SplitRows& to, int query, int i, float x) {
    unsigned char* at = to.at + query * to.row + 2 * i;
    for (int term = 0; term < to.terms; term++) {
        const uint16_t part = rounded<TYPE>(x);
        *reinterpret_cast<uint16_t*>(at + term * to.plane) = part;
        const float kept = widened<TYPE>(part);
        // A non-finite value is stored only in the first term.
        x = spoiled(kept) ? 0.0f : x - kept;
    }
}

// Returns the largest magnitude in a row. The lanes of a warp share the elements.
__device__ __forceinline__ float largest(int kind, const unsigned char* row, int dim, int lane) {
    float most = 0.0f;
    for (int i = lane; i < dim; i += 32) most = fmaxf(most, fabsf(dense_at(kind, row, i)));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    return most;
}

// Returns the f32 exponent bits of the scale that brings a magnitude to at least 2^11 and below 2^12. For
// zeros and infinities, the scale is 1. The inverse scale's exponent bits are 254 minus the result.
__device__ __forceinline__ uint32_t scale_exponent(float most) {
    const uint32_t exponent = __float_as_uint(most) >> 23;
    if (most == 0.0f || exponent == 255) return 127;
    return exponent < 12 ? 253 : 265 - exponent;
}

// Loads a block's queries, rotated for a segment at `offset` and padded with zeros, and the inverse of each
// query's scale. Loads the latent queries only if `fresh` is true, for the first call.
template <int TYPE>
__device__ __forceinline__ void load_queries(const AttendArgs& args, const AttendUnit& unit, int64_t offset, bool fresh,
                                             const SplitRows& keys, int k_pad, const SplitRows& latents, int v_pad,
                                             float* inverse, int padded) {
    const int lane = threadIdx.x % 32;
    for (int query = threadIdx.x / 32; query < padded; query += WARPS) {
        const bool valid = query < unit.queries;
        const unsigned char* row = valid ? query_of(args, args.q, unit, query) : nullptr;
        const unsigned char* latent = valid && latents.terms > 0 ? query_of(args, args.latent, unit, query) : nullptr;
        float scale = 1.0f;
        if (TYPE == F16 && keys.terms > 1 && valid) {
            float most = largest(args.q_kind, row, args.k_dim, lane);
            if (args.pairs > 0) most = fmaxf(most, most * fabsf(args.factor));
            if (latents.terms > 0) most = fmaxf(most, largest(args.latent_kind, latent, args.v_dim, lane));
            const uint32_t exponent = scale_exponent(most);
            scale = __uint_as_float(exponent << 23);
            if (lane == 0) inverse[query] = __uint_as_float((254 - exponent) << 23);
        } else if (lane == 0) {
            inverse[query] = 1.0f;
        }
        const int pairs = valid ? args.pairs : 0;
        for (int i = lane; i < pairs; i += 32) {
            const int2 pair = pair_of(args, i);
            const float2 x = make_float2(dense_at(args.q_kind, row, pair.x), dense_at(args.q_kind, row, pair.y));
            const float2 y = turned(args, x, turn_of(args, unit, offset, query), i);
            put<TYPE>(keys, query, pair.x, y.x * scale);
            put<TYPE>(keys, query, pair.y, y.y * scale);
        }
        for (int i = 2 * pairs + lane; i < k_pad; i += 32) {
            put<TYPE>(keys, query, i, valid && i < args.k_dim ? dense_at(args.q_kind, row, i) * scale : 0.0f);
        }
        if (!fresh) continue;
        for (int i = lane; i < v_pad; i += 32) {
            const bool inside = latent != nullptr && i < args.v_dim;
            const float x = inside ? dense_at(args.latent_kind, latent, i) * scale : 0.0f;
            if (latents.terms > 0) put<TYPE>(latents, query, i, x);
        }
    }
}
