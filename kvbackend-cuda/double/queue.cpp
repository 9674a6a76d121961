// A stream's worker, and the functions with which the host lets it run and waits for it.
#include "queue.hpp"

#include <algorithm>
#include <utility>

#include "block.hpp"
#include "memory.hpp"

namespace kvdouble {

namespace {

bool may_run(const Stream& stream) { return !stream.queue.empty() && stream.completed < stream.allowed; }

void work(std::shared_ptr<Stream> stream) {
    prepare_worker_for_faults();
    State& all = state();
    std::unique_lock lock(all.lock);
    for (;;) {
        stream->wake.wait(lock, [&] { return may_run(*stream) || (stream->destroyed && stream->queue.empty()); });
        if (stream->queue.empty()) break;
        Op op = std::move(stream->queue.front());
        stream->queue.pop_front();
        Device& device = *stream->device;
        stream->running = true;
        if (op.kind == Op::Kind::wait) {
            allow(*op.mark->stream, op.mark->number);
            all.progress.wait(lock, [&] { return op.mark->done || device.error != CUDA_SUCCESS; });
        } else if (op.kind == Op::Kind::record) {
            op.mark->time = std::chrono::steady_clock::now();
            op.mark->done = true;
        } else if (device.error == CUDA_SUCCESS) {
            lock.unlock();
            Fault fault = op.work();
            op.work = nullptr;
            lock.lock();
            if (fault.code != CUDA_SUCCESS) lose(device, fault);
        }
        // The operation's data is freed without the lock, because its destructors may call the double.
        lock.unlock();
        op = Op();
        lock.lock();
        stream->running = false;
        stream->completed++;
        all.progress.notify_all();
    }
    Device& device = *stream->device;
    std::erase(device.streams, stream);
    stream->has_worker = false;
    all.progress.notify_all();
    lock.unlock();
    release_worker_from_faults();
}

}  // namespace

std::shared_ptr<Stream> make_stream(Device& device, unsigned flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = &device;
    stream->flags = flags;
    stream->priority = priority;
    stream->number = device.streams_made++;
    stream->allowed = device.lazy ? 0 : ~uint64_t{0};
    device.streams.push_back(stream);
    return stream;
}

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Op op) {
    if (!stream->has_worker) {
        stream->has_worker = true;
        std::thread(work, stream).detach();
    }
    stream->queue.push_back(std::move(op));
    stream->submitted++;
    stream->wake.notify_one();
    return stream->submitted;
}

CUresult submit(const std::shared_ptr<Stream>& stream, int node_type, std::function<Fault()> work) {
    if (Capture* capture = stream->capture.get(); capture != nullptr) {
        if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        auto& nodes = capture->graph.nodes;
        nodes.push_back({node_type, std::move(work), stream->capture_nodes});
        stream->capture_nodes = {nodes.size() - 1};
        return CUDA_SUCCESS;
    }
    enqueue(stream, {Op::Kind::work, std::move(work), nullptr});
    return CUDA_SUCCESS;
}

void allow(Stream& stream, uint64_t number) {
    if (stream.allowed >= number) return;
    stream.allowed = number;
    stream.wake.notify_one();
}

CUresult wait_for(Stream& stream, uint64_t number, std::unique_lock<std::mutex>& lock) {
    Device& device = *stream.device;
    const auto context = device.context;
    allow(stream, number);
    state().progress.wait(lock, [&] { return stream.completed >= number || device.context != context; });
    if (device.context != context) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    trim_pools(device);
    return device.error;
}

CUresult wait_for_device(Device& device, std::unique_lock<std::mutex>& lock) {
    const auto context = device.context;
    const auto streams = device.streams;
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> ends;
    for (const auto& stream : streams) {
        allow(*stream, stream->submitted);
        ends.emplace_back(stream, stream->submitted);
    }
    for (const auto& [stream, number] : ends) {
        if (device.context != context) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        wait_for(*stream, number, lock);
    }
    return device.error;
}

void count_query(Stream& stream, unsigned& queries) {
    if (!stream.device->lazy || ++queries < 100) return;
    allow(stream, std::min(stream.submitted, stream.completed + 1));
}

void destroy_stream(const std::shared_ptr<Stream>& stream) {
    stream->destroyed = true;
    if (stream->has_worker) {
        stream->wake.notify_one();
    } else {
        std::erase(stream->device->streams, stream);
    }
}

CUresult refuse_if_capturing(const Device* device) {
    bool refused = false;
    for (const auto& capture : state().captures) {
        const bool mine = capture->thread == std::this_thread::get_id();
        const bool covers = device != nullptr && capture->graph.device == device;
        if (!covers && capture->mode != 0 && !(capture->mode == 1 && mine)) continue;
        capture->invalid = true;
        refused = true;
    }
    return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult refuse_if_capturing(const Stream& stream) {
    if (stream.capture != nullptr) {
        stream.capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return refuse_if_capturing(nullptr);
}

void end_capture(const std::shared_ptr<Capture>& capture) {
    for (const auto& [handle, stream] : state().streams.entries) {
        if (stream->capture != capture) continue;
        stream->capture = nullptr;
        stream->capture_nodes.clear();
    }
    for (const auto& [handle, event] : state().events.entries) {
        if (event->capture != capture) continue;
        event->capture = nullptr;
        event->capture_nodes.clear();
    }
    state().captures.erase(capture);
}

}  // namespace kvdouble
