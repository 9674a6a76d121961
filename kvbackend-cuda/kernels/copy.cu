// Bit-for-bit copies: rows to slots and back, whole blocks in all layers, and tensors with any strides.
//
// A launch copies several parts (K, V and their scales: grid.z) in several layers (grid.y). An item of a part
// consists of a few runs of bytes that are contiguous on both sides. A team of threads copies an item in
// units of up to 16 bytes; the team's lanes copy neighbouring units. Each thread has four units in flight,
// from four items or, if items are long, from a single item.
#include "places.cuh"

// The items of a tensor copy: up to five axes over runs, outermost first. Item indices count along these
// axes.
struct Axes {
    uint32_t n[5];
    uint32_t pad;
    int64_t src[5], dst[5];
};

struct CopyPart {
    Side src, dst;
    // The two axes inside an item, and their strides in bytes.
    uint32_t n1, n0;
    int64_t src1, src0, dst1, dst0;
    // The numbers of units per run and per item.
    uint32_t run, units;
    // The size of a unit in bytes and the number of threads per team, as powers of two.
    uint32_t unit_log, team_log;
};

struct CopyArgs {
    Items items;
    // Used only by `copy_tensor`.
    Axes axes;
    CopyPart parts[4];
};

static_assert(sizeof(CopyPart) == 120 && sizeof(CopyArgs) == 608, "as in src/kernels/copy.rs");

constexpr uint32_t THREADS = 256;
// The number of units that a thread has in flight.
constexpr int DEPTH = 4;

template <bool TENSOR>
__device__ __forceinline__ Place item_place(const CopyArgs& args, const CopyPart& part, uint32_t i, uint32_t layer) {
    if constexpr (!TENSOR) return place_of(args.items, part.src, part.dst, i, layer);
    const unsigned char* src = part.src.address;
    unsigned char* dst = part.dst.address;
#pragma unroll 1
    for (int axis = 4; axis >= 0; axis--) {
        const uint32_t n = args.axes.n[axis], at = i % n;
        i /= n;
        src += args.axes.src[axis] * at;
        dst += args.axes.dst[axis] * at;
    }
    return {src, dst, true};
}

// The offsets of unit `u` of an item from the item's first bytes on both sides.
struct Offsets {
    int64_t src, dst;
};
__device__ __forceinline__ Offsets unit_offsets(const CopyPart& part, uint32_t u) {
    if (part.run == part.units) {
        const int64_t at = static_cast<int64_t>(u) << part.unit_log;
        return {at, at};
    }
    const uint32_t row = u / part.run, outer = row / part.n0, inner = row - outer * part.n0;
    const int64_t at = static_cast<int64_t>(u - row * part.run) << part.unit_log;
    return {at + part.src1 * outer + part.src0 * inner, at + part.dst1 * outer + part.dst0 * inner};
}

template <typename Unit, bool TENSOR>
__device__ __forceinline__ void copy_part(const CopyArgs& args, const CopyPart& part) {
    const uint32_t team = 1u << part.team_log, lane = threadIdx.x & (team - 1);
    const uint32_t teams = THREADS >> part.team_log, layer = blockIdx.y, count = args.items.count;
    const bool long_items = part.units > 2 * team;
    const uint32_t step = long_items ? 1 : DEPTH;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * teams * step;
    uint64_t first = (static_cast<uint64_t>(blockIdx.x) * teams + (threadIdx.x >> part.team_log)) * step;
    for (; first < count; first += stride) {
        Unit held[DEPTH];
        if (long_items) {
            const Place place = item_place<TENSOR>(args, part, static_cast<uint32_t>(first), layer);
            if (!place.used) continue;
#pragma unroll 1
            for (uint32_t base = lane; base < part.units; base += DEPTH * team) {
#pragma unroll
                for (uint32_t d = 0; d < DEPTH; d++) {
                    const uint32_t u = base + d * team;
                    if (u < part.units) {
                        held[d] = *reinterpret_cast<const Unit*>(place.src + unit_offsets(part, u).src);
                    }
                }
#pragma unroll
                for (uint32_t d = 0; d < DEPTH; d++) {
                    const uint32_t u = base + d * team;
                    if (u < part.units) *reinterpret_cast<Unit*>(place.dst + unit_offsets(part, u).dst) = held[d];
                }
            }
            continue;
        }
        Place places[DEPTH];
#pragma unroll
        for (uint32_t d = 0; d < DEPTH; d++) {
            places[d].used = false;
            if (first + d < count) places[d] = item_place<TENSOR>(args, part, static_cast<uint32_t>(first + d), layer);
        }
#pragma unroll 1
        for (uint32_t u = lane; u < part.units; u += team) {
            const Offsets at = unit_offsets(part, u);
#pragma unroll
            for (uint32_t d = 0; d < DEPTH; d++) {
                if (places[d].used) held[d] = *reinterpret_cast<const Unit*>(places[d].src + at.src);
            }
#pragma unroll
            for (uint32_t d = 0; d < DEPTH; d++) {
                if (places[d].used) *reinterpret_cast<Unit*>(places[d].dst + at.dst) = held[d];
            }
        }
    }
}

template <bool TENSOR>
__device__ __forceinline__ void copy_any(const CopyArgs& args) {
    const CopyPart& part = args.parts[blockIdx.z];
    switch (part.unit_log) {
        case 4: copy_part<uint4, TENSOR>(args, part); break;
        case 3: copy_part<uint2, TENSOR>(args, part); break;
        case 2: copy_part<uint32_t, TENSOR>(args, part); break;
        case 1: copy_part<uint16_t, TENSOR>(args, part); break;
        default: copy_part<uint8_t, TENSOR>(args, part); break;
    }
}

// Copies all parts in units of 16 bytes.
KV_KERNEL(copy_wide, CopyArgs, THREADS) { copy_part<uint4, false>(args, args.parts[blockIdx.z]); }

// Copies each part in the largest units that its addresses and strides allow.
KV_KERNEL(copy_rows, CopyArgs, THREADS) { copy_any<false>(args); }

// Copies one part: a tensor with any strides.
KV_KERNEL(copy_tensor, CopyArgs, THREADS) { copy_any<true>(args); }
