// Tiles of keys and values for tensor cores: their layout in shared memory, how they are loaded, and their
// products.
//
// See attend_mma.cuh for the order of the steps.
#pragma once

#include "attend_query.cuh"

template <int TYPE>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (TYPE == F16) {
        mma_f16(d, a, b);
    } else {
        mma_bf16(d, a, b);
    }
}

__device__ __forceinline__ int padded_dim(int dim) { return (dim + 15) / 16 * 16; }

// The number of a tile's scales that a thread holds in registers before writing them to shared memory.
constexpr int HELD_SCALES = 4;

// The parts of a block's shared memory, in the order of `KernelFamily::shared` in
// src/kernels/attend/tiling.rs. Rows of 16-bit matrices are padded by 16 bytes, so that the eight rows of a
// fragment start in different banks.
template <bool CODES, bool LATENT, int M, int TN>
struct MmaShared {
    // The number of tiles of K and of V: two if the next tile is copied while the current one is used.
    static constexpr int STAGES = LATENT && !CODES ? 2 : 1;
    // The number of rows to look up per token: keys and values, and for codes the scales of both.
    static constexpr int SIDES = CODES ? 4 : 2;
    static constexpr int WEIGHT_ROW = CODES ? 4 * (TN + 4) : 2 * (TN + 8);
    static constexpr int WEIGHT_PLANE = M * WEIGHT_ROW;

    int k_pad, v_pad, k_groups, v_groups;
    SplitRows queries, latents;
    // The tiles, and the weights: two terms of the matrices' type, or f32 for codes.
    unsigned char *keys, *values, *weights;
    int key_row, value_row;
    // The codes before they are widened.
    unsigned char *raw_keys, *raw_values;
    int raw_key_row, raw_value_row;
    // The addresses of two tiles' rows; 0 for tokens past the end.
    uint64_t* places;
    // The scales of two tiles: the scale of token `i` and group `j` is at `i * groups + j`.
    float *key_scales, *value_scales;
    // For each warp and query: at first the largest logit, later the sum.
    float* reduced;
    float* inverse;
    int2* seen;
    // The index of the last tile that some query sees only in part, and of the last tile that has non-finite
    // values.
    int* flags;

    __device__ __forceinline__ explicit MmaShared(const AttendArgs& args) {
        unsigned char* next = kv_shared();
        const auto take = [&next](int bytes) {
            unsigned char* taken = next;
            next += (bytes + 15) / 16 * 16;
            return taken;
        };
        k_pad = padded_dim(args.k_dim), v_pad = padded_dim(args.v_dim);
        key_row = 2 * (k_pad + 8), value_row = 2 * (v_pad + 8);
        queries = {take(args.q_terms * M * key_row), key_row, M * key_row, args.q_terms};
        const int latent_terms = LATENT ? args.latent_terms : 0;
        latents = {take(latent_terms * M * value_row), value_row, M * value_row, latent_terms};
        keys = take(STAGES * TN * key_row), values = take(STAGES * TN * value_row);
        weights = take((CODES ? 1 : 2) * WEIGHT_PLANE);
        places = reinterpret_cast<uint64_t*>(take(2 * SIDES * TN * 8));
        reduced = reinterpret_cast<float*>(take(WARPS * M * 4));
        inverse = reinterpret_cast<float*>(take(M * 4));
        seen = reinterpret_cast<int2*>(take(M * 8));
        flags = reinterpret_cast<int*>(take(16));
        if constexpr (CODES) {
            k_groups = args.k_dim / args.k_group, v_groups = args.v_dim / args.v_group;
            raw_key_row = args.k_dim * bits_of(args.kind) / 8, raw_value_row = args.v_dim * bits_of(args.kind) / 8;
            raw_keys = take(TN * raw_key_row), raw_values = take(TN * raw_value_row);
            key_scales = reinterpret_cast<float*>(take(2 * TN * k_groups * 4));
            value_scales = reinterpret_cast<float*>(take(2 * TN * v_groups * 4));
        }
    }
};

// Returns the location of the tile's token that this thread looks up. The lookup reads memory, so its result
// should be used later.
template <int TN>
__device__ __forceinline__ Place look_up(const AttendArgs& args, const Walk& tile) {
    if (threadIdx.x >= TN || !tile.more || tile.start + threadIdx.x >= tile.end) return {0, 0, 0};
    return place_of(args, tile, tile.start + threadIdx.x);
}

// Writes the addresses of the rows of the token that was looked up.
template <int SIDES, int TN>
__device__ __forceinline__ void put_places(const AttendArgs& args, const AttendUnit& unit, const Walk& tile,
                                           const Place& place, uint64_t* places) {
    const int i = threadIdx.x;
    if (i >= TN || !tile.more) return;
    const bool inside = tile.start + i < tile.end;
    places[i] = inside ? reinterpret_cast<uint64_t>(row_of(args.k, place, unit.k_head)) : 0;
    places[TN + i] = inside ? reinterpret_cast<uint64_t>(row_of(args.v, place, unit.v_head)) : 0;
    if constexpr (SIDES == 4) {
        places[2 * TN + i] = inside ? reinterpret_cast<uint64_t>(scales_of(args.k, place, unit.k_head)) : 0;
        places[3 * TN + i] = inside ? reinterpret_cast<uint64_t>(scales_of(args.v, place, unit.v_head)) : 0;
    }
}

// Returns scale `i` of a tile, in the order of `MmaShared`, or 0 for tokens past the end.
__device__ __forceinline__ float tile_scale(const AttendArgs& args, const uint64_t* places, int groups, int i) {
    const uint64_t place = places[i / groups];
    return place == 0 ? 0.0f : scale_at(args.kind, records<unsigned char>(place), i % groups);
}

// Reads a tile's first scales into registers, for later use.
template <int TN>
__device__ __forceinline__ void read_scales(const AttendArgs& args, const uint64_t* places, int groups,
                                            float (&held)[HELD_SCALES]) {
#pragma unroll
    for (int j = 0; j < HELD_SCALES; j++) {
        const int i = threadIdx.x + j * THREADS;
        held[j] = i < TN * groups ? tile_scale(args, places, groups, i) : 0.0f;
    }
}

// Writes the scales held in registers, and the tile's remaining scales.
template <int TN>
__device__ __forceinline__ void put_scales(const AttendArgs& args, const uint64_t* places, int groups,
                                           const float (&held)[HELD_SCALES], float* scales) {
#pragma unroll
    for (int j = 0; j < HELD_SCALES; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i < TN * groups) scales[i] = held[j];
    }
    for (int i = threadIdx.x + HELD_SCALES * THREADS; i < TN * groups; i += THREADS) {
        scales[i] = tile_scale(args, places, groups, i);
    }
}

// Starts copying rows of `units` times 16 bytes. Rows with address 0 are filled with zeros.
template <int TN>
__device__ __forceinline__ void copy_rows(unsigned char* to, int row, const uint64_t* places, int units,
                                          uint64_t anywhere) {
    int token = static_cast<int>(threadIdx.x) / units, unit = static_cast<int>(threadIdx.x) % units;
    const int tokens = THREADS / units, rest = THREADS % units;
    while (token < TN) {
        const uint64_t place = places[token];
        const uint64_t from = (place != 0 ? place : anywhere) + 16 * unit;
        cp_async16_zfill(to + token * row + 16 * unit, reinterpret_cast<const void*>(from), place != 0);
        token += tokens, unit += rest;
        if (unit >= units) unit -= units, token++;
    }
}

// Widens rows of codes to bf16, eight at a time.
template <int KIND, int TN>
__device__ __forceinline__ void widen_rows(unsigned char* to, int row, const unsigned char* raw, int raw_row, int dim) {
    const int units = dim / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < TN * units; i += THREADS) {
        const int token = i / units, unit = i % units;
        float x[8];
        load8<KIND>(raw + token * raw_row + unit * bits_of(KIND), x);
        store8<BF16>(to + token * row + 16 * unit, x);
    }
}

template <int TN>
__device__ __forceinline__ void widen(int kind, unsigned char* to, int row, const unsigned char* raw, int raw_row,
                                      int dim) {
    switch (kind) {
        case E4M3: widen_rows<E4M3, TN>(to, row, raw, raw_row, dim); break;
        case E5M2: widen_rows<E5M2, TN>(to, row, raw, raw_row, dim); break;
        case I8: widen_rows<I8, TN>(to, row, raw, raw_row, dim); break;
        default: widen_rows<I4, TN>(to, row, raw, raw_row, dim); break;
    }
}

// Writes zeros to elements `dim..pad` of each row.
template <int TN>
__device__ __forceinline__ void clear_padding(unsigned char* tile, int row, int dim, int pad) {
    const int width = pad - dim;
#pragma unroll 1
    for (int i = threadIdx.x; i < TN * width; i += THREADS) {
        *reinterpret_cast<uint16_t*>(tile + i / width * row + 2 * (dim + i % width)) = 0;
    }
}

// Adds the products of the queries' TERMS terms with steps `begin..end` of a tile's rows, 16 elements per
// step. Each warp handles its quarter of the tile's tokens.
template <int TYPE, int TERMS, int MT, int NT>
__device__ __forceinline__ void multiply_terms(float (&logits)[MT][NT][4], const SplitRows& queries,
                                               const unsigned char* tile, int tile_row, int begin, int end, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned char* left = queries.at + (lane & 15) * queries.row + (lane >> 4) * 16;
    const int token = 8 * NT * warp + (lane & 7) + (NT == 2 ? (lane >> 4) * 8 : 0);
    const unsigned char* right = tile + token * tile_row + (lane >> 3 & 1) * 16;
    // The later terms have separate sums, so that products wait less for each other if there are few queries.
    constexpr bool APART = MT == 1 && TERMS > 1;
    float apart[1][NT][4] = {};
#pragma unroll(MT == 1 ? 2 : 1)
    for (int step = begin; step < end; step++) {
        uint32_t b[NT][2];
        if constexpr (NT == 2) {
            uint32_t both[4];
            ldmatrix_x4(both, right + step * 32);
            b[0][0] = both[0], b[0][1] = both[1], b[1][0] = both[2], b[1][1] = both[3];
        } else {
            ldmatrix_x2(b[0], right + step * 32);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (MT > 1 && m >= tiles) break;
            uint32_t a[TERMS][4];
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                ldmatrix_x4(a[term], left + term * queries.plane + m * 16 * queries.row + step * 32);
            }
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
#pragma unroll
                for (int n = 0; n < NT; n++) mma<TYPE>(APART && term > 0 ? apart[0][n] : logits[m][n], a[term], b[n]);
            }
        }
    }
    if constexpr (APART) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) logits[0][n][i] += apart[0][n][i];
        }
    }
}

template <int TYPE, int MT, int NT>
__device__ __forceinline__ void multiply(float (&logits)[MT][NT][4], const SplitRows& queries,
                                         const unsigned char* tile, int tile_row, int begin, int end, int tiles) {
    if (queries.terms == 1) {
        multiply_terms<TYPE, 1, MT, NT>(logits, queries, tile, tile_row, begin, end, tiles);
    } else if (MT <= 2 && TYPE == BF16 && queries.terms == 3) {
        multiply_terms<TYPE, 3, MT, NT>(logits, queries, tile, tile_row, begin, end, tiles);
    } else {
        multiply_terms<TYPE, 2, MT, NT>(logits, queries, tile, tile_row, begin, end, tiles);
    }
}

// Adds the products of queries with rows of codes, each group multiplied by its token's scale.
template <int MT, int NT>
__device__ __forceinline__ void multiply_codes(float (&logits)[MT][NT][4], const SplitRows& queries,
                                               const unsigned char* tile, int tile_row, int steps, const float* scales,
                                               int groups, int group, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int i = 0; i < groups; i++) {
        float sums[MT][NT][4] = {};
        const int end = i + 1 == groups ? steps : (i + 1) * group / 16;
        multiply<BF16, MT, NT>(sums, queries, tile, tile_row, i * group / 16, end, tiles);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float scale = scales[(8 * NT * warp + 8 * n + 2 * (lane % 4) + e) * groups + i];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    logits[m][n][e] += sums[m][n][e] * scale;
                    logits[m][n][2 + e] += sums[m][n][2 + e] * scale;
                }
            }
        }
    }
}

// The two terms of eight weights, as fragments.
struct SplitWeights {
    uint32_t high[4], low[4];
};

// Loads the weights of 16 queries and 16 tokens.
template <int PLANE, int ROW>
__device__ __forceinline__ SplitWeights load_weights(const unsigned char* weights, int m, int step) {
    const int lane = threadIdx.x % 32;
    const unsigned char* at = weights + (16 * m + (lane & 15)) * ROW + step * 32 + (lane >> 4) * 16;
    SplitWeights split;
    ldmatrix_x4(split.high, at);
    ldmatrix_x4(split.low, at + PLANE);
    return split;
}

// Loads f32 weights, multiplies each by the scale of its token and group, and splits the products.
template <int ROW>
__device__ __forceinline__ SplitWeights scale_weights(const unsigned char* weights, int m, int step,
                                                      const float* scales, int groups) {
    const int lane = threadIdx.x % 32, token = 16 * step + 2 * (lane % 4);
    SplitWeights split;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 * m + lane / 4 + 8 * (i & 1), at = token + 8 * (i >> 1);
        const float2 pair = *reinterpret_cast<const float2*>(weights + row * ROW + 4 * at);
        const float x = pair.x * scales[at * groups], y = pair.y * scales[(at + 1) * groups];
        split.high[i] = pack_bf16x2(x, y);
        const float2 kept = unpack_bf16x2(split.high[i]);
        split.low[i] = pack_bf16x2(x - kept.x, y - kept.y);
    }
    return split;
}
