// Attention mass in f32 arithmetic, for every format and every shape: the weights of all rows of an entry, summed for
// each token.
//
// A block takes one tile of tokens, which stays in shared memory, and the query heads that share a K and V head. It
// goes through all rows, up to 16 queries at a time: a thread computes the logits of four queries and one token, and
// then adds weights of its warp's queries for one token. The sums of each unit of heads are left in scratch memory, and
// a second kernel adds them up, so that the order never changes.
#include "attend_plain.cuh"

struct MassArgs {
    AttendArgs attend;
    // Sums of each unit of heads, and the number of tokens.
    uint64_t units_sums;
    uint64_t sums;
    uint32_t tokens, rows;
};
static_assert(sizeof(MassArgs) == sizeof(AttendArgs) + 24, "as mass.rs has it");

// Zeros the rest of each row, which no load writes.
__device__ __forceinline__ void clear_ends(float* rows, int count, int row, int dim) {
    const int width = row - dim;
    for (int i = threadIdx.x; i < count * width; i += THREADS) rows[i / width * row + dim + i % width] = 0.0f;
}

KV_KERNEL(attend_mass, MassArgs, THREADS) {
    const AttendArgs& attend = args.attend;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PlainShared shared(attend);
    AttendUnit unit = unit_of(attend, blockIdx.x);
    const TaskRecord task = unit.task;
    const RunRecord run = records<RunRecord>(attend.runs)[task.run];
    const int quads = attend.quads, shares = WARPS / quads;
    const int k_row = 4 * fours_of(attend.k_dim), v_row = 4 * fours_of(attend.v_dim);
    const bool latent = attend.latent.at != 0;
    const int64_t offset = attend.unrotated || attend.pairs == 0 ? 0 : run.offset;
    const float factor = attend.scale * run.logit_scale;

    Walk tile;
    tile.begin(attend, task);
    const int tokens = static_cast<int>(tile.end - tile.start);
    clear_ends(shared.keys, attend.tile, k_row, attend.k_dim);
    clear_ends(shared.values, attend.tile, v_row, attend.v_dim);
    find_rows(attend, unit, tile, shared.places, shared.numbers);
    __syncthreads();
    // Keys, then latents, in one loop, so the code for all formats exists only once.
#pragma unroll 1
    for (int side = 0; side < (latent ? 2 : 1); side++) {
        load_rows(attend.kind, side == 0 ? shared.keys : shared.values, shared.places + side * TOKENS,
                  shared.places + (2 + side) * TOKENS, tokens, side == 0 ? attend.k_dim : attend.v_dim,
                  side == 0 ? attend.k_group : attend.v_group, (attend.eights >> side & 1) != 0);
    }
    __syncthreads();
    if (attend.unrotated) {
        turn_keys(attend, shared.keys, shared.numbers, tokens, records<SegmentRecord>(attend.segments)[run.segment].position);
    }

    // This thread's sum of weights: of its warp's queries, for the token of its lane.
    float sum = 0.0f;
    const uint32_t token = tile.start + lane;
    for (uint32_t row = 0; row < task.rows; row += args.rows) {
        unit.task.row = task.row + row;
        unit.task.rows = min(task.rows - row, args.rows);
        unit.queries = static_cast<int>(unit.task.rows) * attend.unit_heads;
        __syncthreads();
        load_fours(attend, unit, attend.q, attend.q_kind, attend.k_dim, shared.queries);
        if (latent) load_fours(attend, unit, attend.latent, attend.latent_kind, attend.v_dim, shared.latents);
        if (threadIdx.x < QUERIES) shared.seen[threadIdx.x] = seen_by(attend, unit, run, threadIdx.x);
        __syncthreads();
        if (attend.pairs > 0) {
            turn_queries(attend, unit, offset, shared.queries);
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
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= quads) break;
            const int query = warp + 4 * j;
            const int2 seen = shared.seen[query];
            if (lane >= tokens || token < static_cast<uint32_t>(seen.x) || token >= static_cast<uint32_t>(seen.y)) {
                continue;
            }
            float logit = 0.0f;
            for (int share = 0; share < shares; share++) {
                logit += shared.logits[((share * quads + query / 4) * 4 + query % 4) * TOKENS + lane];
            }
            logit *= factor;
            if (attend.softcap > 0.0f) logit = capped(logit, attend.softcap);
            const float lse = *reinterpret_cast<const float*>(query_of(attend, attend.lse, unit, query));
            // A row whose logits are all −∞ has no weights.
            if (lse != minus_infinity()) sum += exp2f((logit - lse) * LOG2_E);
        }
    }

    __syncthreads();
    shared.logits[warp * TOKENS + lane] = sum;
    __syncthreads();
    if (warp == 0 && lane < tokens) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.logits[w * TOKENS + lane];
        float* to = reinterpret_cast<float*>(args.units_sums) + static_cast<int64_t>(blockIdx.x % attend.units) * args.tokens;
        to[task.part + lane] = total;
    }
}

// Adds the sums of all units of heads to the tensor of sums.
KV_KERNEL(attend_mass_add, MassArgs, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (token >= args.tokens) return;
    float* to = reinterpret_cast<float*>(args.sums) + token;
    float sum = *to;
    const float* from = reinterpret_cast<const float*>(args.units_sums) + token;
    for (int unit = 0; unit < args.attend.units; unit++) sum += from[static_cast<int64_t>(unit) * args.tokens];
    *to = sum;
}
