// Entry points for memory pools and stream-ordered allocation.
//
// An allocation gets its address at once, and its memory when its stream reaches the allocation. A free takes
// effect when its stream reaches it. The pool keeps freed memory until a wait on the host trims the pool to
// its threshold.
#include <algorithm>
#include <utility>

#include "call.hpp"
#include "memory.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

CUresult find_pool(CUmemoryPool handle, std::shared_ptr<Pool>& pool) {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    pool = state().pools.find(handle);
    return pool == nullptr ? CUDA_ERROR_INVALID_VALUE : pool->device->error;
}

// Charges memory to a pool. If there is not enough, waits for the queued frees and tries again.
CUresult charge_or_wait(Pool& pool, size_t size, std::unique_lock<std::mutex>& lock) {
    const CUresult first = charge(pool, size);
    if (first == CUDA_SUCCESS || pool.frees.empty()) return first;
    const auto frees = std::exchange(pool.frees, {});
    for (const auto& [weak, number] : frees) {
        const auto stream = weak.lock();
        if (stream == nullptr) continue;
        KV_TRY(wait_for(*stream, number, lock));
    }
    return charge(pool, size);
}

CUresult allocate_from(Call& call, Device& device, const std::shared_ptr<Pool>& pool, CUdeviceptr* result, size_t size,
                       CUstream handle) {
    std::shared_ptr<Stream> stream;
    KV_TRY(find_stream(device, handle, stream));
    if (result == nullptr || size == 0) return CUDA_ERROR_INVALID_VALUE;
    if (pool->device != &device || pool->destroyed) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (size > device.limit) return CUDA_ERROR_OUT_OF_MEMORY;
    KV_TRY(charge_or_wait(*pool, (size + 255) / 256 * 256, call.lock));
    std::shared_ptr<Allocation> made;
    KV_TRY(allocate(device, Allocation::Kind::pooled, size, made));
    made->pool = pool;
    *result = made->base;
    return submit(stream, 10, [made] {
        std::lock_guard lock(state().lock);
        // The allocation may have been freed outside of its stream.
        if (allocation_at(made->base) != made) return Fault();
        open_pages(*made);
        made->ready = true;
        return Fault();
    });
}

}  // namespace

KV_API CUresult cuMemAllocAsync(CUdeviceptr* result, size_t size, CUstream handle) {
    KV_ENTER_DEVICE(cuMemAllocAsync);
    return allocate_from(call, *device, device->current_pool, result, size, handle);
}

KV_API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* result, size_t size, CUmemoryPool pool_handle, CUstream handle) {
    KV_ENTER_DEVICE(cuMemAllocFromPoolAsync);
    std::shared_ptr<Pool> pool;
    KV_TRY(find_pool(pool_handle, pool));
    return allocate_from(call, *device, pool, result, size, handle);
}

// Accepts only memory from a pool. A second free of the same memory is refused even before the first free
// runs.
KV_API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
    KV_ENTER(cuMemFreeAsync);
    Call call;
    Device* device = nullptr;
    const CUresult health = call.current(device);
    if (device == nullptr) return health;
    std::shared_ptr<Stream> stream;
    KV_TRY(find_stream(*device, handle, stream));
    if (pointer == 0) return health;
    const auto found = allocation_at(pointer);
    if (found == nullptr || found->device != device || found->kind != Allocation::Kind::pooled || found->free_queued) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (health != CUDA_SUCCESS) {
        release(found);
        return health;
    }
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    found->free_queued = true;
    KV_TRY(submit(stream, 11, [found] {
        std::lock_guard lock(state().lock);
        Fault fault;
        if (!found->ready)
            fault = {CUDA_ERROR_ILLEGAL_ADDRESS, "memory is freed before its stream has allocated it",
                     reinterpret_cast<void*>(found->base), false};
        release(found);
        return fault;
    }));
    std::erase_if(found->pool->frees, [](const auto& free) {
        const auto stream = free.first.lock();
        return stream == nullptr || stream->completed >= free.second;
    });
    found->pool->frees.emplace_back(stream, stream->submitted);
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemPoolCreate(CUmemoryPool* result, const CUmemPoolProps* properties) {
    KV_ENTER_STARTED(cuMemPoolCreate);
    if (result == nullptr || properties == nullptr || properties->allocType != 1 || properties->location.type != 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (properties->handleTypes != 0) return CUDA_ERROR_NOT_SUPPORTED;
    Device* device = device_at(properties->location.id);
    if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (device->context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (device->error != CUDA_SUCCESS) return device->error;
    auto pool = std::make_shared<Pool>();
    pool->device = device;
    pool->max_size = properties->maxSize;
    pool->handle = new_handle<CUmemoryPool>();
    state().pools.entries[pool->handle] = pool;
    *result = pool->handle;
    return CUDA_SUCCESS;
}

// Copies between devices work without access in the double, so the access is only checked, not stored.
KV_API CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* access, size_t count) {
    KV_ENTER_STARTED(cuMemPoolSetAccess);
    const auto pool = state().pools.find(handle);
    if (pool == nullptr || access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const Device* device = access[i].location.type == 1 ? device_at(access[i].location.id) : nullptr;
        if (device == nullptr || device == pool->device) return CUDA_ERROR_INVALID_DEVICE;
        if (access[i].flags != 0 && access[i].flags != 3) return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

// The pool's allocations stay valid. The pool is destroyed with the last of them.
KV_API CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    KV_ENTER_STARTED(cuMemPoolDestroy);
    const auto pool = state().pools.find(handle);
    if (pool == nullptr || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
    state().pools.entries.erase(handle);
    pool->destroyed = true;
    trim(*pool, 0);
    if (pool->device->current_pool == pool) pool->device->current_pool = pool->device->default_pool;
    return pool->device->error;
}

KV_API CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    KV_ENTER(cuMemPoolTrimTo);
    Call call;
    std::shared_ptr<Pool> pool;
    KV_TRY(find_pool(handle, pool));
    trim(*pool, keep);
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemPoolGetAttribute(CUmemoryPool handle, int attribute, void* value) {
    KV_ENTER(cuMemPoolGetAttribute);
    Call call;
    std::shared_ptr<Pool> pool;
    KV_TRY(find_pool(handle, pool));
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto* wide = static_cast<uint64_t*>(value);
    switch (attribute) {
        case 1:
        case 2:
        case 3: *static_cast<int*>(value) = pool->reuse[attribute]; break;
        case 4: *wide = pool->threshold; break;
        case 5: *wide = pool->reserved; break;
        case 6: *wide = pool->reserved_high; break;
        case 7: *wide = pool->used; break;
        case 8: *wide = pool->used_high; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

KV_API CUresult cuMemPoolSetAttribute(CUmemoryPool handle, int attribute, void* value) {
    KV_ENTER(cuMemPoolSetAttribute);
    Call call;
    std::shared_ptr<Pool> pool;
    KV_TRY(find_pool(handle, pool));
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto* wide = static_cast<const uint64_t*>(value);
    switch (attribute) {
        case 1:
        case 2:
        case 3: pool->reuse[attribute] = *static_cast<const int*>(value); break;
        case 4: pool->threshold = *wide; break;
        case 6:
        case 8:
            // The high-water marks can only be reset.
            if (*wide != 0) return CUDA_ERROR_INVALID_VALUE;
            (attribute == 6 ? pool->reserved_high : pool->used_high) = attribute == 6 ? pool->reserved : pool->used;
            break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* result, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetDefaultMemPool, ordinal);
    if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device->default_pool == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *result = device->default_pool->handle;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetMemPool(CUmemoryPool* result, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetMemPool, ordinal);
    if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (device->current_pool == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *result = device->current_pool->handle;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool handle) {
    KV_ENTER(cuDeviceSetMemPool);
    Call call;
    std::shared_ptr<Pool> pool;
    KV_TRY(find_pool(handle, pool));
    Device* device = device_at(ordinal);
    if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (pool->device != device) return CUDA_ERROR_INVALID_VALUE;
    device->current_pool = pool;
    return CUDA_SUCCESS;
}
