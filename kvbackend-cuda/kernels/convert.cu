// Copies that change rows: to another element type, to or from quantised codes with scales, or with a
// rotation of keys.
//
// A launch has up to four parts (grid.z: keys, values, scales) in several layers (grid.y). A part is either
// converted or copied bit for bit, for example the values that belong to rotated keys. `convert_dense`
// handles rows in f32, f16 and bf16 whose addresses are multiples of eight elements: a thread reads 16 bytes,
// or twice 16 bytes, and keeps them in registers. `convert_any` handles all other rows: a warp copies each
// row through shared memory.
#include "element.cuh"
#include "places.cuh"

enum : uint32_t {
    // Copied bit for bit.
    RAW = 0,
    // Converted, and rotated by the launch's rotation if the part has pairs.
    CONVERT = 1,
};

struct ConvertPart {
    Side src, dst;
    // The first scales on both sides, with the same kinds of strides as the rows. Null if there are none.
    Side src_scales, dst_scales;
    // The strides between an item's tokens and between heads, in bytes.
    int64_t src_token, dst_token, src_scales_token, dst_scales_token;
    int64_t src_head, dst_head, src_scales_head, dst_scales_head;
    uint32_t how, src_kind, dst_kind;
    // The numbers of tokens per item, heads per token, and elements (for RAW: units) per row.
    uint32_t tokens, heads, dim;
    // The number of elements that share a scale.
    uint32_t group;
    // The number of rotated pairs, or 0 if there are none, and whether a pair's elements are neighbours (2i,
    // 2i + 1) or in different halves (i, i + pairs).
    uint32_t pairs, interleaved;
    // The size of a RAW unit in bytes, as a power of two.
    uint32_t unit_log;
    // The number of threads that `convert_dense` uses per row.
    uint32_t tasks;
    uint32_t pad;
};

struct ConvertArgs {
    Items items;
    // Each item's position in 64 bits, or null if all items are rotated by `delta`.
    const long long* positions;
    int64_t delta;
    // The pairs (cos, sin) for each position, starting at 0; half the rotary dimension per position.
    const float2* angles;
    // The attention factor of the embedding.
    float factor;
    // The words of shared memory per warp of `convert_any`: a row in f32, and one scale per group.
    uint32_t row_words;
    ConvertPart parts[4];
};

static_assert(sizeof(ConvertPart) == 240 && sizeof(ConvertArgs) == 1016, "as in src/kernels/convert.rs");

constexpr uint32_t THREADS = 256;

// A row's location: the first bytes of the row and of its scales, on both sides.
struct RowPlace {
    const unsigned char *src, *src_scales;
    unsigned char *dst, *dst_scales;
    uint32_t item;
    bool used;
};

// Returns the location of row `r` of a part. Rows are counted by item, token and head.
__device__ __forceinline__ RowPlace row_of(const ConvertArgs& args, const ConvertPart& part, uint32_t r, bool scales) {
    const uint32_t above = r / part.heads, head = r - above * part.heads;
    const uint32_t item = above / part.tokens, token = above - item * part.tokens;
    const Place place = place_of(args.items, part.src, part.dst, item, blockIdx.y);
    RowPlace row = {place.src + part.src_token * token + part.src_head * head, nullptr,
                    place.dst + part.dst_token * token + part.dst_head * head, nullptr, item, place.used};
    if (scales) {
        const Place at = place_of(args.items, part.src_scales, part.dst_scales, item, blockIdx.y);
        row.src_scales = at.src + part.src_scales_token * token + part.src_scales_head * head;
        row.dst_scales = at.dst + part.dst_scales_token * token + part.dst_scales_head * head;
    }
    return row;
}

// An item's angles, and the sign of their sines.
struct Turn {
    const float2* row;
    float sign;
};
__device__ __forceinline__ Turn turn_of(const ConvertArgs& args, const ConvertPart& part, uint32_t item) {
    const int64_t position = args.positions ? args.positions[item] : args.delta;
    const int64_t at = position < 0 ? -position : position;
    return {args.angles + at * part.pairs, position < 0 ? -1.0f : 1.0f};
}

__device__ __forceinline__ void rotate(float& a, float& b, float2 angle, float sign, float factor) {
    const float sine = angle.y * sign, x = a, y = b;
    a = (x * angle.x - y * sine) * factor;
    b = (x * sine + y * angle.x) * factor;
}

__device__ __forceinline__ void load8_dense(uint32_t kind, const unsigned char* row, uint32_t first, float (&x)[8]) {
    switch (kind) {
        case F32: load8<F32>(row + 4 * static_cast<int64_t>(first), x); break;
        case F16: load8<F16>(row + 2 * static_cast<int64_t>(first), x); break;
        default: load8<BF16>(row + 2 * static_cast<int64_t>(first), x); break;
    }
}

__device__ __forceinline__ void store8_dense(uint32_t kind, unsigned char* row, uint32_t first, const float (&x)[8]) {
    switch (kind) {
        case F32: store8<F32>(row + 4 * static_cast<int64_t>(first), x); break;
        case F16: store8<F16>(row + 2 * static_cast<int64_t>(first), x); break;
        default: store8<BF16>(row + 2 * static_cast<int64_t>(first), x); break;
    }
}

template <typename Unit>
__device__ __forceinline__ void copy_unit(const RowPlace& row, uint32_t u) {
    reinterpret_cast<Unit*>(row.dst)[u] = reinterpret_cast<const Unit*>(row.src)[u];
}

__device__ __forceinline__ void copy_unit_of(const RowPlace& row, uint32_t u, uint32_t unit_log) {
    switch (unit_log) {
        case 4: copy_unit<uint4>(row, u); break;
        case 3: copy_unit<uint2>(row, u); break;
        case 2: copy_unit<uint32_t>(row, u); break;
        case 1: copy_unit<uint16_t>(row, u); break;
        default: copy_unit<uint8_t>(row, u); break;
    }
}

// Converts eight elements of a row, starting at element `first`. Copies them bit for bit if both sides have
// the same type.
__device__ __forceinline__ void convert8(const ConvertPart& part, const RowPlace& row, uint32_t first) {
    if (part.src_kind == part.dst_kind) {
        const uint32_t log = part.src_kind == F32 ? 1 : 0; // units of 16 bytes that eight elements take
        for (uint32_t u = 0; u <= log; u++) copy_unit<uint4>(row, (first >> 3 << log) + u);
        return;
    }
    float x[8];
    load8_dense(part.src_kind, row.src, first, x);
    store8_dense(part.dst_kind, row.dst, first, x);
}

KV_KERNEL(convert_dense, ConvertArgs, THREADS) {
    const ConvertPart& part = args.parts[blockIdx.z];
    const uint64_t total = static_cast<uint64_t>(args.items.count) * part.tokens * part.heads * part.tasks;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * THREADS;
    for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; at < total; at += stride) {
        // The host rejects launches whose tasks do not fit in 32 bits.
        const uint32_t r = static_cast<uint32_t>(at) / part.tasks, task = static_cast<uint32_t>(at) - r * part.tasks;
        const RowPlace row = row_of(args, part, r, false);
        if (!row.used) continue;
        if (part.how == RAW) {
            copy_unit<uint4>(row, task);
            continue;
        }
        // The tasks of a row start with the pairs, followed by the elements that are not rotated.
        const uint32_t turning = part.interleaved ? part.pairs >> 2 : part.pairs >> 3;
        if (task >= turning) {
            convert8(part, row, 2 * part.pairs + 8 * (task - turning));
            continue;
        }
        const Turn turn = turn_of(args, part, row.item);
        if (part.interleaved) {
            float x[8];
            load8_dense(part.src_kind, row.src, 8 * task, x);
#pragma unroll
            for (int i = 0; i < 4; i++) rotate(x[2 * i], x[2 * i + 1], turn.row[4 * task + i], turn.sign, args.factor);
            store8_dense(part.dst_kind, row.dst, 8 * task, x);
        } else {
            float low[8], high[8];
            load8_dense(part.src_kind, row.src, 8 * task, low);
            load8_dense(part.src_kind, row.src, part.pairs + 8 * task, high);
#pragma unroll
            for (int i = 0; i < 8; i++) rotate(low[i], high[i], turn.row[8 * task + i], turn.sign, args.factor);
            store8_dense(part.dst_kind, row.dst, 8 * task, low);
            store8_dense(part.dst_kind, row.dst, part.pairs + 8 * task, high);
        }
    }
}

// Returns the largest code of an integer format.
__device__ __forceinline__ float largest_code(uint32_t kind) { return kind == I8 ? 127.0f : 7.0f; }

// Returns a group's scale in f16, rounded up so that no finite element is clipped. Returns NaN if an element
// is not finite or the scale is too large.
__device__ __forceinline__ uint16_t scale_of(const float* group, uint32_t n, uint32_t kind) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < n; i++) most = max(most, __float_as_uint(group[i]) & 0x7fffffffu);
    if (most >= 0x7f800000u) return 0x7e00;
    const float amax = __uint_as_float(most), limit = largest_code(kind);
    uint16_t near = f32_to_f16(amax / limit);
    if (near < 0x7c00 && f16_to_f32(near) * limit < amax) near++;
    return near < 0x7c00 ? near : 0x7e00;
}

__device__ __forceinline__ uint32_t integer_code(float x, float step, float limit) {
    if (!(step > 0.0f)) return 0; // zero or NaN
    const float scaled = fminf(fmaxf(x / step, -limit), limit);
    return static_cast<uint32_t>(static_cast<int>(rintf(scaled)));
}

__device__ __forceinline__ uint32_t float_code(uint32_t kind, float x, float step) {
    const float largest = kind == E4M3 ? 448.0f : 57344.0f;
    const bool finite = (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
    const float scaled = x / step;
    const float y = finite ? fminf(fmaxf(scaled, -largest), largest) : scaled;
    return kind == E4M3 ? f32_to_e4m3(y) : f32_to_e5m2(y);
}

// Reads a row into shared memory as f32. All lanes of a warp must call this function.
__device__ __forceinline__ void read_row(const ConvertPart& part, const RowPlace& row, float* wide, uint32_t lane) {
    const bool integers = part.src_kind == I8 || part.src_kind == I4;
    const bool floats = part.src_kind == E4M3 || part.src_kind == E5M2;
    for (uint32_t i = lane; i < part.dim; i += 32) {
        float x = read(static_cast<int>(part.src_kind), row.src, i);
        if (integers) x *= f16_to_f32(reinterpret_cast<const uint16_t*>(row.src_scales)[i / part.group]);
        if (floats) x *= *reinterpret_cast<const float*>(row.src_scales);
        wide[i] = x;
    }
}

// Writes a row from shared memory, and its scales in integer formats.
__device__ __forceinline__ void write_row(const ConvertPart& part, const RowPlace& row, const float* wide, float* steps,
                                          uint32_t lane) {
    const uint32_t kind = part.dst_kind;
    if (kind == I8 || kind == I4) {
        for (uint32_t g = lane; g < part.dim / part.group; g += 32) {
            const uint16_t scale = scale_of(wide + g * part.group, part.group, kind);
            reinterpret_cast<uint16_t*>(row.dst_scales)[g] = scale;
            steps[g] = f16_to_f32(scale);
        }
        __syncwarp();
        const float limit = largest_code(kind);
        const uint32_t per_byte = kind == I8 ? 1 : 2;
        for (uint32_t i = lane; i < part.dim / per_byte; i += 32) {
            uint32_t code = integer_code(wide[per_byte * i], steps[per_byte * i / part.group], limit) & 0xffu;
            if (kind == I4) {
                const uint32_t high = integer_code(wide[2 * i + 1], steps[(2 * i + 1) / part.group], limit);
                code = (code & 0xfu) | (high & 0xfu) << 4;
            }
            row.dst[i] = static_cast<unsigned char>(code);
        }
        return;
    }
    if (kind == E4M3 || kind == E5M2) {
        const float step = *reinterpret_cast<const float*>(row.dst_scales);
        for (uint32_t i = lane; i < part.dim; i += 32) {
            row.dst[i] = static_cast<unsigned char>(float_code(kind, wide[i], step));
        }
        return;
    }
    // Elements past the rotated pairs keep their bits.
    const bool keeps = part.pairs > 0 && part.src_kind == kind;
    for (uint32_t i = lane; i < part.dim; i += 32) {
        if (keeps && i >= 2 * part.pairs) {
            if (kind == F32) {
                reinterpret_cast<uint32_t*>(row.dst)[i] = reinterpret_cast<const uint32_t*>(row.src)[i];
            } else {
                reinterpret_cast<uint16_t*>(row.dst)[i] = reinterpret_cast<const uint16_t*>(row.src)[i];
            }
        } else {
            write(static_cast<int>(kind), row.dst, i, wide[i]);
        }
    }
}

KV_KERNEL(convert_any, ConvertArgs, THREADS) {
    const ConvertPart& part = args.parts[blockIdx.z];
    const uint32_t warps = blockDim.x / 32, lane = threadIdx.x % 32;
    float* wide = reinterpret_cast<float*>(kv_shared()) + static_cast<size_t>(threadIdx.x / 32) * args.row_words;
    float* steps = wide + part.dim;
    const uint64_t rows = static_cast<uint64_t>(args.items.count) * part.tokens * part.heads;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * warps;
    for (uint64_t r = static_cast<uint64_t>(blockIdx.x) * warps + threadIdx.x / 32; r < rows; r += stride) {
        const RowPlace row = row_of(args, part, static_cast<uint32_t>(r), part.how == CONVERT);
        if (!row.used) continue;
        if (part.how == RAW) {
            for (uint32_t u = lane; u < part.dim; u += 32) copy_unit_of(row, u, part.unit_log);
            continue;
        }
        read_row(part, row, wide, lane);
        __syncwarp();
        if (part.pairs > 0) {
            const Turn turn = turn_of(args, part, row.item);
            for (uint32_t i = lane; i < part.pairs; i += 32) {
                const uint32_t a = part.interleaved ? 2 * i : i, b = part.interleaved ? 2 * i + 1 : i + part.pairs;
                rotate(wide[a], wide[b], turn.row[i], turn.sign, args.factor);
            }
            __syncwarp();
        }
        write_row(part, row, wide, steps, lane);
        __syncwarp();
    }
}
