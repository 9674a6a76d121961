// The second half of attention: closes the softmax of each row and head over its parts, first within each merge
// group, then over the groups by their scaled log-sum-exps. A warp works on one row and head.
#include "attend.cuh"

struct MergeArgs {
    AttendRows out, lse;
    uint64_t sums, values;
    // Records of the rows, lists of parts sorted by group, and the factors of the groups.
    uint64_t rows, lists, groups;
    int32_t count, heads, v_dim, out_kind;
};
static_assert(sizeof(MergeArgs) == 104, "as merge.rs has it");

// A row of the output, and its parts in the lists.
struct MergedRow {
    uint32_t row, list, parts, pad;
};

// A part of a row, and its merge group.
struct ListedPart {
    uint32_t part, group;
};

// Largest logit and sum of the parts of one group.
struct GroupSum {
    float high, sum;
    uint32_t end;
};

__device__ __forceinline__ float weight(float2 part, float high) { return exp2f((part.x - high) * LOG2_E); }

__device__ __forceinline__ float2 sum_of(const MergeArgs& args, const ListedPart& part, int head) {
    return records<float2>(args.sums)[static_cast<int64_t>(part.part) * args.heads + head];
}

// Sums up the parts of the group that begins at `begin`. A NaN counts as a part that is not empty.
__device__ __forceinline__ GroupSum group_sum(const MergeArgs& args, const ListedPart* list, uint32_t begin,
                                              uint32_t parts, int head) {
    GroupSum group{minus_infinity(), 0.0f, begin};
    while (group.end < parts && list[group.end].group == list[begin].group) {
        const float2 part = sum_of(args, list[group.end++], head);
        if (part.y == 0.0f) continue;
        const float high = reference(fmaxf(group.high, part.x));
        group.sum = group.sum * weight(make_float2(group.high, 0.0f), high) + part.y * weight(part, high);
        group.high = fmaxf(group.high, part.x);
    }
    return group;
}

KV_KERNEL(attend_merge, MergeArgs, THREADS) {
    const int lane = threadIdx.x % 32;
    const int64_t number = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (number >= static_cast<int64_t>(args.count) * args.heads) return;
    const MergedRow row = records<MergedRow>(args.rows)[number / args.heads];
    const int head = static_cast<int>(number % args.heads);
    const ListedPart* list = records<ListedPart>(args.lists) + row.list;
    const float* factors = records<float>(args.groups);

    // The softmax over the groups.
    float high = minus_infinity(), sum = 0.0f;
    for (uint32_t next = 0; next < row.parts;) {
        const uint32_t begin = next;
        const GroupSum group = group_sum(args, list, begin, row.parts, head);
        next = group.end;
        const float lse = (group.high + logf(group.sum)) * factors[list[begin].group];
        if (group.sum == 0.0f || lse == minus_infinity()) continue;
        const float most = reference(fmaxf(high, lse));
        sum = sum * exp2f((high - most) * LOG2_E) + exp2f((lse - most) * LOG2_E);
        high = fmaxf(high, lse);
    }
    if (args.lse.at != 0 && lane == 0) {
        float* lse = reinterpret_cast<float*>(args.lse.at + row.row * args.lse.row + head * args.lse.head);
        *lse = sum == 0.0f ? minus_infinity() : high + logf(sum);
    }

    unsigned char* out = reinterpret_cast<unsigned char*>(args.out.at + row.row * args.out.row + head * args.out.head);
    // Columns lie a warp apart, four at a time.
    for (int first = lane; first < args.v_dim; first += 128) {
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (uint32_t next = 0; next < row.parts;) {
            const uint32_t begin = next;
            const GroupSum group = group_sum(args, list, begin, row.parts, head);
            next = group.end;
            const float lse = (group.high + logf(group.sum)) * factors[list[begin].group];
            if (group.sum == 0.0f || lse == minus_infinity()) continue;
            const float share = exp2f((lse - reference(high)) * LOG2_E) / (group.sum * sum);
            for (uint32_t i = begin; i < next; i++) {
                const float2 part = sum_of(args, list[i], head);
                if (part.y == 0.0f) continue;
                const float factor = weight(part, reference(group.high)) * share;
                const float* values =
                    records<float>(args.values) + (static_cast<int64_t>(list[i].part) * args.heads + head) * args.v_dim;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (first + 32 * j < args.v_dim) x[j] += factor * values[first + 32 * j];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (first + 32 * j < args.v_dim) write(args.out_kind, out, first + 32 * j, x[j]);
        }
    }
}
