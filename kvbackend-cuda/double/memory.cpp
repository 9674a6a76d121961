// Memory: its addresses, pages, poison and accounting.
#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvdouble {

namespace {

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr size_t allocation_alignment = 256;
constexpr size_t poison_file_bytes = 8 << 20;
constexpr size_t remembered_frees = 4096;

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

struct Arena {
    uintptr_t base = 0, next = 0, end = 0;
};
std::vector<Arena>& arenas() {
    static auto* all = new std::vector<Arena>;
    return *all;
}

bool in_arena(uintptr_t address) {
    for (const Arena& arena : arenas()) {
        if (address >= arena.base && address < arena.end) return true;
    }
    return false;
}

// Returns a file whose bytes are all 0xff. Large allocations map it privately, so that only written pages
// take memory.
int poison_file() {
    static const int file = [] {
        const int made = memfd_create("poison", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, poison_file_bytes) != 0) return -1;
        void* bytes = mmap(nullptr, poison_file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
        if (bytes == MAP_FAILED) return -1;
        std::memset(bytes, 0xff, poison_file_bytes);
        munmap(bytes, poison_file_bytes);
        return made;
    }();
    return file;
}

bool all_poison(const unsigned char* bytes, size_t size) {
    return std::all_of(bytes, bytes + size, [](unsigned char byte) { return byte == 0xff; });
}

}  // namespace

Memory& memory() {
    static auto* all = new Memory;
    return *all;
}

uintptr_t take_addresses(size_t size, size_t alignment) {
    auto& all = arenas();
    alignment = std::max(alignment, page);
    for (int attempt = 0; attempt < 2; attempt++) {
        if (!all.empty()) {
            Arena& arena = all.back();
            const uintptr_t base = rounded(arena.next + page, alignment);
            if (base + size + page <= arena.end) {
                arena.next = base + rounded(size, page);
                return base;
            }
        }
        for (size_t bytes = size_t{16} << 40; bytes >= size + alignment + 4 * page; bytes /= 2) {
            void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base == MAP_FAILED) continue;
            const auto address = reinterpret_cast<uintptr_t>(base);
            all.push_back({address, address, address + bytes});
            break;
        }
    }
    std::fputs("test double: no addresses left\n", stderr);
    std::abort();
}

void close_pages(uintptr_t base, size_t size) {
    mmap(reinterpret_cast<void*>(base), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
}

void open_pages(const Allocation& allocation) {
    auto* area = reinterpret_cast<unsigned char*>(allocation.area);
    size_t poisoned = 0;
    if (allocation.area_size > poison_file_bytes && poison_file() >= 0) {
        for (; poisoned + page <= allocation.area_size; poisoned += poison_file_bytes) {
            const size_t bytes = std::min(poison_file_bytes, allocation.area_size - poisoned);
            if (mmap(area + poisoned, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
                     poison_file(), 0) == MAP_FAILED) {
                break;
            }
        }
        poisoned = std::min(poisoned, allocation.area_size);
    }
    if (poisoned < allocation.area_size) {
        const size_t bytes = allocation.area_size - poisoned;
        if (mprotect(area + poisoned, bytes, PROT_READ | PROT_WRITE) != 0) {
            std::fputs("test double: the system has no memory or no mappings left\n", stderr);
            std::abort();
        }
        std::memset(area + poisoned, 0xff, bytes);
    }
}

CUresult allocate(Device& device, Allocation::Kind kind, size_t size, std::shared_ptr<Allocation>& result) {
    const size_t used = rounded(size, allocation_alignment);
    if (used < size) return CUDA_ERROR_OUT_OF_MEMORY;
    auto made = std::make_shared<Allocation>();
    made->kind = kind;
    made->device = &device;
    made->size = size;
    if (kind == Allocation::Kind::device) {
        if (used > device.limit || device.used > device.limit - used) {
            for (const auto& [handle, pool] : state().pools.entries) {
                if (pool->device == &device) trim(*pool, 0);
            }
        }
        if (used > device.limit || device.used > device.limit - used) return CUDA_ERROR_OUT_OF_MEMORY;
        device.used += used;
        made->charged = used;
    } else if (kind == Allocation::Kind::pooled) {
        made->charged = used;
        made->ready = false;
    }
    made->area_size = rounded(used, page);
    made->area = take_addresses(made->area_size, page);
    made->base = made->area + made->area_size - used;
    if (kind != Allocation::Kind::pooled) open_pages(*made);
    memory().live[made->base] = made;
    result = made;
    return CUDA_SUCCESS;
}

CUresult release(const std::shared_ptr<Allocation>& allocation) {
    Memory& all = memory();
    all.live.erase(allocation->base);
    Device& device = *allocation->device;
    if (allocation->kind == Allocation::Kind::registered) return CUDA_SUCCESS;
    if (allocation->kind == Allocation::Kind::device) device.used -= allocation->charged;
    if (allocation->kind == Allocation::Kind::pooled) discharge(*allocation->pool, allocation->charged);
    bool clean = true;
    if (allocation->ready) {
        const auto* area = reinterpret_cast<const unsigned char*>(allocation->area);
        const size_t before = allocation->base - allocation->area;
        const size_t end = before + allocation->size;
        clean = all_poison(area, before) && all_poison(area + end, allocation->area_size - end);
        close_pages(allocation->area, allocation->area_size);
    }
    char text[96];
    std::snprintf(text, sizeof text, "freed allocation of %zu bytes at 0x%zx", allocation->size, allocation->base);
    all.freed[allocation->area] = {allocation->area_size, text};
    all.freed_order.push_back(allocation->area);
    if (all.freed_order.size() > remembered_frees) {
        all.freed.erase(all.freed_order.front());
        all.freed_order.pop_front();
    }
    if (!clean) {
        char what[128];
        std::snprintf(what, sizeof what, "something was written beside the allocation of %zu bytes at 0x%zx",
                      allocation->size, allocation->base);
        lose(device, {CUDA_ERROR_ILLEGAL_ADDRESS, what, nullptr, false});
    }
    return clean ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

std::shared_ptr<Allocation> allocation_at(uintptr_t base) {
    const auto at = memory().live.find(base);
    return at == memory().live.end() ? nullptr : at->second;
}

Place find_place(uintptr_t address, size_t size) {
    Memory& all = memory();
    if (auto at = all.live.upper_bound(address); at != all.live.begin()) {
        const auto& allocation = std::prev(at)->second;
        const size_t offset = address - allocation->base;
        if (offset < allocation->size || (offset == 0 && size == 0)) {
            Place place;
            place.device = allocation->device;
            place.allocation = allocation;
            if (size > allocation->size - offset) return place;
            const bool host =
                allocation->kind == Allocation::Kind::pinned || allocation->kind == Allocation::Kind::registered;
            place.kind = host ? Place::Kind::pinned : Place::Kind::device;
            return place;
        }
    }
    if (!in_arena(address)) return {Place::Kind::pageable, nullptr, nullptr};
    Place place;
    const uintptr_t end = address + std::max<size_t>(size, 1);
    for (uintptr_t next = address; next < end;) {
        auto at = all.mappings.upper_bound(next);
        if (at == all.mappings.begin()) return {};
        const Mapping& mapping = std::prev(at)->second;
        if (next >= mapping.base + mapping.size || mapping.access == 0) return {};
        place.device = mapping.physical->device;
        next = mapping.base + mapping.size;
    }
    place.kind = Place::Kind::device;
    return place;
}

bool usable(const Device& device, uintptr_t address, size_t size) {
    const Place place = find_place(address, size);
    if (place.kind != Place::Kind::device || place.device != &device) return false;
    return place.allocation == nullptr || place.allocation->ready;
}

std::string describe(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    char text[192];
    std::snprintf(text, sizeof text, "address 0x%zx", at);
    std::string result = text;
    Memory& all = memory();
    if (auto after = all.freed.upper_bound(at); after != all.freed.begin()) {
        const auto& [base, freed] = *std::prev(after);
        if (at < base + freed.first) return result + ", in the " + freed.second;
    }
    if (auto after = all.live.upper_bound(at); after != all.live.begin()) {
        const Allocation& before = *std::prev(after)->second;
        if (at - before.base < before.size + (1 << 20)) {
            const bool inside = at - before.base < before.size;
            std::snprintf(text, sizeof text,
                          inside ? ", %zu bytes into the allocation of %zu bytes at 0x%zx%s"
                                 : ", %zu bytes after the start of the allocation of %zu bytes at 0x%zx%s",
                          static_cast<size_t>(at - before.base), before.size, static_cast<size_t>(before.base),
                          before.ready ? "" : " that its stream has not reached");
            return result + text;
        }
    }
    for (const auto& [base, reservation] : all.reservations) {
        if (at < base || at >= base + reservation.size) continue;
        return result + ", in reserved addresses without accessible memory";
    }
    return result + (in_arena(at) ? ", near no live allocation" : ", no memory of the device");
}

void release_all(Device& device) {
    Memory& all = memory();
    std::vector<std::shared_ptr<Allocation>> mine;
    for (const auto& [base, allocation] : all.live) {
        if (allocation->device == &device) mine.push_back(allocation);
    }
    for (const auto& allocation : mine) {
        allocation->charged = 0;
        release(allocation);
    }
    std::erase_if(all.mappings, [&](const auto& entry) {
        if (entry.second.physical->device != &device) return false;
        close_pages(entry.second.base, entry.second.size);
        return true;
    });
    std::erase_if(all.physical, [&](const auto& entry) { return entry.second->device == &device; });
    std::erase_if(all.reservations, [&](const auto& entry) { return entry.second.device == &device; });
    if (device.memory_file >= 0) close(device.memory_file);
    device.memory_file = -1;
    device.memory_file_end = 0;
    device.used = 0;
}

void drop_physical(Physical& physical) {
    if (!physical.released || physical.mappings != 0) return;
    fallocate(physical.device->memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(physical.offset), static_cast<off_t>(physical.size));
    physical.device->used -= physical.size;
}

CUresult charge(Pool& pool, size_t size) {
    Device& device = *pool.device;
    const size_t needed = rounded(pool.used + size, granularity);
    if (pool.max_size != 0 && pool.used + size > pool.max_size) return CUDA_ERROR_OUT_OF_MEMORY;
    if (needed > pool.reserved) {
        const size_t more = needed - pool.reserved;
        if (more > device.limit || device.used > device.limit - more) {
            for (const auto& [handle, other] : state().pools.entries) {
                if (other->device == &device && other.get() != &pool) trim(*other, 0);
            }
        }
        if (more > device.limit || device.used > device.limit - more) return CUDA_ERROR_OUT_OF_MEMORY;
        device.used += more;
        pool.reserved = needed;
    }
    pool.used += size;
    pool.used_high = std::max(pool.used_high, pool.used);
    pool.reserved_high = std::max(pool.reserved_high, pool.reserved);
    return CUDA_SUCCESS;
}

void discharge(Pool& pool, size_t size) {
    pool.used -= std::min(size, pool.used);
    if (pool.destroyed) trim(pool, 0);
}

void trim(Pool& pool, uint64_t keep) {
    const size_t least = rounded(pool.used, granularity);
    const size_t left = keep >= pool.reserved ? pool.reserved : std::max<size_t>(least, rounded(keep, granularity));
    if (left >= pool.reserved) return;
    pool.device->used -= pool.reserved - left;
    pool.reserved = left;
}

void trim_pools(Device& device) {
    for (const auto& [handle, pool] : state().pools.entries) {
        if (pool->device == &device) trim(*pool, pool->threshold);
    }
}

}  // namespace kvdouble
