// Copies and fills. Their operands are checked when they are queued and again when they run.
//
// A copy from pageable host memory reads its source during the call; a copy to pageable host memory makes the
// call wait. A copy from or to pinned host memory accesses it when the copy runs. Entry points without a
// stream use the legacy stream, and wait for it if they access host memory.
#include <cstring>
#include <string>

#include "call.hpp"
#include "memory.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

enum class Side { device, pinned, pageable };

// A copy operation. A side in device memory belongs to the given device.
struct Copy {
    const char* kind;
    uintptr_t to, from;
    size_t size;
    Side to_side, from_side;
    const Device* to_device;
    const Device* from_device;
    std::shared_ptr<std::vector<unsigned char>> staged;
};

bool still_there(Side side, const Device* device, uintptr_t address, size_t size) {
    if (side == Side::device) return usable(*device, address, size);
    return side == Side::pageable || find_place(address, size).kind == Place::Kind::pinned;
}

Fault run(const Copy& copy) {
    const std::string name = std::string(copy.kind) + " of " + std::to_string(copy.size) + " bytes: ";
    {
        std::lock_guard lock(state().lock);
        if (!still_there(copy.to_side, copy.to_device, copy.to, copy.size)) {
            return {CUDA_ERROR_ILLEGAL_ADDRESS, name + "the target is not live memory",
                    reinterpret_cast<void*>(copy.to), false};
        }
        if (!still_there(copy.from_side, copy.from_device, copy.from, copy.size)) {
            return {CUDA_ERROR_ILLEGAL_ADDRESS, name + "the source is not live memory",
                    reinterpret_cast<void*>(copy.from), false};
        }
    }
    Fault fault = guarded(
        [](void* argument) {
            const auto& copy = *static_cast<const Copy*>(argument);
            const void* from = copy.staged != nullptr ? copy.staged->data() : reinterpret_cast<void*>(copy.from);
            std::memcpy(reinterpret_cast<void*>(copy.to), from, copy.size);
        },
        const_cast<Copy*>(&copy));
    if (fault.code != CUDA_SUCCESS) fault.text.insert(0, name);
    return fault;
}

void trace_line(const Stream& stream, const std::string& what, size_t bytes) {
    trace(std::to_string(stream.device->ordinal) + " " + std::to_string(stream.number) + " " +
          (stream.capture != nullptr ? "captured " : "") + what + " " + std::to_string(bytes));
}

// Checks a host pointer: if it is in memory of the double, that memory must be pinned and live.
CUresult host_side(uintptr_t address, size_t size, Side& side) {
    if (address == 0) return CUDA_ERROR_INVALID_VALUE;
    const Place place = find_place(address, size);
    if (place.kind != Place::Kind::pinned && place.kind != Place::Kind::pageable) return CUDA_ERROR_INVALID_VALUE;
    side = place.kind == Place::Kind::pinned ? Side::pinned : Side::pageable;
    return CUDA_SUCCESS;
}

CUresult device_side(const Device& device, uintptr_t address, size_t size) {
    const Place place = find_place(address, size);
    const bool inside = place.kind == Place::Kind::device && place.device == &device;
    return inside ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Completes a copy's description according to its kind, then checks and queues the copy.
CUresult copy_on(Call& call, const std::shared_ptr<Stream>& stream, Copy copy, bool synchronous) {
    if (copy.size == 0) return CUDA_SUCCESS;
    if (copy.to_side == Side::device) {
        KV_TRY(device_side(*copy.to_device, copy.to, copy.size));
    } else {
        KV_TRY(host_side(copy.to, copy.size, copy.to_side));
    }
    if (copy.from_side == Side::device) {
        KV_TRY(device_side(*copy.from_device, copy.from, copy.size));
    } else {
        KV_TRY(host_side(copy.from, copy.size, copy.from_side));
    }
    if (copy.to < copy.from + copy.size && copy.from < copy.to + copy.size) return CUDA_ERROR_INVALID_VALUE;
    const bool captured = stream->capture != nullptr;
    trace_line(*stream, copy.kind, copy.size);
    if (copy.from_side == Side::pageable && !captured) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(copy.from);
        copy.staged = std::make_shared<std::vector<unsigned char>>(bytes, bytes + copy.size);
    }
    const bool wait = !captured && (synchronous || copy.to_side == Side::pageable);
    KV_TRY(submit(stream, 1, [copy] { return run(copy); }));
    return wait ? wait_for(*stream, stream->submitted, call.lock) : CUDA_SUCCESS;
}

// Queues a copy on the current device's stream with this handle.
CUresult copy_to(Copy copy, CUstream handle, bool synchronous) {
    Call call;
    Device* device = nullptr;
    KV_TRY(call.current(device));
    if (synchronous) KV_TRY(refuse_if_capturing(device));
    std::shared_ptr<Stream> stream;
    KV_TRY(find_stream(*device, handle, stream));
    if (copy.to_device == nullptr) copy.to_device = device;
    if (copy.from_device == nullptr) copy.from_device = device;
    const bool host = copy.to_side != Side::device || copy.from_side != Side::device;
    return copy_on(call, stream, copy, synchronous && host);
}

Copy host_to_device(CUdeviceptr to, const void* from, size_t size) {
    return {"memcpy_htod", to, reinterpret_cast<uintptr_t>(from), size, Side::device, Side::pageable, {}, {}, {}};
}
Copy device_to_host(void* to, CUdeviceptr from, size_t size) {
    return {"memcpy_dtoh", reinterpret_cast<uintptr_t>(to), from, size, Side::pageable, Side::device, {}, {}, {}};
}
Copy device_to_device(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return {"memcpy_dtod", to, from, size, Side::device, Side::device, {}, {}, {}};
}

// Infers a copy's kind from two unified addresses.
CUresult infer(CUdeviceptr to, CUdeviceptr from, size_t size, Copy& copy) {
    Call call;
    const bool to_device = find_place(to, size).kind == Place::Kind::device;
    const bool from_device = find_place(from, size).kind == Place::Kind::device;
    if (!to_device && !from_device) return size == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    copy = !from_device ? host_to_device(to, reinterpret_cast<void*>(from), size)
           : !to_device ? device_to_host(reinterpret_cast<void*>(to), from, size)
                        : device_to_device(to, from, size);
    return CUDA_SUCCESS;
}

CUresult peer_copy(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
                   CUstream stream, bool synchronous) {
    Copy copy = device_to_device(to, from, size);
    copy.kind = "memcpy_peer";
    {
        Call call;
        for (const auto& device : state().devices) {
            if (device->context == nullptr) continue;
            if (device->context == to_context) copy.to_device = device.get();
            if (device->context == from_context) copy.from_device = device.get();
        }
        if (copy.to_device == nullptr || copy.from_device == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    }
    return copy_to(copy, stream, synchronous);
}

// Fills memory with a pattern of `width` bytes.
CUresult fill(CUdeviceptr to, unsigned value, size_t width, size_t count, CUstream handle, bool synchronous) {
    Call call;
    Device* device = nullptr;
    KV_TRY(call.current(device));
    if (synchronous) KV_TRY(refuse_if_capturing(device));
    std::shared_ptr<Stream> stream;
    KV_TRY(find_stream(*device, handle, stream));
    const size_t size = count * width;
    if (size / width != count || to % width != 0) return CUDA_ERROR_INVALID_VALUE;
    if (size == 0) return CUDA_SUCCESS;
    KV_TRY(device_side(*device, to, size));
    const std::string kind = "memset" + std::to_string(width * 8);
    trace_line(*stream, kind, size);
    struct Fill {
        uintptr_t to;
        unsigned value;
        size_t width, count;
    };
    const Fill what{to, value, width, count};
    return submit(stream, 2, [what, size, device, kind] {
        const std::string name = kind + " of " + std::to_string(size) + " bytes: ";
        {
            std::lock_guard lock(state().lock);
            if (!usable(*device, what.to, size)) {
                return Fault{CUDA_ERROR_ILLEGAL_ADDRESS, name + "the target is not live memory",
                             reinterpret_cast<void*>(what.to), false};
            }
        }
        Fault fault = guarded(
            [](void* argument) {
                const auto& fill = *static_cast<const Fill*>(argument);
                auto* bytes = reinterpret_cast<unsigned char*>(fill.to);
                if (fill.width == 1) {
                    std::memset(bytes, static_cast<int>(fill.value & 0xff), fill.count);
                    return;
                }
                for (size_t i = 0; i < fill.count; i++) std::memcpy(bytes + i * fill.width, &fill.value, fill.width);
            },
            const_cast<Fill*>(&what));
        if (fault.code != CUDA_SUCCESS) fault.text.insert(0, name);
        return fault;
    });
}

}  // namespace

KV_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
    KV_ENTER(cuMemcpyHtoD_v2);
    return copy_to(host_to_device(to, from, size), nullptr, true);
}
KV_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
    KV_ENTER(cuMemcpyHtoDAsync_v2);
    return copy_to(host_to_device(to, from, size), stream, false);
}
KV_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
    KV_ENTER(cuMemcpyDtoH_v2);
    return copy_to(device_to_host(to, from, size), nullptr, true);
}
KV_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream stream) {
    KV_ENTER(cuMemcpyDtoHAsync_v2);
    return copy_to(device_to_host(to, from, size), stream, false);
}
KV_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    KV_ENTER(cuMemcpyDtoD_v2);
    return copy_to(device_to_device(to, from, size), nullptr, true);
}
KV_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    KV_ENTER(cuMemcpyDtoDAsync_v2);
    return copy_to(device_to_device(to, from, size), stream, false);
}
KV_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    KV_ENTER(cuMemcpy);
    Copy copy{};
    KV_TRY(infer(to, from, size, copy));
    return copy_to(copy, nullptr, true);
}
KV_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    KV_ENTER(cuMemcpyAsync);
    Copy copy{};
    KV_TRY(infer(to, from, size, copy));
    return copy_to(copy, stream, false);
}
KV_API CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                             size_t size) {
    KV_ENTER(cuMemcpyPeer);
    return peer_copy(to, to_context, from, from_context, size, nullptr, true);
}
KV_API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                  size_t size, CUstream stream) {
    KV_ENTER(cuMemcpyPeerAsync);
    return peer_copy(to, to_context, from, from_context, size, stream, false);
}

KV_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    KV_ENTER(cuMemsetD8_v2);
    return fill(to, value, 1, count, nullptr, true);
}
KV_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    KV_ENTER(cuMemsetD8Async);
    return fill(to, value, 1, count, stream, false);
}
KV_API CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    KV_ENTER(cuMemsetD16Async);
    return fill(to, value, 2, count, stream, false);
}
KV_API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    KV_ENTER(cuMemsetD32_v2);
    return fill(to, value, 4, count, nullptr, true);
}
KV_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    KV_ENTER(cuMemsetD32Async);
    return fill(to, value, 4, count, stream, false);
}
