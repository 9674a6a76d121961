// The second half of attention: merges the parts of each row and head and normalises the softmax, first
// within each merge group, then across the groups by their scaled log-sum-exps. A block handles one row and
// head; its warps share the parts.
#include "attend.cuh"

struct MergeArgs {
    AttendRows out, lse;
    uint64_t sums, values;
    // Addresses of the row records, the groups' ranges, the part lists, and the groups' factors.
    uint64_t rows, ranges, lists, groups;
    int32_t count, heads, v_dim, out_kind;
};
static_assert(sizeof(MergeArgs) == 112, "as merge.rs has it");

// An output row: its index, the offset of its part list, and its groups.
struct MergedRow {
    uint32_t row, list, range, ranges;
};

// The parts of one group, counted from the row's first part.
struct GroupRange {
    uint32_t begin, end, group, pad;
};

// The number of columns that a block sums at once: four per lane.
constexpr int COLUMNS = 128;

struct MergeShared {
    float weights[THREADS];
    uint32_t parts[THREADS];
    float sums[WARPS][COLUMNS];
};

// The largest logit, and the sum of exponentials.
struct OpenSum {
    float high, sum;
};

__device__ __forceinline__ float scaled(const OpenSum& part, float high) {
    return part.sum == 0.0f ? 0.0f : part.sum * exp2f((part.high - high) * LOG2_E);
}

// Adds two sums. A sum that is NaN is not empty.
__device__ __forceinline__ OpenSum joined(const OpenSum& a, const OpenSum& b) {
    const float high = fmaxf(a.high, b.high), against = reference(high);
    return {high, scaled(a, against) + scaled(b, against)};
}

struct MergeRow {
    const uint32_t* list;
    const float2* sums;
    int heads, head;

    __device__ __forceinline__ int64_t place(uint32_t i) const { return static_cast<int64_t>(list[i]) * heads + head; }

    __device__ __forceinline__ OpenSum part(uint32_t i) const {
        const float2 sum = sums[place(i)];
        return {sum.x, sum.y};
    }

    // Sums a group's parts. Each warp computes the same sum.
    __device__ __forceinline__ OpenSum group(const GroupRange& range) const {
        OpenSum all{minus_infinity(), 0.0f};
        for (uint32_t i = range.begin + threadIdx.x % 32; i < range.end; i += 32) all = joined(all, part(i));
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            const float high = __shfl_xor_sync(0xffffffffu, all.high, lanes);
            const float sum = __shfl_xor_sync(0xffffffffu, all.sum, lanes);
            all = joined(all, OpenSum{high, sum});
        }
        return all;
    }
};

__device__ __forceinline__ float lse_of(const OpenSum& sum) {
    return sum.sum == 0.0f ? minus_infinity() : sum.high + logf(sum.sum);
}

KV_KERNEL(attend_merge, MergeArgs, THREADS) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    MergeShared& shared = *reinterpret_cast<MergeShared*>(kv_shared());
    const MergedRow row = records<MergedRow>(args.rows)[blockIdx.x / args.heads];
    if (row.row == ABSENT) return;
    const int head = static_cast<int>(blockIdx.x % args.heads);
    const MergeRow parts{records<uint32_t>(args.lists) + row.list, records<float2>(args.sums), args.heads, head};
    const GroupRange* ranges = records<GroupRange>(args.ranges) + row.range;
    const float* factors = records<float>(args.groups);

    // The softmax over the groups, where each group counts as one logit.
    OpenSum all{minus_infinity(), 0.0f}, group{minus_infinity(), 0.0f};
    for (uint32_t i = 0; i < row.ranges; i++) {
        group = parts.group(ranges[i]);
        const float lse = lse_of(group) * factors[ranges[i].group];
        // The difference is 0, or NaN if the log-sum-exp is not finite.
        if (group.sum != 0.0f && lse != minus_infinity()) all = joined(all, OpenSum{lse, 1.0f + (lse - lse)});
    }
    if (args.lse.at != 0 && thread == 0) {
        *reinterpret_cast<float*>(args.lse.at + row.row * args.lse.row + head * args.lse.head) = lse_of(all);
    }

    unsigned char* out = reinterpret_cast<unsigned char*>(args.out.at + row.row * args.out.row + head * args.out.head);
    for (int first = 0; first < args.v_dim; first += COLUMNS) {
        float x[COLUMNS / 32] = {};
        // This lane's first column of part 0, the number of columns starting there, and the stride between
        // parts.
        const float* values = records<float>(args.values) + static_cast<int64_t>(head) * args.v_dim + first + lane;
        const int left = args.v_dim - first - lane;
        const int64_t stride = static_cast<int64_t>(args.heads) * args.v_dim;
        for (uint32_t i = 0; i < row.ranges; i++) {
            const GroupRange range = ranges[i];
            if (row.ranges > 1) group = parts.group(range);
            const float lse = lse_of(group) * factors[range.group];
            if (group.sum == 0.0f || lse == minus_infinity()) continue;
            const float share = exp2f((lse - reference(all.high)) * LOG2_E) / (group.sum * all.sum);
            for (uint32_t begin = range.begin; begin < range.end; begin += THREADS) {
                const int count = static_cast<int>(min(range.end - begin, static_cast<uint32_t>(THREADS)));
                if (thread < count) {
                    const OpenSum part = parts.part(begin + thread);
                    const float weight = exp2f((part.high - reference(group.high)) * LOG2_E) * share;
                    shared.weights[thread] = part.sum == 0.0f ? 0.0f : weight;
                    shared.parts[thread] = parts.list[begin + thread];
                }
                __syncthreads();
#pragma unroll 4
                for (int j = warp; j < count; j += WARPS) {
                    const float weight = shared.weights[j];
                    const float* at = values + shared.parts[j] * stride;
#pragma unroll
                    for (int c = 0; c < COLUMNS / 32; c++) {
                        if (32 * c < left) x[c] += weight * at[32 * c];
                    }
                }
                __syncthreads();
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS / 32; c++) shared.sums[warp][lane + 32 * c] = x[c];
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.sums[w][thread];
        if (first + thread < args.v_dim) write_one(args.out_kind, out, first + thread, total);
        __syncthreads();
    }
}
