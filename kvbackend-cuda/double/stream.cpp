// Entry points for streams. The legacy stream is a plain stream without implicit waits.
#include <algorithm>

#include "call.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

CUresult create(CUstream* result, unsigned flags, int priority) {
    Call call;
    Device* device = nullptr;
    KV_TRY(call.current(device));
    if (result == nullptr || flags > 1) return CUDA_ERROR_INVALID_VALUE;
    auto stream = make_stream(*device, flags, std::clamp(priority, -5, 0));
    stream->handle = new_handle<CUstream>();
    state().streams.entries[stream->handle] = stream;
    *result = stream->handle;
    return CUDA_SUCCESS;
}

}  // namespace

KV_API CUresult cuStreamCreateWithPriority(CUstream* result, unsigned flags, int priority) {
    KV_ENTER(cuStreamCreateWithPriority);
    return create(result, flags, priority);
}

KV_API CUresult cuStreamCreate(CUstream* result, unsigned flags) {
    KV_ENTER(cuStreamCreate);
    return create(result, flags, 0);
}

// Queued work still runs. A capture in which the stream takes part becomes invalid.
KV_API CUresult cuStreamDestroy_v2(CUstream handle) {
    KV_ENTER_STARTED(cuStreamDestroy_v2);
    auto stream = state().streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        const auto capture = stream->capture;
        capture->invalid = true;
        if (capture->origin.lock() == stream) end_capture(capture);
    }
    state().streams.entries.erase(handle);
    const Device& device = *stream->device;
    destroy_stream(stream);
    return device.error;
}

KV_API CUresult cuStreamSynchronize(CUstream handle) {
    KV_ENTER_STREAM(cuStreamSynchronize, handle);
    KV_TRY(refuse_if_capturing(*stream));
    return wait_for(*stream, stream->submitted, call.lock);
}

KV_API CUresult cuStreamQuery(CUstream handle) {
    KV_ENTER_STREAM(cuStreamQuery, handle);
    KV_TRY(refuse_if_capturing(*stream));
    if (stream->completed == stream->submitted) {
        stream->queries = 0;
        return CUDA_SUCCESS;
    }
    count_query(*stream, stream->queries);
    return CUDA_ERROR_NOT_READY;
}

KV_API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
    KV_ENTER_STREAM(cuStreamGetCtx, handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = device->context;
    return CUDA_SUCCESS;
}

KV_API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    KV_ENTER_STREAM(cuStreamGetPriority, handle);
    if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

KV_API CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    KV_ENTER_STREAM(cuStreamGetFlags, handle);
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

// The event may belong to another device. A stream that waits for an event of a capture joins the capture.
KV_API CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
    KV_ENTER_STREAM(cuStreamWaitEvent, handle);
    const auto event = state().events.find(event_handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    if (event->capture != nullptr) {
        if (stream == device->legacy) {
            event->capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (stream->capture != nullptr && stream->capture != event->capture) {
            stream->capture->invalid = event->capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        }
        if (event->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        stream->capture = event->capture;
        for (const size_t node : event->capture_nodes) {
            auto& nodes = stream->capture_nodes;
            if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
        }
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        if (event->mark == nullptr) return CUDA_SUCCESS;
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (event->mark == nullptr || event->mark->done) return CUDA_SUCCESS;
    enqueue(stream, {Op::Kind::wait, nullptr, event->mark});
    return CUDA_SUCCESS;
}

// The function runs on the stream's worker. It does not run if the device is lost.
KV_API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
    KV_ENTER_STREAM(cuLaunchHostFunc, handle);
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, 3, [function, argument] {
        function(argument);
        return Fault();
    });
}
