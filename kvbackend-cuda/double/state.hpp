// All of the double's objects, and the lock that guards them.
//
// Everything here may be read and changed only under `state().lock`, except by a worker that runs a piece of
// work. Handles are numbers that are never reused, so that stale handles are found. The state is never
// destroyed, because workers may still be waiting when the process ends.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fault.hpp"
#include "types.hpp"

namespace kvdouble {

struct Device;
struct Stream;
struct Capture;
struct Pool;
struct Allocation;

// The point in a stream at which an event was recorded.
struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
    bool done = false;
    std::chrono::steady_clock::time_point time;
    unsigned queries = 0;
};

// A piece of queued work. `work` runs while the lock is not held.
struct Op {
    enum class Kind { work, record, wait };
    Kind kind = Kind::work;
    std::function<Fault()> work;
    std::shared_ptr<Mark> mark;
};

struct Stream {
    Device* device = nullptr;
    CUstream handle = nullptr;
    unsigned number = 0;
    unsigned flags = 0;
    int priority = 0;
    std::deque<Op> queue;
    uint64_t submitted = 0;
    uint64_t completed = 0;
    uint64_t allowed = 0;  // The worker runs operations up to this number.
    bool running = false;
    bool destroyed = false;
    bool has_worker = false;
    unsigned queries = 0;
    std::condition_variable wake;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> capture_nodes;  // The nodes that the stream's next captured operation depends on.
};

struct Event {
    Device* device = nullptr;
    unsigned flags = 0;
    std::shared_ptr<Mark> mark;  // Null before the first record.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> capture_nodes;
};

// A graph node: its work, and the nodes that it follows.
struct Node {
    int type = 0;  // CU_GRAPH_NODE_TYPE: 0 kernel, 1 memcpy, 2 memset, 3 host.
    std::function<Fault()> work;
    std::vector<size_t> after;
};

struct Graph {
    Device* device = nullptr;
    std::vector<Node> nodes;
};

struct GraphExec {
    Device* device = nullptr;
    std::shared_ptr<const std::vector<Node>> nodes;
};

// A current capture, shared by the streams that take part.
struct Capture {
    uint64_t id = 0;
    int mode = 0;  // 0 global, 1 of the thread, 2 relaxed.
    std::thread::id thread;
    std::weak_ptr<Stream> origin;
    bool invalid = false;
    Graph graph;
};

struct Module;
struct Kernel;

struct Function {
    Device* device = nullptr;
    std::weak_ptr<Module> module;
    const Kernel* kernel = nullptr;
    size_t max_dynamic_shared = 48 * 1024;
};

struct Module {
    Device* device = nullptr;
    std::string ptx;
    std::map<std::string, CUfunction> functions;
};

struct Pool {
    Device* device = nullptr;
    CUmemoryPool handle = nullptr;
    bool is_default = false;
    bool destroyed = false;
    size_t max_size = 0;
    uint64_t threshold = 0;
    size_t used = 0, used_high = 0;
    size_t reserved = 0, reserved_high = 0;
    int reuse[4] = {0, 1, 1, 1};
    std::vector<std::pair<std::weak_ptr<Stream>, uint64_t>> frees;  // Queued, perhaps done.
};

struct Device {
    int ordinal = 0;
    std::string name;
    bool lazy = false;
    size_t limit = 0;
    size_t used = 0;
    CUresult error = CUDA_SUCCESS;
    unsigned retained = 0;
    unsigned flags = 0;
    CUcontext context = nullptr;
    bool destroying = false;
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // With the destroyed ones that still have work.
    unsigned streams_made = 0;
    std::shared_ptr<Pool> default_pool, current_pool;
    std::set<int> peers;
    int memory_file = -1;  // The physical memory of cuMemCreate.
    uint64_t memory_file_end = 0;
};

template <typename Handle, typename T>
struct Table {
    std::map<Handle, std::shared_ptr<T>> entries;

    std::shared_ptr<T> find(Handle handle) const {
        const auto at = entries.find(handle);
        return at == entries.end() ? nullptr : at->second;
    }
    // Removes all objects of a device.
    void drop(const Device& device) {
        std::erase_if(entries, [&](const auto& entry) { return entry.second->device == &device; });
    }
    int count(const Device& device) const {
        int number = 0;
        for (const auto& entry : entries) number += entry.second->device == &device;
        return number;
    }
};

struct State {
    std::mutex lock;
    std::condition_variable progress;  // An operation has ended, or a device was lost or reset.
    bool initialised = false;
    std::vector<std::unique_ptr<Device>> devices;
    Table<CUstream, Stream> streams;
    Table<CUevent, Event> events;
    Table<CUmodule, Module> modules;
    Table<CUfunction, Function> functions;
    Table<CUgraph, Graph> graphs;
    Table<CUgraphExec, GraphExec> execs;
    Table<CUmemoryPool, Pool> pools;
    std::set<std::shared_ptr<Capture>> captures;
    std::map<CUgraphNode, int> node_types;
    uint64_t next_handle = 0x7d0000001000;
    uint64_t next_capture = 1;
    uint64_t launches = 0;
    std::string last_fault;
    std::string trace;
};

State& state();

template <typename Handle>
Handle new_handle() {
    return reinterpret_cast<Handle>(state().next_handle += 64);
}

// Marks the device as lost and reports the fault.
void lose(Device& device, const Fault& fault);

// Adds a line to the trace.
void trace(const std::string& line);

}  // namespace kvdouble
