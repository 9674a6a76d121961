// Streams as queues with a worker each, waits of the host, and captures.
#pragma once

#include "state.hpp"

namespace kvdouble {

std::shared_ptr<Stream> make_stream(Device& device, unsigned flags, int priority);

// Queues the operation and returns its number.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Op op);

// Queues work, or adds it to the graph that the stream captures.
CUresult submit(const std::shared_ptr<Stream>& stream, int node_type, std::function<Fault()> work);

// Lets the stream run up to this operation. On a device that runs at once, it may do so anyway.
void allow(Stream& stream, uint64_t number);

// Lets the stream run up to this operation and waits until it has. Returns the state of the device.
CUresult wait_for(Stream& stream, uint64_t number, std::unique_lock<std::mutex>& lock);

// Waits for all work of the device.
CUresult wait_for_device(Device& device, std::unique_lock<std::mutex>& lock);

// Counts a query of something that is not ready. On a lazy device, each one after a thousand lets one
// operation run.
void count_query(Stream& stream, unsigned& queries);

// The stream runs what it has and ends then.
void destroy_stream(const std::shared_ptr<Stream>& stream);

// Whether a call that a capture under way does not permit is made; it makes those captures invalid. `device` names
// the device whose streams the call would wait for, or null.
CUresult refuse_if_capturing(const Device* device);

// As above, for a call that waits for or asks about this stream.
CUresult refuse_if_capturing(const Stream& stream);

// Ends the capture: the streams and events that take part leave it.
void end_capture(const std::shared_ptr<Capture>& capture);

}  // namespace kvdouble
