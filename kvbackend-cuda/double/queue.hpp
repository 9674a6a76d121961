// Streams as queues with one worker each, host waits, and captures.
#pragma once

#include "state.hpp"

namespace kvdouble {

std::shared_ptr<Stream> make_stream(Device& device, unsigned flags, int priority);

// Queues an operation and returns its sequence number.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Op op);

// Queues work, or adds it to the graph that the stream captures.
CUresult submit(const std::shared_ptr<Stream>& stream, int node_type, std::function<Fault()> work);

// Lets a stream run up to this operation. Streams of eager devices may run without this call.
void allow(Stream& stream, uint64_t number);

// Lets a stream run up to this operation, and waits for it. Returns the device's error, if there is one.
CUresult wait_for(Stream& stream, uint64_t number, std::unique_lock<std::mutex>& lock);

// Waits for all of a device's work.
CUresult wait_for_device(Device& device, std::unique_lock<std::mutex>& lock);

// Counts a query of a stream or event that is not ready. On a lazy device, the hundredth query and each later
// query lets one operation run.
void count_query(Stream& stream, unsigned& queries);

// Destroys a stream once its queued work has run.
void destroy_stream(const std::shared_ptr<Stream>& stream);

// Refuses a call that a current capture does not permit, and invalidates such captures. `device` is the
// device whose streams the call would wait for, or null.
CUresult refuse_if_capturing(const Device* device);

// Like the overload for a device, for a call that waits for this stream or queries it.
CUresult refuse_if_capturing(const Stream& stream);

// Ends a capture. The streams and events that take part leave it.
void end_capture(const std::shared_ptr<Capture>& capture);

}  // namespace kvdouble
