/* The controls and queries of tests. All entries are exported by the library with C linkage. */
#ifndef KV_DOUBLE_CONTROL_H
#define KV_DOUBLE_CONTROL_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The call number `after` from now on of this entry does nothing and returns `code`, once; 1 is the next call (0
 * means the same). Code 0 clears what was planned for the entry. A name stands for all its versions: cuMemFree is
 * also cuMemFree_v2. A null entry clears everything planned and ignored. */
void kv_double_fail(const char* entry, int after, int code);

/* While on, calls of this entry do nothing and return success. A name that ends in * stands for all entries that
 * begin with it. */
void kv_double_ignore(const char* entry, int on);

/* The memory of the device in bytes, from now on; only after cuInit. What is used already stays. */
void kv_double_limit(int device, size_t bytes);

/* The bytes of device memory that allocations use: cuMemAlloc, pools, cuMemCreate. Allocations count in multiples of
 * 256 bytes. */
size_t kv_double_live_bytes(int device);

/* The number of streams, events, modules, graphs, instantiated graphs, pools beyond the default one, allocations,
 * pinned and registered memory, physical memory, reserved ranges, mappings and NCCL handles of the device. */
int kv_double_live_objects(int device);

/* Writes what was queued since the last call that had room, one line each, and a zero byte:
 *   DEVICE STREAM kernel NAME GRIDxGRIDxGRID BLOCKxBLOCKxBLOCK SHARED
 *   DEVICE STREAM memcpy_KIND BYTES      (htod, dtoh, dtod or peer)
 *   DEVICE STREAM memsetWIDTH BYTES
 *   DEVICE STREAM graph NODES
 * Stream 0 is the legacy stream; others count from 1 in the order they were made. What a capture records has
 * "captured" before the kind. Returns the bytes needed; if `size` is less, nothing is written or forgotten. */
size_t kv_double_trace(char* buffer, size_t size);

/* The text of the newest fault of any device, or an empty string. It is valid until the thread's next call. */
const char* kv_double_last_fault(void);

#ifdef __cplusplus
}
#endif

#endif
