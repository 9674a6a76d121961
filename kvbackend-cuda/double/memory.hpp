// The memory of devices and pinned memory of the host: addresses, live allocations, and the bytes in use.
//
// All of it lies in large reserved ranges of addresses that are handed out upwards and never twice. An allocation
// ends, rounded up to 256 bytes, at an inaccessible page, and another lies before it. Freed memory becomes
// inaccessible at once.
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

// Physical memory of cuMemCreate.
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

// Where a range of addresses lies.
struct Place {
    enum class Kind { pageable, pinned, device, none };
    Kind kind = Kind::none;  // None: memory of the double that is not alive, or not all of the range.
    Device* device = nullptr;
    std::shared_ptr<Allocation> allocation;
};
Place find_place(uintptr_t address, size_t size);

// Whether a range of device memory may be used by work of the device now: mapped, accessible, reached.
bool usable(const Device& device, uintptr_t address, size_t size);

// Takes a range of addresses of at least `size` bytes with inaccessible pages around it.
uintptr_t take_addresses(size_t size, size_t alignment);

// Makes memory of this size; fails if the device's memory does not suffice.
CUresult allocate(Device& device, Allocation::Kind kind, size_t size, std::shared_ptr<Allocation>& result);

// Gives the pages of an allocation their poison and makes them accessible.
void open_pages(const Allocation& allocation);

// Makes the allocation inaccessible and forgets it. Fails if something was written next to it.
CUresult release(const std::shared_ptr<Allocation>& allocation);

// Returns the allocation that begins at this address, or null.
std::shared_ptr<Allocation> allocation_at(uintptr_t base);

// Makes pages inaccessible and gives back what they held.
void close_pages(uintptr_t base, size_t size);

// Says what lies at this address, for messages.
std::string describe(const void* address);

// Frees all memory of the device, mapped and pinned memory included.
void release_all(Device& device);

// Gives back a physical allocation that is neither mapped nor held.
void drop_physical(Physical& physical);

// Charges memory to a pool; takes from what the pool has kept first. Shrinks to what the pool must keep.
CUresult charge(Pool& pool, size_t size);
void discharge(Pool& pool, size_t size);
void trim(Pool& pool, uint64_t keep);
void trim_pools(Device& device);

constexpr size_t granularity = 2 << 20;

}  // namespace kvdouble
