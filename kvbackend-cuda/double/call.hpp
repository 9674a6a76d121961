// The first steps of every entry: injected results, the lock, the current context, the stream's handle.
#pragma once

#include "state.hpp"

namespace kvdouble {

// A call of an entry. It holds the lock of the state until it ends.
class Call {
public:
    Call() : lock(state().lock) {}

    // Finds the device of the current context, and whether it is healthy.
    CUresult current(Device*& device) const;

    std::unique_lock<std::mutex> lock;
};

// Whether tests have planned something for this call of the entry; then `result` is what it returns.
bool planned(const char* entry, CUresult& result);

// Finds the stream of this handle for work of the device; null and 1 are the legacy stream.
CUresult find_stream(Device& device, CUstream handle, std::shared_ptr<Stream>& stream);

// Returns the device of this ordinal, or null.
Device* device_at(CUdevice ordinal);

// Finds the device of this ordinal, once the driver is initialised.
CUresult find_device(CUdevice ordinal, Device*& device);

// Ends the primary context of the device: drops queued work, waits for what runs, frees everything.
void destroy_context(Device& device, std::unique_lock<std::mutex>& lock);

// The stack of current contexts of the calling thread.
std::vector<CUcontext>& contexts();

}  // namespace kvdouble

#define KV_ENTER(entry)                                                       \
    do {                                                                      \
        CUresult planned_result;                                              \
        if (kvdouble::planned(#entry, planned_result)) return planned_result; \
    } while (0)

// Returns from the entry if the expression is an error.
#define KV_TRY(expression)                       \
    do {                                         \
        const CUresult tried = (expression);     \
        if (tried != CUDA_SUCCESS) return tried; \
    } while (0)

// Enters a call (`call`) of a driver that must be initialised.
#define KV_ENTER_STARTED(entry) \
    KV_ENTER(entry);            \
    Call call;                  \
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED

// Enters a call for the device of an ordinal (`device`).
#define KV_ENTER_ORDINAL(entry, ordinal) \
    KV_ENTER(entry);                     \
    Call call;                           \
    Device* device = nullptr;            \
    KV_TRY(find_device(ordinal, device))

// Enters a call for the device of the current context (`device`).
#define KV_ENTER_DEVICE(entry) \
    KV_ENTER(entry);           \
    Call call;                 \
    Device* device = nullptr;  \
    KV_TRY(call.current(device))

// Enters a call for a stream (`stream`) of the current context.
#define KV_ENTER_STREAM(entry, handle) \
    KV_ENTER_DEVICE(entry);            \
    std::shared_ptr<Stream> stream;    \
    KV_TRY(find_stream(*device, handle, stream))
