// Attention in f32 arithmetic, for every format and every shape.
//
// A block processes up to 16 queries with tiles of up to 32 tokens, which are in shared memory as f32. A
// thread computes the logits of four queries and one token, over all elements of a key or, if there are few
// queries, over a share of them. A warp computes a query's weights. A thread sums the weighted values of some
// columns for all queries. If there are more value columns than fit in registers, several blocks share them
// and compute the same weights.
#include "attend_plain.cuh"

__device__ __forceinline__ float over_warp(float x, bool largest) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, lanes);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// The kernel for at most 128 * COLUMNS value columns per block.
template <int COLUMNS>
__device__ __forceinline__ void attend_plain(const AttendArgs& args) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const PlainShared shared(args);
    const AttendUnit unit = unit_of(args, blockIdx.x / args.columns);
    if (unit.task.rows == ABSENT) return;
    const int first_column = static_cast<int>(blockIdx.x % args.columns) * 128 * COLUMNS + thread;
    const TaskRecord& task = unit.task;
    const int quads = args.quads, shares = WARPS / quads;
    const int k_row = 4 * fours_of(args.k_dim), v_row = 4 * fours_of(args.v_dim);
    const bool latent = args.latent.at != 0;

    float out[COLUMNS][QUERIES] = {};
    // For each query whose weights this warp computes: the largest logit, and this lane's sum of weights.
    float high[4], sum[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) high[j] = minus_infinity();

    // Zeroes the end of each row, which no load writes.
    for (int i = thread; i < args.tile * (k_row - args.k_dim); i += THREADS) {
        const int width = k_row - args.k_dim;
        shared.keys[i / width * k_row + args.k_dim + i % width] = 0.0f;
    }
    for (int i = thread; i < args.tile * (v_row - args.v_dim); i += THREADS) {
        const int width = v_row - args.v_dim;
        shared.values[i / width * v_row + args.v_dim + i % width] = 0.0f;
    }
    if (thread < 4) shared.flags[thread] = -1;
    Walk now;
    now.begin(args, task);
    // The run whose limits are loaded, and the position offset for which queries are loaded.
    uint32_t loaded_run = ~0u;
    int64_t loaded_offset = 0;
    int64_t first_position = 0;
    float factor = 0.0f;
    if (now.more) find_rows(args, unit, now, shared.places, shared.numbers);
    __syncthreads();

    for (int number = 0; now.more; number++) {
        const int buffer = number & 1;
        const uint64_t* places = shared.places + buffer * 4 * TOKENS;
        const int tokens = static_cast<int>(min(now.end - now.start, static_cast<uint32_t>(args.tile)));
        bool turn = false;
        if (now.number != loaded_run) {
            const RunRecord run = records<RunRecord>(args.runs)[task.run + now.number];
            const int64_t offset = args.unrotated || args.pairs == 0 ? 0 : run.offset;
            factor = args.scale * run.logit_scale;
            if (args.unrotated) first_position = records<SegmentRecord>(args.segments)[run.segment].position;
            if (loaded_run == ~0u || offset != loaded_offset) {
                load_fours(args, unit, args.q, args.q_kind, args.k_dim, shared.queries);
                turn = args.pairs > 0;
            }
            if (latent && loaded_run == ~0u) {
                load_fours(args, unit, args.latent, args.latent_kind, args.v_dim, shared.latents);
            }
            if (thread < QUERIES) shared.seen[thread] = seen_by(args, unit, run, thread);
            loaded_run = now.number, loaded_offset = offset;
        }
        // Loads keys and then values in one loop, so that the code for all formats exists only once.
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            const bool found = load_rows(args.kind, side == 0 ? shared.keys : shared.values, places + side * TOKENS,
                                         places + (2 + side) * TOKENS, tokens, side == 0 ? args.k_dim : args.v_dim,
                                         side == 0 ? args.k_group : args.v_group, (args.eights >> side & 1) != 0);
            if (found && side == 1) shared.flags[1] = number;
        }
        // Finds the rows of the next tile.
        Walk next = now;
        next.advance(args, task, args.tile);
        if (next.more) {
            const int other = buffer ^ 1;
            find_rows(args, unit, next, shared.places + other * 4 * TOKENS, shared.numbers + other * TOKENS);
        }
        __syncthreads();
        if (turn || args.unrotated) {
            if (turn) turn_queries(args, unit, loaded_offset, shared.queries);
            if (args.unrotated) {
                turn_keys(args, shared.keys, shared.numbers + buffer * TOKENS, tokens, first_position);
            }
            __syncthreads();
        }

        if (lane < tokens) {
            const int quad = warp % quads, share = warp / quads;
            float sums[4] = {};
            multiply(sums, shared.queries, quads, quad, shared.keys + lane * k_row, k_row / 4, share, shares);
            if (latent) {
                multiply(sums, shared.latents, quads, quad, shared.values + lane * v_row, v_row / 4, share, shares);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) shared.logits[(warp * 4 + j) * TOKENS + lane] = sums[j];
        }
        __syncthreads();

        const uint32_t token = now.start + lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= quads) break;
            const int query = warp + 4 * j;
            const int2 seen = shared.seen[query];
            const bool sees = lane < tokens && token >= static_cast<uint32_t>(seen.x) &&
                              token < static_cast<uint32_t>(seen.y);
            float logit = 0.0f;
            for (int share = 0; lane < tokens && share < shares; share++) {
                logit += shared.logits[((share * quads + query / 4) * 4 + query % 4) * TOKENS + lane];
            }
            logit *= factor;
            if (args.softcap > 0.0f) logit = capped(logit, args.softcap);
            const float largest = fmaxf(high[j], over_warp(sees ? logit : minus_infinity(), true));
            const float against = reference(largest);
            const float weight = sees ? exp2f((logit - against) * LOG2_E) : 0.0f;
            const float shrink = exp2f((high[j] - against) * LOG2_E);
            high[j] = largest;
            sum[j] = sum[j] * shrink + weight;
            shared.weights[lane * WEIGHT_ROW + query] = weight;
            if (lane == 0) shared.shrink[query] = shrink;
            if (lane < tokens && !sees && query < unit.queries) shared.flags[0] = number;
        }
        __syncthreads();

        const float4* shrinks = reinterpret_cast<const float4*>(shared.shrink);
#pragma unroll
        for (int quad = 0; quad < 4; quad++) {
            if (quad >= quads) break;
            const float4 less = shrinks[quad];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                out[c][4 * quad] *= less.x, out[c][4 * quad + 1] *= less.y;
                out[c][4 * quad + 2] *= less.z, out[c][4 * quad + 3] *= less.w;
            }
        }
        // Values that are not finite must be skipped if their weight is 0.
        const bool guarded = shared.flags[0] == number && shared.flags[1] == number;
#pragma unroll 4
        for (int t = 0; t < tokens; t++) {
            float value[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int column = first_column + 128 * c;
                value[c] = column < args.v_dim ? shared.values[t * v_row + column] : 0.0f;
            }
            const float4* weights = reinterpret_cast<const float4*>(shared.weights + t * WEIGHT_ROW);
#pragma unroll
            for (int quad = 0; quad < 4; quad++) {
                if (quad >= quads) break;
                const float4 four = weights[quad];
                const float weight[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (guarded && weight[j] == 0.0f) continue;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) out[c][4 * quad + j] += weight[j] * value[c];
                }
            }
        }
        __syncthreads();
        now.advance(args, task, args.tile);
    }

    // The threads share the sums through the memory of the shrinking factors.
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j >= quads) break;
        const int query = warp + 4 * j;
        const float total = over_warp(sum[j], false);
        if (lane == 0) shared.shrink[query] = total;
        if (lane == 0 && query < unit.queries && blockIdx.x % args.columns == 0) {
            finish_sum(args, unit, query, high[j], total);
        }
    }
    __syncthreads();
    const bool direct = task.part == DIRECT;
#pragma unroll
    for (int query = 0; query < QUERIES; query++) {
        if (query >= unit.queries) break;
        const float total = shared.shrink[query];
        const float factor = direct && total != 0.0f ? 1.0f / total : 1.0f;
        unsigned char* to = direct ? query_of(args, args.out, unit, query)
                                   : reinterpret_cast<unsigned char*>(args.values) +
                                         part_of(args, unit, query) * args.v_dim * 4;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = first_column + 128 * c;
            if (column < args.v_dim) write_one(direct ? args.out_kind : F32, to, column, out[c][query] * factor);
        }
    }
}

KV_KERNEL(attend_plain_v128, AttendArgs, THREADS) { attend_plain<1>(args); }
KV_KERNEL(attend_plain_v256, AttendArgs, THREADS) { attend_plain<2>(args); }
