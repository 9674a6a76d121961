// Runs a launch's blocks on the calling worker: the order of blocks and threads, barriers, and shared memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fault.hpp"
#include "fibre.hpp"
#include "runtime.hpp"

namespace kvdouble {

constexpr size_t max_shared_bytes = 227 * 1024;

struct Launch {
    const Kernel* kernel;
    Index grid;
    Index block;
    size_t shared_bytes;
    std::shared_ptr<void> arguments;
};

// A copy to shared memory that has not been waited for.
struct PendingCopy {
    unsigned char* shared;
    const void* global;
    bool valid;
};

enum class Status : unsigned char { fresh, ready, at_barrier, in_warp, done };

struct Lane {
    Thread thread;
    Status status = Status::fresh;
    Fibre* fibre = nullptr;
    int line = 0;
    Request* request = nullptr;
    std::vector<PendingCopy> copies;
    std::vector<size_t> groups;  // The number of copies at each commit.
};

// The resources with which a worker runs kernels. The worker keeps them between launches.
class Runner {
public:
    Runner();
    ~Runner();
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    // Runs the blocks, up to the first fault. `seed` determines the order of blocks and threads.
    Fault run(const Launch& launch, uint64_t seed);

    Lane& running() { return *running_; }
    void leave();
    [[noreturn]] void serve();
    const Group& group() const { return group_; }

private:
    void run_blocks();
    void run_block(uint64_t seed);
    void run_warp(unsigned warp, bool reversed);
    void run_lane(Lane& lane);
    bool finish_collectives(unsigned first, unsigned count);
    void check_barrier() const;
    void place_shared(size_t bytes);

    Fibres fibres_;
    std::vector<Lane> lanes_;
    std::vector<unsigned> order_;
    Group group_{};
    const Launch* launch_ = nullptr;
    uint64_t seed_ = 0;
    unsigned threads_ = 0;
    Lane* running_ = nullptr;
    void* scheduler_ = nullptr;
    unsigned char* shared_area_ = nullptr;
};

// Computes the results for the requests of a warp's lanes; `requests[l]` is null for a lane without a
// request. All lanes of the mask must have requests of the same kind.
void compute_collective(Request* const (&requests)[32], unsigned mask, const Group& group);

// Returns the registered kernel with this name, or null.
const Kernel* find_kernel(const std::string& name);

}  // namespace kvdouble
