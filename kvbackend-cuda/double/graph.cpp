// Stream captures, and graph launches.
//
// A graph runs as one operation of its stream. Its nodes run one after another, each time in a different
// order that respects the captured dependencies, so that missing dependencies are found.
#include <algorithm>

#include "call.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

// Returns whether all nodes are in `ends` or come before one of these nodes.
bool all_reached(const std::vector<Node>& nodes, std::vector<size_t> ends) {
    std::vector<bool> reached(nodes.size());
    size_t count = 0;
    while (!ends.empty()) {
        const size_t node = ends.back();
        ends.pop_back();
        if (reached[node]) continue;
        reached[node] = true;
        count++;
        ends.insert(ends.end(), nodes[node].after.begin(), nodes[node].after.end());
    }
    return count == nodes.size();
}

Fault run(const std::vector<Node>& nodes, uint64_t seed) {
    std::vector<size_t> missing(nodes.size());
    std::vector<std::vector<size_t>> followers(nodes.size());
    std::vector<size_t> ready;
    for (size_t i = 0; i < nodes.size(); i++) {
        missing[i] = nodes[i].after.size();
        if (missing[i] == 0) ready.push_back(i);
        for (const size_t before : nodes[i].after) followers[before].push_back(i);
    }
    while (!ready.empty()) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const auto at = ready.begin() + static_cast<ptrdiff_t>((seed >> 33) % ready.size());
        const size_t node = *at;
        ready.erase(at);
        Fault fault = nodes[node].work();
        if (fault.code != CUDA_SUCCESS) return fault;
        for (const size_t follower : followers[node]) {
            if (--missing[follower] == 0) ready.push_back(follower);
        }
    }
    return {};
}

template <typename T>
CUresult find_in(const std::shared_ptr<T>& found, const Device& device) {
    return found != nullptr && found->device == &device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int status_of(const Stream& stream) {
    if (stream.capture == nullptr) return 0;
    return stream.capture->invalid ? 2 : 1;
}

}  // namespace

KV_API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    KV_ENTER_STREAM(cuStreamBeginCapture_v2, handle);
    if (mode < 0 || mode > 2) return CUDA_ERROR_INVALID_VALUE;
    if (stream == device->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->id = state().next_capture++;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    capture->graph.device = device;
    stream->capture = capture;
    stream->capture_nodes.clear();
    state().captures.insert(capture);
    return CUDA_SUCCESS;
}

KV_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* result) {
    KV_ENTER_STREAM(cuStreamEndCapture, handle);
    if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *result = nullptr;
    const auto capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin.lock() != stream) {
        capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != 2 && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    const bool joined = all_reached(capture->graph.nodes, stream->capture_nodes);
    end_capture(capture);
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *result = new_handle<CUgraph>();
    state().graphs.entries[*result] = std::make_shared<Graph>(std::move(capture->graph));
    return CUDA_SUCCESS;
}

KV_API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
    KV_ENTER_STREAM(cuStreamIsCapturing, handle);
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *status = status_of(*stream);
    return CUDA_SUCCESS;
}

// The double does not return the graph or its dependencies during a capture.
KV_API CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
                                          const CUgraphNode** nodes, const void** edges, size_t* count) {
    KV_ENTER_STREAM(cuStreamGetCaptureInfo_v3, handle);
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (graph != nullptr || nodes != nullptr || edges != nullptr || count != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    *status = status_of(*stream);
    if (id != nullptr) *id = stream->capture != nullptr ? stream->capture->id : 0;
    return CUDA_SUCCESS;
}

KV_API CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int* status, uint64_t* id, CUgraph* graph,
                                          const CUgraphNode** nodes, size_t* count) {
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, nodes, nullptr, count);
}

// Sets the thread's capture mode. The double only returns the previous mode.
KV_API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    KV_ENTER(cuThreadExchangeStreamCaptureMode);
    static thread_local int current_mode = 0;
    if (mode == nullptr || *mode < 0 || *mode > 2) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, current_mode);
    return CUDA_SUCCESS;
}

KV_API CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
    KV_ENTER_STARTED(cuGraphGetNodes);
    const auto graph = state().graphs.find(handle);
    if (graph == nullptr || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const size_t there = graph->nodes.size();
    if (nodes != nullptr) {
        for (size_t i = 0; i < *count; i++) {
            if (i >= there) {
                nodes[i] = nullptr;
                continue;
            }
            nodes[i] = new_handle<CUgraphNode>();
            state().node_types[nodes[i]] = graph->nodes[i].type;
        }
    }
    if (nodes == nullptr || *count > there) *count = there;
    return CUDA_SUCCESS;
}

KV_API CUresult cuGraphNodeGetType(CUgraphNode node, int* type) {
    KV_ENTER(cuGraphNodeGetType);
    Call call;
    const auto found = state().node_types.find(node);
    if (found == state().node_types.end() || type == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *type = found->second;
    return CUDA_SUCCESS;
}

KV_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* result, CUgraph handle, unsigned long long flags) {
    KV_ENTER_DEVICE(cuGraphInstantiateWithFlags);
    const auto graph = state().graphs.find(handle);
    KV_TRY(find_in(graph, *device));
    // Flag 1 frees memory on launch, and flag 8 keeps node priorities; uploads and launches from the device
    // are not modelled.
    if (result == nullptr || (flags & ~9ull) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto exec = std::make_shared<GraphExec>();
    exec->device = device;
    exec->nodes = std::make_shared<const std::vector<Node>>(graph->nodes);
    *result = new_handle<CUgraphExec>();
    state().execs.entries[*result] = exec;
    return CUDA_SUCCESS;
}

KV_API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    KV_ENTER_STREAM(cuGraphLaunch, stream_handle);
    const auto exec = state().execs.find(handle);
    KV_TRY(find_in(exec, *device));
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    trace(std::to_string(device->ordinal) + " " + std::to_string(stream->number) + " graph " +
          std::to_string(exec->nodes->size()));
    const uint64_t seed = state().launches++;
    return submit(stream, 4, [nodes = exec->nodes, seed] { return run(*nodes, seed); });
}

KV_API CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    KV_ENTER_STREAM(cuGraphUpload, stream_handle);
    return find_in(state().execs.find(handle), *device);
}

KV_API CUresult cuGraphExecDestroy(CUgraphExec handle) {
    KV_ENTER_STARTED(cuGraphExecDestroy);
    const auto exec = state().execs.find(handle);
    if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
    state().execs.entries.erase(handle);
    return exec->device->error;
}

KV_API CUresult cuGraphDestroy(CUgraph handle) {
    KV_ENTER_STARTED(cuGraphDestroy);
    const auto graph = state().graphs.find(handle);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    state().graphs.entries.erase(handle);
    return graph->device->error;
}
