// Functions that a running thread of a kernel calls: barriers, collectives of a warp, asynchronous copies, traps.
//
// The collectives of a warp give the scheduler a request and stop; when all lanes of the mask have given one, the
// scheduler computes the results of all of them and lets them go on. `line` is the source line of the call: lanes
// that wait at different lines wait at different places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdouble {

struct Index {
    unsigned x, y, z;
};

// State that all threads of the running block share.
struct Group {
    Index block;
    Index block_size;
    Index grid_size;
    unsigned char* shared;
    size_t shared_bytes;
};

struct Thread {
    Index index;
    unsigned number;  // Within the block, x fastest.
    const Group* group;
};

// The thread that the calling worker runs.
extern __thread const Thread* current __attribute__((tls_model("initial-exec"), visibility("hidden")));

enum class Collective : int { sync, shuffle, ballot, load_matrices, multiply_bf16, multiply_f16 };

struct Request {
    Collective kind;
    unsigned mask;
    int line;
    int variant = 0;  // For load_matrices: the number of matrices, negative if transposed.
    uint64_t value = 0;
    unsigned source = 0;  // For shuffle: the lane whose value is the result.
    const void* row = nullptr;
    float* sum = nullptr;
    const uint32_t* left = nullptr;
    const uint32_t* right = nullptr;
    uint32_t* matrices = nullptr;
    uint64_t result = 0;
};

// Waits for all live threads of the block.
void block_barrier(int line);

// Waits for the lanes of the request's mask and leaves its result in it.
void collective(Request& request);

// Remembers a copy of 16 bytes; the shared memory holds poison until the copy's group is waited for.
void copy_async(void* shared, const void* global, bool valid);
void commit_copies();
void wait_copies(unsigned newest);

// Ends the kernel as the trap instruction does.
[[noreturn]] void trap();

// A kernel of the library, registered by its name when the library is loaded.
struct Kernel {
    const char* name;
    void (*run)(const void* arguments);
    size_t argument_bytes;
    size_t argument_alignment;
    unsigned threads;
    const Kernel* next;

    Kernel(const char* name, void (*run)(const void*), size_t bytes, size_t alignment, unsigned threads);
};

}  // namespace kvdouble
