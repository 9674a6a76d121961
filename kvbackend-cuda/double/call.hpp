// The first steps of every entry point: injected results, the lock, the current context, the stream's handle.
#pragma once

#include "state.hpp"

namespace kvdouble {

// A call of an entry point. It holds the state's lock until it ends.
class Call {
public:
    Call() : lock(state().lock) {}

    // Finds the current context's device. Returns an error if there is none or if it is lost.
    CUresult current(Device*& device) const;

    std::unique_lock<std::mutex> lock;
};

// Returns whether a test has planned the result of this call of the entry point; if so, sets `result`.
bool planned(const char* entry, CUresult& result);

// Finds the device's stream with this handle; null and 1 stand for the legacy stream.
CUresult find_stream(Device& device, CUstream handle, std::shared_ptr<Stream>& stream);

// Returns the device with this index, or null.
Device* device_at(CUdevice ordinal);

// Finds the device with this index. The driver must be initialised.
CUresult find_device(CUdevice ordinal, Device*& device);

// Destroys the device's primary context: drops queued work, waits for running work, and frees everything.
void destroy_context(Device& device, std::unique_lock<std::mutex>& lock);

// Returns the calling thread's stack of current contexts.
std::vector<CUcontext>& contexts();

}  // namespace kvdouble

#define KV_ENTER(entry)                                                       \
    do {                                                                      \
        CUresult planned_result;                                              \
        if (kvdouble::planned(#entry, planned_result)) return planned_result; \
    } while (0)

// Returns from the entry point if the expression is an error.
#define KV_TRY(expression)                       \
    do {                                         \
        const CUresult tried = (expression);     \
        if (tried != CUDA_SUCCESS) return tried; \
    } while (0)

// Enters a call (`call`) that requires an initialised driver.
#define KV_ENTER_STARTED(entry) \
    KV_ENTER(entry);            \
    Call call;                  \
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED

// Enters a call for the device (`device`) with the given index.
#define KV_ENTER_ORDINAL(entry, ordinal) \
    KV_ENTER(entry);                     \
    Call call;                           \
    Device* device = nullptr;            \
    KV_TRY(find_device(ordinal, device))

// Enters a call for the current context's device (`device`).
#define KV_ENTER_DEVICE(entry) \
    KV_ENTER(entry);           \
    Call call;                 \
    Device* device = nullptr;  \
    KV_TRY(call.current(device))

// Enters a call for a stream (`stream`) in the current context.
#define KV_ENTER_STREAM(entry, handle) \
    KV_ENTER_DEVICE(entry);            \
    std::shared_ptr<Stream> stream;    \
    KV_TRY(find_stream(*device, handle, stream))
