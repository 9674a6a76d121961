// Attention on tensor cores, for bf16 or f16 pools, and for codes that are widened to bf16 in shared memory.
//
// A block processes 16 to 64 queries with tiles of 64 (or 32) tokens. Each of its four warps computes the
// logits of all queries for a quarter of the tile's tokens, and shares the weights through shared memory.
// Each warp then adds the weighted values of all tokens to a quarter of the columns, which it keeps in
// registers. Thus a warp loads each fragment of keys and values only once for all queries, and latents of 512
// columns fit in registers.
//
// Asynchronous copies load dense tiles: the next tile's keys while weights are computed and applied, and
// values while logits are computed. Latents are also part of the logits, so the whole next tile is copied
// while the current one is used. The same applies to codes, which are widened just before use. Their scales
// multiply a group's partial products (keys) and weights (values), so nothing is rounded. Addresses and
// scales are read before the products that hide the latency.
//
// Weights are split into two terms, in the same way as queries (attend_query.cuh). f16 terms are scaled by
// 2^15, so that the terms of small weights keep their bits.
#pragma once

#include "attend_tile.cuh"

// Adds the weighted values of a tile that has non-finite values and tokens that some query does not see. Such
// values must be skipped if their weight is 0, because matrix instructions would multiply them.
template <int TYPE, bool CODES, int MT, int NP, int TN, int ROW, int PLANE>
__device__ __forceinline__ void add_guarded(float (&out)[MT][NP][2][4], const unsigned char* weights,
                                            const unsigned char* values, int value_row, const float* scales, int groups,
                                            int group, int first_pair, int pairs, int tiles) {
    const int lane = threadIdx.x % 32;
    for (int token = 0; token < TN; token++) {
        float weight[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const unsigned char* at = weights + (16 * m + 8 * r + lane / 4) * ROW;
                if constexpr (CODES) {
                    weight[m][r] = *reinterpret_cast<const float*>(at + 4 * token);
                } else {
                    weight[m][r] = widened<TYPE>(*reinterpret_cast<const uint16_t*>(at + 2 * token)) +
                                   widened<TYPE>(*reinterpret_cast<const uint16_t*>(at + PLANE + 2 * token));
                }
            }
        }
#pragma unroll
        for (int p = 0; p < NP; p++) {
            if (p >= pairs) break;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int column = 16 * (first_pair + p) + 8 * n + 2 * (lane % 4);
                const unsigned char* at = values + token * value_row + 2 * column;
                float2 value = widened2<TYPE>(*reinterpret_cast<const uint32_t*>(at));
                if constexpr (CODES) {
                    const float scale = scales[token * groups + 16 * (first_pair + p) / group];
                    value.x *= scale, value.y *= scale;
                }
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        if (m < tiles && weight[m][r] != 0.0f) {
                            out[m][p][n][2 * r] += weight[m][r] * value.x;
                            out[m][p][n][2 * r + 1] += weight[m][r] * value.y;
                        }
                    }
                }
            }
        }
    }
}

// Sets the flag if some value of a tile is not finite.
template <int TYPE, bool CODES, int TN>
__device__ __forceinline__ void find_spoiled(const unsigned char* values, int value_row, int dim, const float* scales,
                                             int groups, int tile, int* flag) {
    bool found = false;
    for (int i = threadIdx.x; i < TN * dim; i += THREADS) {
        const unsigned char* at = values + i / dim * value_row + 2 * (i % dim);
        found |= spoiled(widened<TYPE>(*reinterpret_cast<const uint16_t*>(at)));
    }
    if constexpr (CODES) {
        for (int i = threadIdx.x; i < TN * groups; i += THREADS) found |= spoiled(scales[i]);
    }
    if (found) *flag = tile;
}

// The kernel for matrices of type TYPE, 16 * MT queries, tiles of 32 * NT tokens, and at most 64 * NP value
// columns.
template <int TYPE, bool CODES, bool LATENT, int MT, int NT, int NP>
__device__ __forceinline__ void attend_mma(const AttendArgs& args) {
    constexpr int M = 16 * MT, TN = 32 * NT;
    using Shared = MmaShared<CODES, LATENT, M, TN>;
    constexpr int ROW = Shared::WEIGHT_ROW, PLANE = Shared::WEIGHT_PLANE, SIDES = Shared::SIDES;
    // Whether the whole next tile is copied while the current one is used.
    constexpr bool AHEAD = CODES || LATENT;
    // The scale of the weights; see the start of this file.
    constexpr float WEIGHT = TYPE == F16 ? 32768.0f : 1.0f;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Shared shared(args);
    const AttendUnit unit = unit_of(args, blockIdx.x);
    if (unit.task.rows == ABSENT) return;
    const TaskRecord& task = unit.task;
    // The number of groups of sixteen queries that are not only padding.
    const int tiles = (unit.queries + 15) / 16;
    // The pairs of eight columns that this warp computes.
    const int all_pairs = shared.v_pad / 16, most = (all_pairs + WARPS - 1) / WARPS, first_pair = warp * most;
    const int pairs = min(most, max(all_pairs - first_pair, 0));

    float out[MT][NP][2][4] = {};
    // The largest logit of each of this thread's queries, and the sum of this thread's weights.
    float high[MT][2], sum[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; m++) high[m][0] = high[m][1] = minus_infinity();

    // The current tile, the next tile, which is being copied, and the tile after that, which is being looked
    // up.
    Walk now, next, later;
    now.begin(args, task);
    next = now;
    next.advance(args, task, TN);
    later = next;
    // The run whose limits are loaded, and the position offset for which queries are loaded.
    uint32_t loaded_run = ~0u;
    int64_t loaded_offset = 0;
    float factor = 0.0f;

    const auto places_of = [&](int buffer) { return shared.places + buffer * SIDES * TN; };
    const auto keys_of = [&](int buffer) {
        return shared.keys + (Shared::STAGES == 2 ? buffer * TN * shared.key_row : 0);
    };
    const auto values_of = [&](int buffer) {
        return shared.values + (Shared::STAGES == 2 ? buffer * TN * shared.value_row : 0);
    };
    const auto copy_keys = [&](int buffer) {
        if constexpr (CODES) {
            copy_rows<TN>(shared.raw_keys, shared.raw_key_row, places_of(buffer), shared.raw_key_row / 16, args.k.at);
        } else {
            copy_rows<TN>(keys_of(buffer), shared.key_row, places_of(buffer), args.k_dim / 8, args.k.at);
        }
    };
    const auto copy_values = [&](int buffer) {
        const uint64_t* places = places_of(buffer) + TN;
        if constexpr (CODES) {
            copy_rows<TN>(shared.raw_values, shared.raw_value_row, places, shared.raw_value_row / 16, args.v.at);
        } else {
            copy_rows<TN>(values_of(buffer), shared.value_row, places, args.v_dim / 8, args.v.at);
        }
    };
    // The next tile's scales, held in registers.
    float key_scales[CODES ? HELD_SCALES : 1], value_scales[CODES ? HELD_SCALES : 1];
    const auto read_all_scales = [&](int buffer) {
        if constexpr (CODES) {
            read_scales<TN>(args, places_of(buffer) + 2 * TN, shared.k_groups, key_scales);
            read_scales<TN>(args, places_of(buffer) + 3 * TN, shared.v_groups, value_scales);
        }
    };
    const auto put_all_scales = [&](int buffer) {
        if constexpr (CODES) {
            put_scales<TN>(args, places_of(buffer) + 2 * TN, shared.k_groups, key_scales,
                           shared.key_scales + buffer * TN * shared.k_groups);
            put_scales<TN>(args, places_of(buffer) + 3 * TN, shared.v_groups, value_scales,
                           shared.value_scales + buffer * TN * shared.v_groups);
        }
    };

    if (now.more) {
        put_places<SIDES, TN>(args, unit, now, look_up<TN>(args, now), places_of(0));
        __syncthreads();
        copy_keys(0);
        if constexpr (AHEAD) copy_values(0);
        cp_async_commit();
        if constexpr (AHEAD) {
            put_places<SIDES, TN>(args, unit, next, look_up<TN>(args, next), places_of(1));
            read_all_scales(0);
            put_all_scales(0);
        }
    }
    for (int buffer = 0; buffer < Shared::STAGES; buffer++) {
        clear_padding<TN>(keys_of(buffer), shared.key_row, args.k_dim, shared.k_pad);
        clear_padding<TN>(values_of(buffer), shared.value_row, args.v_dim, shared.v_pad);
    }
    if (thread < 4) shared.flags[thread] = -1;

    for (int tile = 0; now.more; tile++) {
        const int buffer = tile & 1;
        unsigned char *const keys = keys_of(buffer), *const values = values_of(buffer);
        if (now.number != loaded_run) {
            // At this point, no warp still reads the previous run's queries or limits.
            const RunRecord run = records<RunRecord>(args.runs)[task.run + now.number];
            const int64_t offset = args.pairs == 0 ? 0 : run.offset;
            if (loaded_run == ~0u || offset != loaded_offset) {
                load_queries<TYPE>(args, unit, offset, loaded_run == ~0u, shared.queries, shared.k_pad, shared.latents,
                                   shared.v_pad, shared.inverse, 16 * tiles);
            }
            if (thread < M) shared.seen[thread] = seen_by(args, unit, run, thread);
            loaded_run = now.number, loaded_offset = offset;
            factor = args.scale * run.logit_scale;
        }
        cp_async_wait<0>();
        __syncthreads();
        // Now the keys have arrived, and no thread still reads the previous tile's values and weights.
        if constexpr (CODES) {
            widen<TN>(args.kind, keys, shared.key_row, shared.raw_keys, shared.raw_key_row, args.k_dim);
            widen<TN>(args.kind, values, shared.value_row, shared.raw_values, shared.raw_value_row, args.v_dim);
            __syncthreads();
        }
        if constexpr (AHEAD) {
            if (next.more) {
                copy_keys(buffer ^ 1);
                copy_values(buffer ^ 1);
                read_all_scales(buffer ^ 1);
            }
            later.advance(args, task, TN);
        } else {
            copy_values(buffer);
        }
        cp_async_commit();
        const Place place = look_up<TN>(args, later);

        float logits[MT][NT][4] = {};
        if constexpr (CODES) {
            multiply_codes<MT, NT>(logits, shared.queries, keys, shared.key_row, shared.k_pad / 16,
                                   shared.key_scales + buffer * TN * shared.k_groups, shared.k_groups, args.k_group,
                                   tiles);
        } else {
            multiply<TYPE, MT, NT>(logits, shared.queries, keys, shared.key_row, 0, shared.k_pad / 16, tiles);
        }
        if constexpr (LATENT) {
            if (shared.latents.terms == 0) {
                // Nothing to add: the values are wide, but there are no latents.
            } else if constexpr (CODES) {
                multiply_codes<MT, NT>(logits, shared.latents, values, shared.value_row, shared.v_pad / 16,
                                       shared.value_scales + buffer * TN * shared.v_groups, shared.v_groups,
                                       args.v_group, tiles);
            } else {
                multiply<TYPE, MT, NT>(logits, shared.latents, values, shared.value_row, 0, shared.v_pad / 16, tiles);
            }
        }
        put_places<SIDES, TN>(args, unit, later, place, places_of(AHEAD ? buffer : buffer ^ 1));
        if (AHEAD && next.more) put_all_scales(buffer ^ 1);

        // Scales the logits, and finds the largest logit of each query. Tokens that a query does not see get
        // minus infinity.
        const uint32_t first_token = now.start + 8 * NT * warp + 2 * (lane % 4);
        bool in_part = false;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (MT > 1 && m >= tiles) break;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int query = 16 * m + 8 * r + lane / 4;
                const int2 seen = shared.seen[query];
                const float scale = factor * shared.inverse[query];
                float largest = minus_infinity();
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const uint32_t token = first_token + 8 * n + e;
                        const bool sees = token >= static_cast<uint32_t>(seen.x) &&
                                          token < static_cast<uint32_t>(seen.y) && token < now.end;
                        in_part |= !sees && token < now.end && query < unit.queries;
                        float logit = logits[m][n][2 * r + e] * scale;
                        if (args.softcap > 0.0f) logit = capped(logit, args.softcap);
                        logits[m][n][2 * r + e] = sees ? logit : minus_infinity();
                        largest = fmaxf(largest, logits[m][n][2 * r + e]);
                    }
                }
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                if (lane % 4 == 0) shared.reduced[warp * M + query] = largest;
            }
        }
        if (in_part) shared.flags[0] = tile;
        __syncthreads();
        if constexpr (!AHEAD) {
            // At this point, no thread still reads the keys.
            if (next.more) copy_keys(buffer ^ 1);
            cp_async_commit();
        }

        // Computes the weights, and rescales the sums to the new largest logits.
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (MT > 1 && m >= tiles) break;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int query = 16 * m + 8 * r + lane / 4;
                float largest = high[m][r];
#pragma unroll
                for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, shared.reduced[w * M + query]);
                const float against = reference(largest);
                const float shrink = exp2f((high[m][r] - against) * LOG2_E);
                high[m][r] = largest;
                sum[m][r] *= shrink;
#pragma unroll
                for (int p = 0; p < NP; p++) {
#pragma unroll
                    for (int n = 0; n < 2; n++) out[m][p][n][2 * r] *= shrink, out[m][p][n][2 * r + 1] *= shrink;
                }
                unsigned char* to = shared.weights + query * ROW;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float x = exp2f((logits[m][n][2 * r] - against) * LOG2_E) * WEIGHT;
                    const float y = exp2f((logits[m][n][2 * r + 1] - against) * LOG2_E) * WEIGHT;
                    sum[m][r] += x + y;
                    const int token = 8 * NT * warp + 8 * n + 2 * (lane % 4);
                    if constexpr (CODES) {
                        *reinterpret_cast<float2*>(to + 4 * token) = make_float2(x, y);
                    } else {
                        const uint32_t pair = rounded2<TYPE>(x, y);
                        const float2 kept = widened2<TYPE>(pair);
                        *reinterpret_cast<uint32_t*>(to + 2 * token) = pair;
                        *reinterpret_cast<uint32_t*>(to + PLANE + 2 * token) = rounded2<TYPE>(x - kept.x, y - kept.y);
                    }
                }
            }
        }
        if constexpr (!AHEAD) cp_async_wait<1>();
        __syncthreads();

        // Adds the weighted values.
        const float* scales = shared.value_scales + (CODES ? buffer * TN * shared.v_groups : 0);
        const bool checked = shared.flags[0] == tile;
        if (checked) {
            find_spoiled<TYPE, CODES, TN>(values, shared.value_row, args.v_dim, scales, shared.v_groups, tile,
                                          shared.flags + 1);
            __syncthreads();
        }
        if (checked && shared.flags[1] == tile) {
            add_guarded<TYPE, CODES, MT, NP, TN, ROW, PLANE>(out, shared.weights, values, shared.value_row, scales,
                                                             shared.v_groups, args.v_group, first_pair, pairs, tiles);
        } else {
#pragma unroll 1
            for (int step = 0; step < TN / 16; step++) {
                SplitWeights split[MT];
                if constexpr (!CODES) {
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        if (MT > 1 && m >= tiles) break;
                        split[m] = load_weights<PLANE, ROW>(shared.weights, m, step);
                    }
                }
                const unsigned char* right =
                    values + (16 * step + (lane & 15)) * shared.value_row + 32 * first_pair + (lane >> 4) * 16;
                int group = -1;
#pragma unroll
                for (int p = 0; p < NP; p++) {
                    if (p >= pairs) break;
                    if constexpr (CODES) {
                        const int of_pair = 16 * (first_pair + p) / args.v_group;
                        if (of_pair != group) {
                            group = of_pair;
#pragma unroll
                            for (int m = 0; m < MT; m++) {
                                if (MT > 1 && m >= tiles) break;
                                split[m] = scale_weights<ROW>(shared.weights, m, step, scales + group, shared.v_groups);
                            }
                        }
                    }
                    uint32_t both[4];
                    ldmatrix_x4_trans(both, right + 32 * p);
                    const uint32_t b[2][2] = {{both[0], both[1]}, {both[2], both[3]}};
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        if (MT > 1 && m >= tiles) break;
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            mma<TYPE>(out[m][p][n], split[m].high, b[n]);
                            mma<TYPE>(out[m][p][n], split[m].low, b[n]);
                        }
                    }
                }
            }
        }
        now = next;
        if constexpr (AHEAD) {
            next = later;
        } else {
            next.advance(args, task, TN);
            later = next;
        }
    }
    cp_async_wait<0>();

    // Computes the sums over all tokens, and the results.
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (MT > 1 && m >= tiles) break;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
            if (lane % 4 == 0) shared.reduced[warp * M + 16 * m + 8 * r + lane / 4] = sum[m][r];
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (MT > 1 && m >= tiles) break;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = 16 * m + 8 * r + lane / 4;
            if (query >= unit.queries) continue;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += shared.reduced[w * M + query];
            total /= WEIGHT;
            if (warp == 0 && lane % 4 == 0) finish_sum(args, unit, query, high[m][r], total);
            const bool direct = task.part == DIRECT;
            const float factor = (direct && total != 0.0f ? 1.0f / total : 1.0f) / WEIGHT;
            unsigned char* to = direct ? query_of(args, args.out, unit, query)
                                       : reinterpret_cast<unsigned char*>(args.values) +
                                             part_of(args, unit, query) * args.v_dim * 4;
            const int kind = direct ? args.out_kind : F32;
#pragma unroll
            for (int p = 0; p < NP; p++) {
                if (p >= pairs) break;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int column = 16 * (first_pair + p) + 8 * n + 2 * (lane % 4);
                    if (column >= args.v_dim) continue;
                    write_two(kind, to, column, out[m][p][n][2 * r] * factor, out[m][p][n][2 * r + 1] * factor);
                }
            }
        }
    }
}
