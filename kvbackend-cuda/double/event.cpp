// Entry points for events.
#include "call.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

constexpr unsigned disable_timing = 2;

CUresult find_event(CUevent handle, std::shared_ptr<Event>& event) {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    event = state().events.find(handle);
    return event == nullptr ? CUDA_ERROR_INVALID_HANDLE : event->device->error;
}

// Refuses a query of a captured event, and invalidates its capture, because such an event never completes.
CUresult refuse_captured(const Event& event) {
    if (event.capture != nullptr) {
        event.capture->invalid = true;
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return refuse_if_capturing(nullptr);
}

}  // namespace

KV_API CUresult cuEventCreate(CUevent* result, unsigned flags) {
    KV_ENTER_DEVICE(cuEventCreate);
    if (result == nullptr || flags > 3) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>();
    event->device = device;
    event->flags = flags;
    *result = new_handle<CUevent>();
    state().events.entries[*result] = event;
    return CUDA_SUCCESS;
}

KV_API CUresult cuEventDestroy_v2(CUevent handle) {
    KV_ENTER_STARTED(cuEventDestroy_v2);
    const auto event = state().events.find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    state().events.entries.erase(handle);
    return event->device->error;
}

KV_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    KV_ENTER_STREAM(cuEventRecord, stream_handle);
    std::shared_ptr<Event> event;
    KV_TRY(find_event(handle, event));
    if (event->device != device) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->capture = stream->capture;
        event->capture_nodes = stream->capture_nodes;
        return CUDA_SUCCESS;
    }
    event->capture = nullptr;
    event->capture_nodes.clear();
    event->mark = std::make_shared<Mark>();
    event->mark->stream = stream;
    event->mark->number = enqueue(stream, {Op::Kind::record, nullptr, event->mark});
    return CUDA_SUCCESS;
}

// An event that was never recorded counts as complete.
KV_API CUresult cuEventQuery(CUevent handle) {
    KV_ENTER(cuEventQuery);
    Call call;
    std::shared_ptr<Event> event;
    KV_TRY(find_event(handle, event));
    KV_TRY(refuse_captured(*event));
    if (event->mark == nullptr || event->mark->done) return CUDA_SUCCESS;
    count_query(*event->mark->stream, event->mark->queries);
    return CUDA_ERROR_NOT_READY;
}

KV_API CUresult cuEventSynchronize(CUevent handle) {
    KV_ENTER(cuEventSynchronize);
    Call call;
    std::shared_ptr<Event> event;
    KV_TRY(find_event(handle, event));
    KV_TRY(refuse_captured(*event));
    const auto mark = event->mark;
    if (mark == nullptr || mark->done) return CUDA_SUCCESS;
    return wait_for(*mark->stream, mark->number, call.lock);
}

KV_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    KV_ENTER(cuEventElapsedTime_v2);
    Call call;
    std::shared_ptr<Event> first, second;
    KV_TRY(find_event(start, first));
    KV_TRY(find_event(end, second));
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (((first->flags | second->flags) & disable_timing) != 0 || first->device != second->device ||
        first->mark == nullptr || second->mark == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!first->mark->done || !second->mark->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(second->mark->time - first->mark->time).count();
    return CUDA_SUCCESS;
}

KV_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
