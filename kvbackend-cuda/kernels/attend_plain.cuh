// What the kernels in f32 arithmetic share: rows and queries in shared memory as f32, and their products.
#pragma once

#include "attend.cuh"

constexpr int TOKENS = 32, QUERIES = 16;
// The stride between the weights of two tokens, in floats.
constexpr int WEIGHT_ROW = QUERIES + 4;

// Returns the number of groups of four floats per row. It is odd, so that rows start in different banks.
__device__ __forceinline__ int fours_of(int dim) { return (dim + 3) / 4 | 1; }

struct PlainShared {
    // The queries in groups of four, indexed by element and group.
    float4 *queries, *latents;
    float *keys, *values;
    // Shares of logits, indexed by warp, by query within the warp's four, and by token.
    float* logits;
    float* weights;
    float* shrink;
    // The rows of two tiles: addresses of keys, values and both scales, and the tokens' indices.
    uint64_t* places;
    uint32_t* numbers;
    int2* seen;
    // The index of the last tile that some query sees only in part, and of the last tile that has non-finite
    // values.
    int* flags;

    __device__ __forceinline__ explicit PlainShared(const AttendArgs& args) {
        unsigned char* next = kv_shared();
        const auto take = [&next](int bytes) {
            unsigned char* taken = next;
            next += (bytes + 15) / 16 * 16;
            return taken;
        };
        const int k_fours = fours_of(args.k_dim), v_fours = fours_of(args.v_dim);
        queries = reinterpret_cast<float4*>(take(16 * 4 * k_fours * args.quads));
        latents = reinterpret_cast<float4*>(take(args.latent.at != 0 ? 16 * 4 * v_fours * args.quads : 0));
        keys = reinterpret_cast<float*>(take(16 * args.tile * k_fours));
        values = reinterpret_cast<float*>(take(16 * args.tile * v_fours));
        logits = reinterpret_cast<float*>(take(4 * WARPS * 4 * TOKENS));
        weights = reinterpret_cast<float*>(take(4 * TOKENS * WEIGHT_ROW));
        shrink = reinterpret_cast<float*>(take(4 * QUERIES));
        places = reinterpret_cast<uint64_t*>(take(8 * 2 * 4 * TOKENS));
        numbers = reinterpret_cast<uint32_t*>(take(4 * 2 * TOKENS));
        seen = reinterpret_cast<int2*>(take(8 * QUERIES));
        flags = reinterpret_cast<int*>(take(16));
    }
};

__device__ __forceinline__ void find_rows(const AttendArgs& args, const AttendUnit& unit, const Walk& tile,
                                          uint64_t* places, uint32_t* numbers) {
    const uint32_t i = threadIdx.x;
    if (i >= static_cast<uint32_t>(args.tile) || tile.start + i >= tile.end) return;
    const Place place = place_of(args, tile, tile.start + i);
    places[i] = reinterpret_cast<uint64_t>(row_of(args.k, place, unit.k_head));
    places[TOKENS + i] = reinterpret_cast<uint64_t>(row_of(args.v, place, unit.v_head));
    places[2 * TOKENS + i] = reinterpret_cast<uint64_t>(scales_of(args.k, place, unit.k_head));
    places[3 * TOKENS + i] = reinterpret_cast<uint64_t>(scales_of(args.v, place, unit.v_head));
    numbers[i] = place.number;
}

// Loads rows into shared memory. Returns whether an element that this thread loaded is not finite.
template <int KIND>
__device__ __forceinline__ bool load_rows(float* to, const uint64_t* places, const uint64_t* scales, int tokens,
                                          int dim, int group, bool eights) {
    bool found = false;
    const int row = 4 * fours_of(dim), width = eights ? 8 : 1, units = dim / width;
    constexpr bool SCALED = KIND == E4M3 || KIND == E5M2 || KIND == I8 || KIND == I4;
    for (int i = threadIdx.x; i < tokens * units; i += THREADS) {
        const int token = i / units, first = i % units * width;
        const unsigned char* from = records<unsigned char>(places[token]);
        const unsigned char* scale = records<unsigned char>(scales[token]);
        float* at = to + token * row + first;
        if (eights) {
            float x[8];
            load8<KIND>(from + first / 8 * bits_of(KIND), x);
            if constexpr (SCALED) {
                const bool one = group % 8 == 0;
                const float all = scale_at(KIND, scale, first / group);
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] *= one ? all : scale_at(KIND, scale, (first + j) / group);
            }
            reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
            reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll
            for (int j = 0; j < 8; j++) found |= spoiled(x[j]);
        } else {
            float x = load1<KIND>(from, first);
            if constexpr (SCALED) x *= scale_at(KIND, scale, first / group);
            *at = x;
            found |= spoiled(x);
        }
    }
    return found;
}

__device__ __forceinline__ bool load_rows(int kind, float* to, const uint64_t* places, const uint64_t* scales,
                                          int tokens, int dim, int group, bool eights) {
    switch (kind) {
        case F32: return load_rows<F32>(to, places, scales, tokens, dim, group, eights);
        case F16: return load_rows<F16>(to, places, scales, tokens, dim, group, eights);
        case BF16: return load_rows<BF16>(to, places, scales, tokens, dim, group, eights);
        case E4M3: return load_rows<E4M3>(to, places, scales, tokens, dim, group, eights);
        case E5M2: return load_rows<E5M2>(to, places, scales, tokens, dim, group, eights);
        case I8: return load_rows<I8>(to, places, scales, tokens, dim, group, eights);
        default: return load_rows<I4>(to, places, scales, tokens, dim, group, eights);
    }
}

// Rotates a tile's keys to the positions at which they are used.
__device__ __forceinline__ void turn_keys(const AttendArgs& args, float* keys, const uint32_t* numbers, int tokens,
                                          int64_t position) {
    const int row = 4 * fours_of(args.k_dim);
    for (int i = threadIdx.x; i < tokens * args.pairs; i += THREADS) {
        const int token = i / args.pairs, number = i % args.pairs;
        const int2 pair = pair_of(args, number);
        float *x = keys + token * row + pair.x, *y = keys + token * row + pair.y;
        const float2 both = turned(args, make_float2(*x, *y), position + numbers[token], number);
        *x = both.x, *y = both.y;
    }
}

// Loads queries or latent queries unchanged. Padding is set to zero.
__device__ __forceinline__ void load_fours(const AttendArgs& args, const AttendUnit& unit, const AttendRows& rows,
                                           int kind, int dim, float4* to) {
    float* flat = reinterpret_cast<float*>(to);
    const int padded = 4 * fours_of(dim), all = 4 * args.quads;
    for (int i = threadIdx.x; i < padded * all; i += THREADS) {
        const int query = i / padded, element = i % padded;
        const bool inside = query < unit.queries && element < dim;
        flat[element * all + query] = inside ? dense_at(kind, query_of(args, rows, unit, query), element) : 0.0f;
    }
}

__device__ __forceinline__ void turn_queries(const AttendArgs& args, const AttendUnit& unit, int64_t offset,
                                             float4* queries) {
    float* flat = reinterpret_cast<float*>(queries);
    const int all = 4 * args.quads;
    for (int i = threadIdx.x; i < unit.queries * args.pairs; i += THREADS) {
        const int query = i / args.pairs, number = i % args.pairs;
        const int2 pair = pair_of(args, number);
        float *x = flat + pair.x * all + query, *y = flat + pair.y * all + query;
        const float2 both =
            turned(args, make_float2(*x, *y), turn_of(args, unit, offset, query), number);
        *x = both.x, *y = both.y;
    }
}

// Adds the products of four queries with a token's row, over every `shares`-th group of four elements.
__device__ __forceinline__ void multiply(float (&sums)[4], const float4* queries, int quads, int quad, const float* row,
                                         int fours, int share, int shares) {
    const float4* tile = reinterpret_cast<const float4*>(row);
    for (int i = share; i < fours; i += shares) {
        const float4 x = tile[i];
        const float of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 q = queries[(4 * i + j) * quads + quad];
            sums[0] += q.x * of[j], sums[1] += q.y * of[j], sums[2] += q.z * of[j], sums[3] += q.w * of[j];
        }
    }
}
