// Entry points that allocate and describe device memory and pinned host memory.
#include <cstring>

#include "call.hpp"
#include "memory.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

using Kind = Allocation::Kind;

CUresult pin(Call& call, void** result, size_t size) {
    Device* device = nullptr;
    KV_TRY(call.current(device));
    KV_TRY(refuse_if_capturing(nullptr));
    if (result == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Allocation> made;
    KV_TRY(allocate(*device, Kind::pinned, size, made));
    *result = reinterpret_cast<void*>(made->base);
    return CUDA_SUCCESS;
}

// Writes the value of a pointer's attribute, in the attribute's type.
CUresult attribute(void* data, int number, CUdeviceptr pointer) {
    if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Place place = find_place(pointer, 1);
    if (place.kind != Place::Kind::device && place.kind != Place::Kind::pinned) return CUDA_ERROR_INVALID_VALUE;
    const bool host = place.kind == Place::Kind::pinned;
    uintptr_t base = pointer;
    size_t size = 0;
    if (place.allocation != nullptr) {
        base = place.allocation->base;
        size = place.allocation->size;
    } else {
        const Mapping& mapping = std::prev(memory().mappings.upper_bound(pointer))->second;
        base = mapping.base;
        size = mapping.size;
    }
    switch (number) {
        case 1: *static_cast<CUcontext*>(data) = place.device->context; break;
        case 2: *static_cast<unsigned*>(data) = host ? 1 : 2; break;
        case 3: *static_cast<CUdeviceptr*>(data) = pointer; break;
        case 4:
            if (!host) return CUDA_ERROR_INVALID_VALUE;
            *static_cast<void**>(data) = reinterpret_cast<void*>(pointer);
            break;
        case 8: *static_cast<unsigned*>(data) = 0; break;
        case 9: *static_cast<int*>(data) = place.device->ordinal; break;
        case 11: *static_cast<CUdeviceptr*>(data) = base; break;
        case 12: *static_cast<size_t*>(data) = size; break;
        case 13: *static_cast<unsigned char*>(data) = 1; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

}  // namespace

KV_API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    KV_ENTER_DEVICE(cuMemGetInfo_v2);
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *total = device->limit;
    *free = device->limit > device->used ? device->limit - device->used : 0;
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemAlloc_v2(CUdeviceptr* result, size_t size) {
    KV_ENTER_DEVICE(cuMemAlloc_v2);
    KV_TRY(refuse_if_capturing(nullptr));
    if (result == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Allocation> made;
    KV_TRY(allocate(*device, Kind::device, size, made));
    *result = made->base;
    return CUDA_SUCCESS;
}

// Frees the memory at once, even if queued work still uses it; that work then faults.
KV_API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    KV_ENTER(cuMemFree_v2);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    KV_TRY(refuse_if_capturing(nullptr));
    if (pointer == 0) return health;
    const auto found = allocation_at(pointer);
    if (found == nullptr || found->device != device || found->free_queued ||
        (found->kind != Kind::device && found->kind != Kind::pooled)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult released = release(found);
    return health != CUDA_SUCCESS ? health : released;
}

KV_API CUresult cuMemHostAlloc(void** result, size_t size, unsigned flags) {
    KV_ENTER(cuMemHostAlloc);
    Call call;
    if (flags > 7) return CUDA_ERROR_INVALID_VALUE;
    return pin(call, result, size);
}

KV_API CUresult cuMemAllocHost_v2(void** result, size_t size) {
    KV_ENTER(cuMemAllocHost_v2);
    Call call;
    return pin(call, result, size);
}

KV_API CUresult cuMemFreeHost(void* pointer) {
    KV_ENTER(cuMemFreeHost);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    KV_TRY(refuse_if_capturing(nullptr));
    const auto found = allocation_at(reinterpret_cast<uintptr_t>(pointer));
    if (found == nullptr || found->kind != Kind::pinned || found->device != device) return CUDA_ERROR_INVALID_VALUE;
    const CUresult released = release(found);
    return health != CUDA_SUCCESS ? health : released;
}

KV_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* result, void* pointer, unsigned flags) {
    KV_ENTER_DEVICE(cuMemHostGetDevicePointer_v2);
    if (result == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (find_place(reinterpret_cast<uintptr_t>(pointer), 1).kind != Place::Kind::pinned)
        return CUDA_ERROR_INVALID_VALUE;
    *result = reinterpret_cast<CUdeviceptr>(pointer);
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned flags) {
    KV_ENTER_DEVICE(cuMemHostRegister_v2);
    if (pointer == nullptr || size == 0 || flags > 15) return CUDA_ERROR_INVALID_VALUE;
    const auto base = reinterpret_cast<uintptr_t>(pointer);
    auto& live = memory().live;
    const auto after = live.lower_bound(base);
    const bool overlaps = (after != live.end() && after->first < base + size) ||
                          (after != live.begin() && std::prev(after)->first + std::prev(after)->second->size > base);
    if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    auto made = std::make_shared<Allocation>();
    made->kind = Kind::registered;
    made->device = device;
    made->base = base;
    made->size = size;
    live[base] = made;
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemHostUnregister(void* pointer) {
    KV_ENTER(cuMemHostUnregister);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    const auto found = allocation_at(reinterpret_cast<uintptr_t>(pointer));
    if (found == nullptr || found->kind != Kind::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    release(found);
    return health;
}

KV_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
    KV_ENTER_DEVICE(cuMemGetAddressRange_v2);
    CUdeviceptr start = 0;
    size_t bytes = 0;
    if (attribute(&start, 11, pointer) != CUDA_SUCCESS) return CUDA_ERROR_NOT_FOUND;
    attribute(&bytes, 12, pointer);
    if (base != nullptr) *base = start;
    if (size != nullptr) *size = bytes;
    return CUDA_SUCCESS;
}

KV_API CUresult cuPointerGetAttribute(void* data, int number, CUdeviceptr pointer) {
    KV_ENTER_STARTED(cuPointerGetAttribute);
    return attribute(data, number, pointer);
}

KV_API CUresult cuPointerGetAttributes(unsigned count, int* numbers, void** data, CUdeviceptr pointer) {
    KV_ENTER_STARTED(cuPointerGetAttributes);
    if (numbers == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        // For a pointer that the driver does not know, the call succeeds, and the values are null.
        if (attribute(data[i], numbers[i], pointer) == CUDA_SUCCESS || data[i] == nullptr) continue;
        const int number = numbers[i];
        const bool wide = number == 1 || number == 3 || number == 4 || number == 11 || number == 12;
        std::memset(data[i], 0, wide ? 8 : number == 13 ? 1 : 4);
        if (number == 9) *static_cast<int*>(data[i]) = -2;
    }
    return CUDA_SUCCESS;
}
