// The scheduler of a block's threads, and the functions in which threads wait.
#include "block.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace kvdouble {

__thread const Thread* current = nullptr;

namespace {

constexpr size_t shared_area_bytes = (max_shared_bytes + 65535) / 65536 * 65536;

__thread Runner* runner = nullptr;

// Mixes a number's bits, so that similar numbers give very different results.
uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

Runner::Runner() : fibres_([] { runner->serve(); }) {
    void* area = mmap(nullptr, shared_area_bytes + guard_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED || mprotect(area, shared_area_bytes, PROT_READ | PROT_WRITE) != 0) {
        std::fputs("test double: no memory for shared memory\n", stderr);
        std::abort();
    }
    shared_area_ = static_cast<unsigned char*>(area);
}

Runner::~Runner() { munmap(shared_area_, shared_area_bytes + guard_bytes); }

Fault Runner::run(const Launch& launch, uint64_t seed) {
    launch_ = &launch;
    seed_ = mixed(seed);
    threads_ = launch.block.x * launch.block.y * launch.block.z;
    group_.block_size = launch.block;
    group_.grid_size = launch.grid;
    place_shared(launch.shared_bytes);
    if (lanes_.size() < threads_) lanes_.resize(threads_);
    for (unsigned i = 0; i < threads_; i++) {
        const unsigned x = i % launch.block.x;
        const unsigned y = i / launch.block.x % launch.block.y;
        const unsigned z = i / launch.block.x / launch.block.y;
        lanes_[i].thread = {{x, y, z}, i, &group_};
    }
    runner = this;
    running_ = nullptr;
    Fault fault = guarded([](void* self) { static_cast<Runner*>(self)->run_blocks(); }, this);
    if (fault.code != CUDA_SUCCESS) {
        if (fault.by_signal && fibres_.in_guard(fault.address)) fault.text = "overflow of a thread's stack";
        const auto* address = static_cast<const unsigned char*>(fault.address);
        if (address != nullptr && address >= group_.shared + group_.shared_bytes &&
            address < shared_area_ + shared_area_bytes + guard_bytes && address >= shared_area_) {
            fault.text += " behind the end of shared memory";
        }
        char where[192];
        const Index block = group_.block;
        const Index thread = running_ != nullptr ? running_->thread.index : Index{0, 0, 0};
        std::snprintf(where, sizeof where, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ", launch.kernel->name,
                      block.x, block.y, block.z, thread.x, thread.y, thread.z);
        fault.text.insert(0, where);
        fibres_.reset();
    }
    current = nullptr;
    return fault;
}

// Places the shared memory so that its end, rounded up to 16 bytes, is at the guard page.
void Runner::place_shared(size_t bytes) {
    const size_t rounded = (bytes + 15) / 16 * 16;
    group_.shared = shared_area_ + shared_area_bytes - rounded;
    group_.shared_bytes = rounded;
}

// Runs the blocks in steps of a size that is coprime to their number, so that each block runs once.
void Runner::run_blocks() {
    const uint64_t count = static_cast<uint64_t>(launch_->grid.x) * launch_->grid.y * launch_->grid.z;
    uint64_t step = seed_ % count | 1;
    while (std::gcd(step, count) != 1) step += 2;
    uint64_t at = mixed(seed_) % count;
    for (uint64_t i = 0; i < count; i++, at = (at + step) % count) {
        group_.block = {static_cast<unsigned>(at % launch_->grid.x),
                        static_cast<unsigned>(at / launch_->grid.x % launch_->grid.y),
                        static_cast<unsigned>(at / launch_->grid.x / launch_->grid.y)};
        run_block(mixed(seed_ + at));
    }
}

// Runs the threads in phases; a phase ends when all live threads wait at the block's barrier. The order of
// the threads changes from phase to phase: forward, reversed, or with shuffled warps and lanes in either
// order.
void Runner::run_block(uint64_t seed) {
    if (group_.shared_bytes != 0) std::memset(group_.shared, 0xff, group_.shared_bytes);
    for (unsigned i = 0; i < threads_; i++) {
        lanes_[i].status = Status::fresh;
        lanes_[i].copies.clear();
        lanes_[i].groups.clear();
    }
    const unsigned warps = (threads_ + 31) / 32;
    order_.resize(warps);
    for (uint64_t phase = 0;; phase++) {
        const uint64_t random = mixed(seed + phase);
        const unsigned mode = (seed + phase) % 4;
        for (unsigned w = 0; w < warps; w++) order_[w] = mode == 1 ? warps - 1 - w : w;
        if (mode >= 2) {
            for (unsigned w = warps - 1; w > 0; w--) std::swap(order_[w], order_[mixed(random + w) % (w + 1)]);
        }
        const bool reversed = mode == 1 || mode == 3;
        for (unsigned w = 0; w < warps; w++) run_warp(order_[w], reversed);
        check_barrier();
        bool live = false;
        for (unsigned i = 0; i < threads_; i++) {
            if (lanes_[i].status != Status::at_barrier) continue;
            lanes_[i].status = Status::ready;
            live = true;
        }
        if (!live) return;
    }
}

// Runs the lanes of a warp until each is done or waits at the block's barrier.
void Runner::run_warp(unsigned warp, bool reversed) {
    const unsigned first = warp * 32;
    const unsigned count = threads_ - first < 32 ? threads_ - first : 32;
    do {
        for (unsigned i = 0; i < count; i++) {
            Lane& lane = lanes_[first + (reversed ? count - 1 - i : i)];
            if (lane.status == Status::fresh || lane.status == Status::ready) run_lane(lane);
        }
    } while (finish_collectives(first, count));
}

void Runner::run_lane(Lane& lane) {
    if (lane.status == Status::fresh) {
        lane.fibre = fibres_.take();
        if (lane.fibre == nullptr) raise_fault(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "no memory for a stack");
    }
    running_ = &lane;
    current = &lane.thread;
    kv_double_switch(&scheduler_, lane.fibre->sp);
    if (lane.status == Status::done) fibres_.give(lane.fibre);
}

// Finishes the collectives at which all lanes have arrived. Returns false if no lane of the warp waits for
// one.
bool Runner::finish_collectives(unsigned first, unsigned count) {
    Request* requests[32] = {};
    unsigned waiting = 0;
    for (unsigned l = 0; l < count; l++) {
        if (lanes_[first + l].status != Status::in_warp) continue;
        requests[l] = lanes_[first + l].request;
        waiting |= 1u << l;
    }
    if (waiting == 0) return false;
    bool finished = false;
    for (unsigned l = 0; l < count; l++) {
        if ((waiting >> l & 1) == 0) continue;
        const Request& request = *requests[l];
        const unsigned mask = request.mask;
        if ((mask & ~waiting) != 0) continue;
        bool same = true;
        for (unsigned k = 0; k < 32 && same; k++) {
            if ((mask >> k & 1) == 0) continue;
            const Request& other = *requests[k];
            same = other.mask == mask && other.kind == request.kind && other.line == request.line &&
                   other.variant == request.variant;
        }
        if (!same) continue;
        running_ = &lanes_[first + l];
        compute_collective(requests, mask, group_);
        for (unsigned k = 0; k < count; k++) {
            if (mask >> k & 1) lanes_[first + k].status = Status::ready;
        }
        waiting &= ~mask;
        finished = true;
    }
    if (finished) return true;
    // No other lane can arrive: report the first waiting lane, and what one of the lanes that it waits for is
    // doing.
    const auto stuck = static_cast<unsigned>(__builtin_ctz(waiting));
    running_ = &lanes_[first + stuck];
    for (unsigned k = 0; k < 32; k++) {
        if ((requests[stuck]->mask >> k & 1) == 0) continue;
        const char* what = nullptr;
        int line = 0;
        if (k >= count) {
            what = "does not exist";
        } else if (const Lane& lane = lanes_[first + k]; lane.status == Status::done) {
            what = "has exited";
        } else if (lane.status == Status::at_barrier) {
            what = "waits at __syncthreads in line";
            line = lane.line;
        } else if (lane.request->line != requests[stuck]->line || lane.request->kind != requests[stuck]->kind ||
                   lane.request->mask != requests[stuck]->mask) {
            what = "waits at another collective or with another mask in line";
            line = lane.request->line;
        }
        if (what == nullptr) continue;
        char text[256];
        std::snprintf(text, sizeof text,
                      "divergent barrier: a collective of the warp in line %d waits for lane %u, which %s",
                      requests[stuck]->line, k, what);
        const size_t length = std::strlen(text);
        if (line != 0) std::snprintf(text + length, sizeof text - length, " %d", line);
        raise_fault(CUDA_ERROR_LAUNCH_FAILED, text);
    }
    raise_fault(CUDA_ERROR_LAUNCH_FAILED, "divergent barrier: lanes of a warp wait for different collectives");
}

// Checks that all live threads, which wait at the end of a phase, wait at the same barrier.
void Runner::check_barrier() const {
    int line = 0;
    for (unsigned i = 0; i < threads_; i++) {
        if (lanes_[i].status != Status::at_barrier) continue;
        if (line == 0) line = lanes_[i].line;
        if (lanes_[i].line == line) continue;
        char text[160];
        std::snprintf(text, sizeof text,
                      "divergent barrier: thread %u waits at __syncthreads in line %d, others in line %d", i,
                      lanes_[i].line, line);
        raise_fault(CUDA_ERROR_LAUNCH_FAILED, text);
    }
}

// Switches from the running thread back to the scheduler.
void Runner::leave() { kv_double_switch(&running_->fibre->sp, scheduler_); }

// A fibre's main function, which runs one thread after another.
void Runner::serve() {
    for (;;) {
        launch_->kernel->run(launch_->arguments.get());
        running_->status = Status::done;
        leave();
    }
}

void block_barrier(int line) {
    Lane& lane = runner->running();
    lane.line = line;
    lane.status = Status::at_barrier;
    runner->leave();
}

void collective(Request& request) {
    Lane& lane = runner->running();
    if ((request.mask >> (lane.thread.number % 32) & 1) == 0) {
        raise_fault(CUDA_ERROR_LAUNCH_FAILED, "a lane calls a collective whose mask does not name it");
    }
    lane.request = &request;
    lane.status = Status::in_warp;
    runner->leave();
}

void copy_async(void* shared, const void* global, bool valid) {
    auto* to = static_cast<unsigned char*>(shared);
    const Group& group = runner->group();
    if (to < group.shared || to + 16 > group.shared + group.shared_bytes) {
        raise_fault(CUDA_ERROR_INVALID_ADDRESS_SPACE, "cp_async16 writes outside shared memory", shared);
    }
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) {
        raise_fault(CUDA_ERROR_MISALIGNED_ADDRESS, "cp_async16 with an address that is no multiple of 16", global);
    }
    std::memset(to, 0xff, 16);
    runner->running().copies.push_back({to, global, valid});
}

void commit_copies() {
    Lane& lane = runner->running();
    lane.groups.push_back(lane.copies.size());
}

void wait_copies(unsigned newest) {
    Lane& lane = runner->running();
    if (lane.groups.size() <= newest) return;
    const size_t groups = lane.groups.size() - newest;
    const size_t copies = lane.groups[groups - 1];
    for (size_t i = 0; i < copies; i++) {
        const PendingCopy& copy = lane.copies[i];
        if (copy.valid) {
            std::memcpy(copy.shared, copy.global, 16);
        } else {
            std::memset(copy.shared, 0, 16);
        }
    }
    lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<ptrdiff_t>(copies));
    lane.groups.erase(lane.groups.begin(), lane.groups.begin() + static_cast<ptrdiff_t>(groups));
    for (size_t& end : lane.groups) end -= copies;
}

void trap() { raise_fault(CUDA_ERROR_LAUNCH_FAILED, "__trap()"); }

}  // namespace kvdouble
