// Functions that a running kernel thread calls: barriers, warp collectives, asynchronous copies, traps.
//
// A warp collective passes a request to the scheduler and stops the lane. When all lanes of the mask have
// passed a request, the scheduler computes the results and resumes the lanes. `line` is the source line of
// the call: lanes at different lines wait for different collectives.
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

// The kernel thread that the calling worker is running.
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

// Waits for all live threads of the block to arrive.
void block_barrier(int line);

// Waits for the lanes of the request's mask, and stores the result in the request.
void collective(Request& request);

// Records a copy of 16 bytes. The shared memory contains poison until the wait for the copy's group.
void copy_async(void* shared, const void* global, bool valid);
void commit_copies();
void wait_copies(unsigned newest);

// Ends the kernel like the trap instruction.
[[noreturn]] void trap();

// A kernel in the library, which is registered by its name when the library is loaded.
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
