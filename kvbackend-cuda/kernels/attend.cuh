// Shared by the attention kernels: their argument, a plan's records, row addresses, rotations, results.
//
// A task is a tile of query rows of one entry, with some runs of tokens that these rows see. A block works on
// one task, for one unit of query heads that share a K head and a V head. These `rows * unit_heads` queries
// read each tile of keys and values once. If a tile has only one task, that task writes the output directly.
// Other tasks write a part, an unnormalised softmax; `attend_merge.cu` merges the parts.
//
// The structs match src/kernels/attend/args.rs and records.rs.
#pragma once

#include "element.cuh"

// The numbers of threads and of warps per block.
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

constexpr float LOG2_E = 1.4426950408889634f;

// K or V of one layer, in bytes: the address, the strides of a block, a token and a head, and the same four
// values for its scales.
struct AttendPlane {
    uint64_t at;
    int64_t block, token, head;
    uint64_t scales;
    int64_t scale_block, scale_token, scale_head;
};

// A tensor `[rows, heads, dim]` or `[rows, heads]`. Strides are in bytes.
struct AttendRows {
    uint64_t at;
    int64_t row, head;
};

struct AttendArgs {
    AttendPlane k, v;
    // Latent queries and log-sum-exps have address 0 if there are none.
    AttendRows q, latent, out, lse;
    // The addresses of the plan's records.
    uint64_t rows, segments, tables, runs, tasks;
    // The parts: (largest logit, sum) for each row and head, and the weighted sums of values.
    uint64_t sums, values;
    // The cosine and sine for each position and pair.
    uint64_t angles;
    int64_t window;
    float scale;
    // The soft cap of logits, or 0 if there is none.
    float softcap;
    // The rotary embedding's attention factor.
    float factor;
    // The number of rotated pairs, or 0 if nothing is rotated.
    int32_t pairs;
    int32_t interleaved;
    // Whether keys are rotated when they are read.
    int32_t unrotated;
    int32_t kind, q_kind, latent_kind, out_kind;
    int32_t k_dim, v_dim;
    // The number of elements that share a scale.
    int32_t k_group, v_group;
    int32_t block_size;
    int32_t heads, k_heads, v_heads;
    int32_t unit_heads, units;
    // The numbers of terms that queries and latent queries are split into for tensor cores.
    int32_t q_terms, latent_terms;
    // For the plain kernel: tokens per tile, groups of four queries (1, 2 or 4), blocks that share a task's
    // columns, and flags for reading eight elements of keys (1) and of values (2) at once.
    int32_t tile, quads, columns;
    int32_t eights;
};
static_assert(sizeof(AttendPlane) == 64 && sizeof(AttendRows) == 24 && sizeof(AttendArgs) == 400, "as args.rs has it");

struct RowRecord {
    int64_t logical, position;
};

struct SegmentRecord {
    int64_t logical_start;
    // The position at which token 0 is used.
    int64_t position;
    uint32_t len;
    uint32_t pad;
};

// The tokens `first..end` of a segment or of a list of selected tokens.
struct RunRecord {
    uint32_t segment, first, end;
    // The offset in the tables of the segment's blocks, or of a list of pairs of block and token.
    uint32_t table;
    // The segment's position offset and logit scale.
    int64_t offset;
    float logit_scale;
    uint32_t listed;
};

struct TaskRecord {
    // The first row, the number of rows, the first run and the number of runs.
    uint32_t row, rows, run, runs;
    // The first part, counted in rows of all heads, or DIRECT if the task writes the output directly.
    uint32_t part;
    // The factor for the log-sum-exp, if the task writes it directly.
    float lse_scale;
};
static_assert(sizeof(RowRecord) == 16 && sizeof(SegmentRecord) == 24 && sizeof(RunRecord) == 32 &&
                  sizeof(TaskRecord) == 24,
              "as records.rs has it");

constexpr uint32_t DIRECT = 0xffffffffu;
// The row count of an unused task, or the row of an unused merge, in the room of a captured plan.
constexpr uint32_t ABSENT = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <typename T>
__device__ __forceinline__ const T* records(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}

// The work of a thread block.
struct AttendUnit {
    TaskRecord task;
    // The first query head, and the K and V heads that all of the block's heads read.
    int head, k_head, v_head;
    // Number of queries, rows times heads. Query `i` is row `i / unit_heads`, head `head + i % unit_heads`.
    int queries;
};

__device__ __forceinline__ AttendUnit unit_of(const AttendArgs& args, uint32_t block) {
    AttendUnit unit;
    unit.task = records<TaskRecord>(args.tasks)[block / args.units];
    unit.head = static_cast<int>(block % args.units) * args.unit_heads;
    unit.k_head = static_cast<int>(static_cast<int64_t>(unit.head) * args.k_heads / args.heads);
    unit.v_head = static_cast<int>(static_cast<int64_t>(unit.head) * args.v_heads / args.heads);
    unit.queries = static_cast<int>(unit.task.rows) * args.unit_heads;
    return unit;
}

// A tile of tokens: the index of its run in the task, its first token, the run's end, and the offset of the
// run's token list. A walk advances through all of the task's runs.
struct Walk {
    uint32_t number, start, end, table;
    bool listed, more;

    __device__ __forceinline__ void begin(const AttendArgs& args, const TaskRecord& task) {
        number = start = end = table = 0;
        listed = false;
        more = task.runs > 0;
        if (more) enter(args, task);
    }

    __device__ __forceinline__ void enter(const AttendArgs& args, const TaskRecord& task) {
        const RunRecord run = records<RunRecord>(args.runs)[task.run + number];
        start = run.first, end = run.end, table = run.table, listed = run.listed != 0;
    }

    __device__ __forceinline__ void advance(const AttendArgs& args, const TaskRecord& task, uint32_t tokens) {
        if (!more) return;
        if (end - start > tokens) {
            start += tokens;
        } else if (++number < task.runs) {
            enter(args, task);
        } else {
            more = false;
        }
    }
};

// A token's block, its index in the block, and its index in the segment.
struct Place {
    int64_t block;
    uint32_t token, number;
};

__device__ __forceinline__ Place place_of(const AttendArgs& args, const Walk& run, uint32_t i) {
    const uint32_t* table = records<uint32_t>(args.tables) + run.table;
    const uint32_t size = args.block_size;
    if (run.listed) {
        const uint64_t at = 2 * static_cast<uint64_t>(i);
        return {table[at], table[at + 1] % size, table[at + 1]};
    }
    return {table[i / size], i % size, i};
}

__device__ __forceinline__ const unsigned char* row_of(const AttendPlane& plane, const Place& place, int head) {
    return reinterpret_cast<const unsigned char*>(plane.at + place.block * plane.block + place.token * plane.token +
                                                  head * plane.head);
}

__device__ __forceinline__ const unsigned char* scales_of(const AttendPlane& plane, const Place& place, int head) {
    return reinterpret_cast<const unsigned char*>(plane.scales + place.block * plane.scale_block +
                                                  place.token * plane.scale_token + head * plane.scale_head);
}

// Returns scale `i` of a row whose scales start at `scales`.
__device__ __forceinline__ float scale_at(int kind, const unsigned char* scales, int i) {
    if (kind == I8 || kind == I4) return f16_to_f32(reinterpret_cast<const uint16_t*>(scales)[i]);
    if (kind == E4M3 || kind == E5M2) return *reinterpret_cast<const float*>(scales);
    return 1.0f;
}

__device__ __forceinline__ unsigned char* query_of(const AttendArgs& args, const AttendRows& rows,
                                                   const AttendUnit& unit, int query) {
    const int64_t row = static_cast<int64_t>(unit.task.row) + query / args.unit_heads;
    return reinterpret_cast<unsigned char*>(rows.at + row * rows.row +
                                            (unit.head + query % args.unit_heads) * rows.head);
}

// Returns the first and the end of the run's tokens that a query sees. It sees every token of a list.
__device__ __forceinline__ int2 seen_by(const AttendArgs& args, const AttendUnit& unit, const RunRecord& run,
                                        int query) {
    if (query >= unit.queries) return make_int2(0, 0);
    if (run.listed) return make_int2(static_cast<int>(run.first), static_cast<int>(run.end));
    const SegmentRecord segment = records<SegmentRecord>(args.segments)[run.segment];
    const RowRecord row = records<RowRecord>(args.rows)[unit.task.row + query / args.unit_heads];
    const int64_t behind = row.logical + 1 - segment.logical_start;
    const int64_t end = behind < 0 ? 0 : behind < segment.len ? behind : segment.len;
    const int64_t old = row.position - segment.position - args.window + 1;
    const int64_t first = old < 0 ? 0 : old < end ? old : end;
    return make_int2(static_cast<int>(first), static_cast<int>(end));
}

// Returns the position to which a query is rotated for a segment at an offset.
__device__ __forceinline__ int64_t turn_of(const AttendArgs& args, const AttendUnit& unit, int64_t offset, int query) {
    const int64_t position = records<RowRecord>(args.rows)[unit.task.row + query / args.unit_heads].position;
    return args.unrotated ? position : position - offset;
}

// Returns both elements of pair `i`, rotated by the angle of a position.
__device__ __forceinline__ float2 turned(const AttendArgs& args, float2 x, int64_t position, int i) {
    const int64_t distance = position < 0 ? -position : position;
    const float2 angle = records<float2>(args.angles)[distance * args.pairs + i];
    const float sine = position < 0 ? -angle.y : angle.y;
    return make_float2((x.x * angle.x - x.y * sine) * args.factor, (x.x * sine + x.y * angle.x) * args.factor);
}

// Returns the indices of the two elements of pair `i`.
__device__ __forceinline__ int2 pair_of(const AttendArgs& args, int i) {
    return args.interleaved ? make_int2(2 * i, 2 * i + 1) : make_int2(i, i + args.pairs);
}

// Returns element `i` of a row in f32, f16 or bf16.
__device__ __forceinline__ float dense_at(int kind, const unsigned char* row, int i) {
    if (kind == F32) return load1<F32>(row, i);
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
    return kind == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

// Writes element `i` of a row in f32, f16 or bf16.
__device__ __forceinline__ void write_one(int kind, unsigned char* row, int i, float x) {
    if (kind == F32) {
        reinterpret_cast<float*>(row)[i] = x;
    } else {
        reinterpret_cast<uint16_t*>(row)[i] = kind == F16 ? f32_to_f16(x) : f32_to_bf16(x);
    }
}

// Writes elements `i` and `i + 1` of a row in f32, f16 or bf16.
__device__ __forceinline__ void write_two(int kind, unsigned char* row, int i, float x, float y) {
    if (kind == F32) {
        float* at = reinterpret_cast<float*>(row) + i;
        at[0] = x, at[1] = y;
    } else {
        const uint32_t pair = kind == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
        uint16_t* at = reinterpret_cast<uint16_t*>(row) + i;
        at[0] = static_cast<uint16_t>(pair), at[1] = static_cast<uint16_t>(pair >> 16);
    }
}

// Returns a logit with its soft cap. The hyperbolic tangent is computed by its definition, with an error of
// 2^-24 of its largest value, 1. This is as precise as the logit itself, whose magnitude is about the cap.
__device__ __forceinline__ float capped(float logit, float cap) {
    const float shrink = exp2f(fabsf(logit / cap) * (-2.0f * LOG2_E));
    return copysignf(cap * ((1.0f - shrink) / (1.0f + shrink)), logit);
}

// Returns the reference for the exponents: the largest logit, or 0 if there is none.
__device__ __forceinline__ float reference(float high) { return high == minus_infinity() ? 0.0f : high; }

// Returns whether an f32 value is NaN or infinite.
__device__ __forceinline__ bool spoiled(float x) { return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u; }

// Returns the index of a query among the parts.
__device__ __forceinline__ int64_t part_of(const AttendArgs& args, const AttendUnit& unit, int query) {
    const int64_t row = static_cast<int64_t>(unit.task.part) + query / args.unit_heads;
    return row * args.heads + unit.head + query % args.unit_heads;
}

// Writes a query's values that belong to no column: a part's largest logit and sum, or the
// log-sum-exp.
__device__ __forceinline__ void finish_sum(const AttendArgs& args, const AttendUnit& unit, int query, float high,
                                           float sum) {
    if (unit.task.part != DIRECT) {
        reinterpret_cast<float2*>(args.sums)[part_of(args, unit, query)] = make_float2(high, sum);
    } else if (args.lse.at != 0) {
        const float lse = sum == 0.0f ? minus_infinity() : (high + logf(sum)) * unit.task.lse_scale;
        *reinterpret_cast<float*>(query_of(args, args.lse, unit, query)) = lse;
    }
}
