// The state of the double, its faults, its trace, and the controls for tests.
#include "control.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "call.hpp"
#include "memory.hpp"
#include "nccl.hpp"

namespace kvdouble {

namespace {

struct Plan {
    int calls_left = 0;
    CUresult code = CUDA_SUCCESS;
};
struct Plans {
    std::mutex lock;
    std::map<std::string, Plan> fail;
    std::set<std::string> ignore;
    std::atomic<bool> any = false;
};
Plans& plans() {
    static auto* all = new Plans;
    return *all;
}

// Returns an entry point's name without its version suffix.
std::string base_name(const char* entry) {
    std::string name = entry;
    const size_t length = name.size();
    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v') name.resize(length - 3);
    return name;
}

bool matches(const std::string& pattern, const std::string& name) {
    if (!pattern.empty() && pattern.back() == '*') return name.starts_with(pattern.substr(0, pattern.size() - 1));
    return pattern == name;
}

constexpr size_t trace_limit = 16 << 20;

}  // namespace

State& state() {
    static auto* all = new State;
    return *all;
}

bool planned(const char* entry, CUresult& result) {
    Plans& all = plans();
    if (!all.any.load(std::memory_order_acquire)) return false;
    const std::string name = base_name(entry);
    std::lock_guard lock(all.lock);
    if (auto at = all.fail.find(name); at != all.fail.end() && --at->second.calls_left == 0) {
        result = at->second.code;
        all.fail.erase(at);
        return true;
    }
    for (const std::string& pattern : all.ignore) {
        if (!matches(pattern, name)) continue;
        result = CUDA_SUCCESS;
        return true;
    }
    return false;
}

void lose(Device& device, const Fault& fault) {
    std::string text = device.name + ": " + fault.text;
    if (fault.address != nullptr) text += "; " + describe(fault.address);
    std::fprintf(stderr, "%s\n", text.c_str());
    state().last_fault = text;
    if (device.error == CUDA_SUCCESS) device.error = fault.code;
    state().progress.notify_all();
}

void trace(const std::string& line) {
    std::string& all = state().trace;
    if (all.size() + line.size() < trace_limit) all += line + "\n";
}

}  // namespace kvdouble

using namespace kvdouble;

KV_API void kv_double_fail(const char* entry, int after, int code) {
    Plans& all = plans();
    std::lock_guard lock(all.lock);
    if (entry == nullptr) {
        all.fail.clear();
        all.ignore.clear();
    } else if (code == 0) {
        all.fail.erase(base_name(entry));
    } else {
        all.fail[base_name(entry)] = {after < 1 ? 1 : after, code};
    }
    all.any = !all.fail.empty() || !all.ignore.empty();
}

KV_API void kv_double_ignore(const char* entry, int on) {
    Plans& all = plans();
    std::lock_guard lock(all.lock);
    if (on != 0) {
        all.ignore.insert(base_name(entry));
    } else {
        all.ignore.erase(base_name(entry));
    }
    all.any = !all.fail.empty() || !all.ignore.empty();
}

KV_API void kv_double_limit(int device, size_t bytes) {
    Call call;
    if (Device* found = device_at(device)) found->limit = bytes;
}

KV_API size_t kv_double_live_bytes(int device) {
    Call call;
    const Device* found = device_at(device);
    if (found == nullptr) return 0;
    size_t bytes = found->used;
    for (const auto& [handle, pool] : state().pools.entries) {
        if (pool->device == found) bytes -= pool->reserved - pool->used;
    }
    return bytes;
}

KV_API int kv_double_live_objects(int device) {
    Call call;
    const Device* found = device_at(device);
    if (found == nullptr) return 0;
    const State& all = state();
    int count = all.streams.count(*found) + all.events.count(*found) + all.modules.count(*found) +
                all.graphs.count(*found) + all.execs.count(*found) + all.pools.count(*found);
    count += live_comms(*found);
    if (found->default_pool != nullptr) count--;
    for (const auto& [base, allocation] : memory().live) count += allocation->device == found;
    for (const auto& [base, reservation] : memory().reservations) count += reservation.device == found;
    for (const auto& [base, mapping] : memory().mappings) count += mapping.physical->device == found;
    for (const auto& [handle, physical] : memory().physical) count += physical->device == found;
    return count;
}

KV_API size_t kv_double_trace(char* buffer, size_t size) {
    Call call;
    std::string& all = state().trace;
    const size_t needed = all.size() + 1;
    if (buffer == nullptr || size < needed) return needed;
    std::memcpy(buffer, all.c_str(), needed);
    all.clear();
    return needed;
}

KV_API const char* kv_double_last_fault(void) {
    static thread_local std::string copy;
    Call call;
    copy = state().last_fault;
    return copy.c_str();
}
