// Primary contexts, a thread's current context, and handles that belong to a context.
#include <algorithm>

#include "call.hpp"
#include "memory.hpp"
#include "nccl.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace kvdouble {

std::vector<CUcontext>& contexts() {
    static thread_local std::vector<CUcontext> stack;
    return stack;
}

namespace {

Device* device_of(CUcontext context) {
    if (context == nullptr) return nullptr;
    for (const auto& device : state().devices) {
        if (device->context == context) return device.get();
    }
    return nullptr;
}

std::shared_ptr<Pool> make_default_pool(Device& device) {
    auto pool = std::make_shared<Pool>();
    pool->device = &device;
    pool->handle = new_handle<CUmemoryPool>();
    pool->is_default = true;
    state().pools.entries[pool->handle] = pool;
    return pool;
}

void make_context(Device& device) {
    device.context = new_handle<CUcontext>();
    device.error = CUDA_SUCCESS;
    device.streams_made = 0;
    device.legacy = make_stream(device, 0, 0);
    device.default_pool = device.current_pool = make_default_pool(device);
}

}  // namespace

CUresult Call::current(Device*& device) const {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (contexts().empty() || contexts().back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    device = device_of(contexts().back());
    return device == nullptr ? CUDA_ERROR_CONTEXT_IS_DESTROYED : device->error;
}

CUresult find_stream(Device& device, CUstream handle, std::shared_ptr<Stream>& stream) {
    if (handle == nullptr || handle == reinterpret_cast<CUstream>(1)) {
        stream = device.legacy;
        return CUDA_SUCCESS;
    }
    stream = state().streams.find(handle);
    return stream != nullptr && stream->device == &device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void destroy_context(Device& device, std::unique_lock<std::mutex>& lock) {
    State& all = state();
    const auto streams = device.streams;
    device.destroying = true;
    // The error makes the device's workers leave their waits and skip further work.
    if (device.error == CUDA_SUCCESS) device.error = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    std::vector<Op> dropped;
    for (const auto& stream : streams) {
        for (Op& op : stream->queue) {
            if (op.kind == Op::Kind::record) op.mark->done = true;
            dropped.push_back(std::move(op));
        }
        stream->completed += stream->queue.size();
        stream->queue.clear();
        destroy_stream(stream);
    }
    drop_comms(device);
    all.progress.notify_all();
    all.progress.wait(lock, [&] {
        return std::none_of(streams.begin(), streams.end(), [](const auto& stream) { return stream->running; });
    });
    for (const auto& capture : std::set(all.captures)) {
        if (capture->graph.device == &device) end_capture(capture);
    }
    all.streams.drop(device);
    all.events.drop(device);
    all.functions.drop(device);
    all.modules.drop(device);
    all.graphs.drop(device);
    all.execs.drop(device);
    release_all(device);
    all.pools.drop(device);
    device.streams.clear();
    device.legacy = nullptr;
    device.default_pool = device.current_pool = nullptr;
    device.peers.clear();
    device.context = nullptr;
    device.error = CUDA_SUCCESS;
    device.used = 0;
    device.destroying = false;
    all.progress.notify_all();
    lock.unlock();
    dropped.clear();
    lock.lock();
}

}  // namespace kvdouble

KV_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDevicePrimaryCtxRetain, ordinal);
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    state().progress.wait(call.lock, [&] { return !device->destroying; });
    if (device->context == nullptr) make_context(*device);
    if (device->error != CUDA_SUCCESS) return device->error;
    device->retained++;
    *context = device->context;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDevicePrimaryCtxRelease_v2, ordinal);
    if (device->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->retained == 0) destroy_context(*device, call.lock);
    return CUDA_SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDevicePrimaryCtxReset_v2, ordinal);
    device->retained = 0;
    if (device->context != nullptr && !device->destroying) destroy_context(*device, call.lock);
    return CUDA_SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
    KV_ENTER_ORDINAL(cuDevicePrimaryCtxGetState, ordinal);
    if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = device->flags;
    *active = device->context != nullptr;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned flags) {
    KV_ENTER_ORDINAL(cuDevicePrimaryCtxSetFlags_v2, ordinal);
    device->flags = flags;
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxSetCurrent(CUcontext context) {
    KV_ENTER_STARTED(cuCtxSetCurrent);
    if (context != nullptr && device_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    auto& stack = contexts();
    if (context == nullptr) {
        if (!stack.empty()) stack.pop_back();
    } else if (stack.empty()) {
        stack.push_back(context);
    } else {
        stack.back() = context;
    }
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxGetCurrent(CUcontext* context) {
    KV_ENTER_STARTED(cuCtxGetCurrent);
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = contexts().empty() ? nullptr : contexts().back();
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    KV_ENTER_STARTED(cuCtxPushCurrent_v2);
    if (device_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    contexts().push_back(context);
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    KV_ENTER_STARTED(cuCtxPopCurrent_v2);
    if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) *context = contexts().back();
    contexts().pop_back();
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxGetDevice(CUdevice* ordinal) {
    KV_ENTER_DEVICE(cuCtxGetDevice);
    if (ordinal == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *ordinal = device->ordinal;
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxSynchronize() {
    KV_ENTER_DEVICE(cuCtxSynchronize);
    KV_TRY(refuse_if_capturing(device));
    return wait_for_device(*device, call.lock);
}

KV_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    KV_ENTER_DEVICE(cuCtxGetStreamPriorityRange);
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
}

KV_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    KV_ENTER_DEVICE(cuCtxEnablePeerAccess);
    const Device* other = device_of(peer);
    if (other == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (other == device) return CUDA_ERROR_INVALID_DEVICE;
    if (!device->peers.insert(other->ordinal).second) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    return CUDA_SUCCESS;
}
