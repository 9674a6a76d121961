// The types and constants of NCCL's ABI that the double implements, and the objects that its handles refer
// to.
#pragma once

#include <array>

#include "state.hpp"

namespace kvdouble {

using NcclResult = int;
enum : NcclResult {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
};
enum : int { NCCL_INT8 = 0, NCCL_UINT8 = 1, NCCL_FLOAT16 = 6, NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9 };
enum : int { NCCL_SUM = 0, NCCL_MAX = 2, NCCL_MIN = 3 };

struct NcclUniqueId {
    std::array<char, 128> bytes;
};

// The configuration with the fields of version 2.18. `size` is the size of the caller's struct.
struct NcclConfig {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cluster, least_blocks, most_blocks;
    const char* net;
    int share;
};
constexpr unsigned NCCL_MAGIC = 0xcafebeef;

struct NcclComm;

// The memory that a rank contributes to a meeting or sends.
struct Piece {
    uintptr_t from = 0, to = 0;
    size_t bytes = 0;
};

// A collective of all ranks. All ranks must make the same call.
struct Meeting {
    std::string call;
    std::vector<Piece> pieces;  // By rank.
    size_t came = 0;
    bool done = false;
};

// Bytes that a rank sends, kept until the receiver has taken them.
struct Mail {
    Piece piece;
    bool taken = false;
};

struct NcclGroup {
    std::vector<std::shared_ptr<NcclComm>> ranks;  // Null before the rank has joined.
    size_t joined = 0, left = 0;
    NcclResult error = NCCL_SUCCESS;  // What every rank learns.
    std::string reason;
    std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Mail>>> mail;
};

struct NcclComm {
    Device* device = nullptr;
    std::shared_ptr<NcclGroup> group;
    int rank = 0;
    bool aborted = false, finalised = false;
    uint64_t meetings = 0;  // Calls of collectives so far.
    unsigned outstanding = 0;
    // The requested work that is not yet on its stream, and the number of queries until it is.
    std::vector<std::pair<std::shared_ptr<Stream>, std::function<Fault()>>> asked;
    unsigned questions = 0;
};

// Returns the number of handles on a device.
int live_comms(const Device& device);

// Removes the handles of a device whose context is destroyed.
void drop_comms(const Device& device);

}  // namespace kvdouble
