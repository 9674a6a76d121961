// Device memory and pinned host memory: addresses, live allocations, and the number of bytes in use.
//
// All memory is in large reserved address ranges. Addresses are handed out in ascending order, and never
// reused. An allocation's end, rounded up to 256 bytes, is at an inaccessible page, and another such page
// precedes the allocation. Freed memory becomes inaccessible at once.
#pragma once

#include <string>

#include "state.hpp"

namespace kvdouble {

struct Allocation {
    enum class Kind { device, pooled, pinned, registered };
    Kind kind = Kind::device;
    Device* device = nullptr;
    uintptr_t base = 0;
    size_t size = 0;
    uintptr_t area = 0;  // The accessible pages.
    size_t area_size = 0;
    size_t charged = 0;
    std::shared_ptr<Pool> pool;
    bool ready = true;  // Whether the stream has reached the allocation.
    bool free_queued = false;
};

// Physical memory that cuMemCreate has allocated.
struct Physical {
    Device* device = nullptr;
    size_t size = 0;
    uint64_t offset = 0;
    unsigned mappings = 0;
    bool released = false;
};

struct Mapping {
    uintptr_t base = 0;
    size_t size = 0;
    std::shared_ptr<Physical> physical;
    uint64_t offset = 0;
    int access = 0;  // As CU_MEM_ACCESS_FLAGS.
};

struct Reservation {
    Device* device = nullptr;
    uintptr_t base = 0;
    size_t size = 0;
};

struct Memory {
    std::map<uintptr_t, std::shared_ptr<Allocation>> live;
    std::map<uintptr_t, std::pair<size_t, std::string>> freed;  // The newest, for messages.
    std::deque<uintptr_t> freed_order;
    std::map<uintptr_t, Reservation> reservations;
    std::map<uintptr_t, Mapping> mappings;
    std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> physical;
};

Memory& memory();

// The kind and the owner of the memory at a range of addresses.
struct Place {
    enum class Kind { pageable, pinned, device, none };
    Kind kind = Kind::none;  // None: memory of the double that is not alive, or not all of the range.
    Device* device = nullptr;
    std::shared_ptr<Allocation> allocation;
};
Place find_place(uintptr_t address, size_t size);

// Returns whether the device's work may use a range of device memory now: it must be mapped, accessible, and
// allocated in stream order.
bool usable(const Device& device, uintptr_t address, size_t size);

// Reserves a range of at least `size` addresses, surrounded by inaccessible pages.
uintptr_t take_addresses(size_t size, size_t alignment);

// Allocates memory of this size. Fails if the device does not have enough.
CUresult allocate(Device& device, Allocation::Kind kind, size_t size, std::shared_ptr<Allocation>& result);

// Fills an allocation's pages with poison, and makes them accessible.
void open_pages(const Allocation& allocation);

// Makes an allocation inaccessible and removes it. Fails if bytes next to it were overwritten.
CUresult release(const std::shared_ptr<Allocation>& allocation);

// Returns the allocation that starts at this address, or null.
std::shared_ptr<Allocation> allocation_at(uintptr_t base);

// Makes pages inaccessible, and returns their memory to the system.
void close_pages(uintptr_t base, size_t size);

// Describes the memory at an address, for messages.
std::string describe(const void* address);

// Frees all of the device's memory, including mapped and pinned memory.
void release_all(Device& device);

// Frees a physical allocation that is neither mapped nor held.
void drop_physical(Physical& physical);

// Account for a pool's memory: `charge` first takes memory that the pool has kept, and `trim` shrinks the
// pool to the bytes that it must keep.
CUresult charge(Pool& pool, size_t size);
void discharge(Pool& pool, size_t size);
void trim(Pool& pool, uint64_t keep);
void trim_pools(Device& device);

constexpr size_t granularity = 2 << 20;

}  // namespace kvdouble
