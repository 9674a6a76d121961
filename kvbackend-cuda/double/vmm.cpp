// Entry points for virtual memory: reserved address ranges, physical memory, mappings and access.
//
// A device's physical memory is in one file, so that memory that is unmapped and mapped elsewhere keeps its
// contents.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "call.hpp"
#include "memory.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

bool is_device_property(const CUmemAllocationProp* property, const Device* device) {
    return property != nullptr && property->type == 1 && property->location.type == 1 &&
           device_at(property->location.id) != nullptr &&
           (device == nullptr || device_at(property->location.id) == device);
}

bool poison(int file, uint64_t offset, size_t size) {
    static const auto* bytes = new std::vector<unsigned char>(granularity, 0xff);
    for (size_t done = 0; done < size; done += granularity) {
        if (pwrite(file, bytes->data(), granularity, static_cast<off_t>(offset + done)) != granularity) return false;
    }
    return true;
}

// Returns the reservation that contains the whole range, or null.
const Reservation* reservation_of(CUdeviceptr pointer, size_t size) {
    auto& all = memory().reservations;
    auto after = all.upper_bound(pointer);
    if (after == all.begin()) return nullptr;
    const Reservation& found = std::prev(after)->second;
    return pointer - found.base < found.size && size <= found.size - (pointer - found.base) ? &found : nullptr;
}

// Returns the mappings that cover exactly this range, or an empty list if there are none.
std::vector<Mapping*> mappings_of(CUdeviceptr pointer, size_t size) {
    auto& all = memory().mappings;
    std::vector<Mapping*> found;
    uintptr_t next = pointer;
    for (auto at = all.find(next); at != all.end() && next < pointer + size; at = all.find(next)) {
        found.push_back(&at->second);
        next += at->second.size;
    }
    if (next != pointer + size) found.clear();
    return found;
}

}  // namespace

KV_API CUresult cuMemGetAllocationGranularity(size_t* result, const CUmemAllocationProp* property, int option) {
    KV_ENTER_STARTED(cuMemGetAllocationGranularity);
    if (result == nullptr || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device_property(property, nullptr)) return CUDA_ERROR_INVALID_VALUE;
    *result = granularity;
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemAddressReserve(CUdeviceptr* result, size_t size, size_t alignment, CUdeviceptr,
                                    unsigned long long flags) {
    KV_ENTER_DEVICE(cuMemAddressReserve);
    if (result == nullptr || size == 0 || size % granularity != 0 || flags != 0 || (alignment & (alignment - 1)) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (size > size_t{1} << 42) return CUDA_ERROR_OUT_OF_MEMORY;
    const uintptr_t base = take_addresses(size, std::max(alignment, granularity));
    memory().reservations[base] = {device, base, size};
    *result = base;
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    KV_ENTER(cuMemAddressFree);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    auto& all = memory().reservations;
    const auto found = all.find(pointer);
    if (found == all.end() || found->second.size != size) return CUDA_ERROR_INVALID_VALUE;
    const auto mapped = memory().mappings.lower_bound(pointer);
    if (mapped != memory().mappings.end() && mapped->first < pointer + size) return CUDA_ERROR_INVALID_VALUE;
    all.erase(found);
    return health;
}

KV_API CUresult cuMemCreate(CUmemGenericAllocationHandle* result, size_t size, const CUmemAllocationProp* property,
                            unsigned long long flags) {
    KV_ENTER_DEVICE(cuMemCreate);
    if (result == nullptr || size == 0 || size % granularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device_property(property, device)) return CUDA_ERROR_INVALID_VALUE;
    if (property->requestedHandleTypes != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (size > device->limit || device->used > device->limit - size) {
        for (const auto& [handle, pool] : state().pools.entries) {
            if (pool->device == device) trim(*pool, 0);
        }
    }
    if (size > device->limit || device->used > device->limit - size) return CUDA_ERROR_OUT_OF_MEMORY;
    if (device->memory_file < 0) device->memory_file = memfd_create("physical", MFD_CLOEXEC);
    const uint64_t offset = device->memory_file_end;
    if (device->memory_file < 0 || ftruncate(device->memory_file, static_cast<off_t>(offset + size)) != 0 ||
        !poison(device->memory_file, offset, size)) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    device->memory_file_end += size;
    device->used += size;
    auto made = std::make_shared<Physical>();
    made->device = device;
    made->size = size;
    made->offset = offset;
    *result = reinterpret_cast<CUmemGenericAllocationHandle>(new_handle<CUctx_st*>());
    memory().physical[*result] = made;
    return CUDA_SUCCESS;
}

// The memory itself is freed when it is neither held nor mapped.
KV_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    KV_ENTER(cuMemRelease);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    auto& all = memory().physical;
    const auto found = all.find(handle);
    if (found == all.end()) return CUDA_ERROR_INVALID_VALUE;
    const auto physical = found->second;
    all.erase(found);
    physical->released = true;
    drop_physical(*physical);
    return health;
}

KV_API CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    KV_ENTER_DEVICE(cuMemMap);
    const auto found = memory().physical.find(handle);
    if (found == memory().physical.end() || found->second->device != device || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    Physical& physical = *found->second;
    if (size == 0 || (pointer | size | offset) % granularity != 0 || offset > physical.size ||
        size > physical.size - offset || reservation_of(pointer, size) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto& mappings = memory().mappings;
    const auto after = mappings.lower_bound(pointer);
    const bool overlaps =
        (after != mappings.end() && after->first < pointer + size) ||
        (after != mappings.begin() && std::prev(after)->first + std::prev(after)->second.size > pointer);
    if (overlaps) return CUDA_ERROR_INVALID_VALUE;
    void* mapped = mmap(reinterpret_cast<void*>(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, device->memory_file,
                        static_cast<off_t>(physical.offset + offset));
    if (mapped == MAP_FAILED) return CUDA_ERROR_OPERATING_SYSTEM;
    physical.mappings++;
    mappings[pointer] = {pointer, size, found->second, offset, 0};
    return CUDA_SUCCESS;
}

// The range must consist of one or more whole mappings.
KV_API CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    KV_ENTER(cuMemUnmap);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    const auto found = mappings_of(pointer, size);
    if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
    close_pages(pointer, size);
    for (const Mapping* mapping : found) {
        const auto physical = mapping->physical;
        memory().mappings.erase(mapping->base);
        physical->mappings--;
        drop_physical(*physical);
    }
    return health;
}

// The range must consist of one or more whole mappings. Only the device that owns the memory can get access.
KV_API CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* descriptions, size_t count) {
    KV_ENTER_DEVICE(cuMemSetAccess);
    if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    const auto found = mappings_of(pointer, size);
    if (found.empty()) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const CUmemAccessDesc& description = descriptions[i];
        const Device* named = device_at(description.location.id);
        const int flags = description.flags;
        if (description.location.type != 1 || named == nullptr || (flags != 0 && flags != 1 && flags != 3)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (Mapping* mapping : found) {
            if (mapping->physical->device != named) continue;
            mapping->access = flags;
            const int protection = flags == 0 ? PROT_NONE : flags == 1 ? PROT_READ : PROT_READ | PROT_WRITE;
            mprotect(reinterpret_cast<void*>(mapping->base), mapping->size, protection);
        }
    }
    return CUDA_SUCCESS;
}
