// The addresses of rows in pools and tensors, computed from lists of slots and of pairs of blocks.
//
// All strides are in bytes, because the rows of every format start at whole bytes.
#pragma once

#include "device.cuh"

// The meaning of a list's items. The values match `ItemKind` in src/kernels/places.rs.
enum : uint32_t {
    // Row i of the source is copied to slot list[i]. A negative slot is skipped.
    ROWS_TO_SLOTS = 0,
    // Slot list[i] is copied to row i of the destination. A negative slot is skipped.
    SLOTS_TO_ROWS = 1,
    // Block list[i].x of the source is copied to block list[i].y of the destination.
    PAIRS = 2,
    // Row i of the source is copied to row i of the destination. There is no list.
    ROWS = 3,
};

// A list of items.
struct Items {
    const void* list;
    uint32_t mode;
    uint32_t count;
    uint32_t block_size;
    uint32_t pad;
};

// One side of a copy: its first byte, and the strides between layers, between rows or blocks, and between a
// block's tokens.
struct Side {
    unsigned char* address;
    int64_t layer;
    int64_t outer;
    int64_t token;
};

static_assert(sizeof(Items) == 24 && sizeof(Side) == 32, "as in src/kernels/places.rs");

// The first bytes of an item on both sides.
struct Place {
    const unsigned char* src;
    unsigned char* dst;
    bool used;
};

// Returns the addresses of item `i` in layer `layer`.
__device__ __forceinline__ Place place_of(const Items& items, const Side& src, const Side& dst, uint32_t i,
                                          uint32_t layer) {
    const unsigned char* from = src.address + src.layer * layer;
    unsigned char* to = dst.address + dst.layer * layer;
    if (items.mode == ROWS) return {from + src.outer * i, to + dst.outer * i, true};
    if (items.mode == PAIRS) {
        const uint2 pair = static_cast<const uint2*>(items.list)[i];
        return {from + src.outer * pair.x, to + dst.outer * pair.y, true};
    }
    const int64_t listed = static_cast<const long long*>(items.list)[i];
    if (listed < 0) return {from, to, false};
    // The host rejects pools whose slots do not fit in 32 bits.
    const uint32_t slot = static_cast<uint32_t>(listed), block = slot / items.block_size;
    const uint32_t token = slot - block * items.block_size;
    if (items.mode == ROWS_TO_SLOTS) return {from + src.outer * i, to + dst.outer * block + dst.token * token, true};
    return {from + src.outer * block + src.token * token, to + dst.outer * i, true};
}
