// Faults of work: what goes wrong in a kernel or copy on a worker becomes an error of the device.
#pragma once

#include <string>

#include "types.hpp"

namespace kvdouble {

// The outcome of a piece of work. A code other than success makes the device lost.
struct Fault {
    CUresult code = CUDA_SUCCESS;
    std::string text;
    const void* address = nullptr;
    bool by_signal = false;
};

// Makes the calling worker ready for faults: an alternate stack for signals, and the process's handlers.
void prepare_worker_for_faults();

// Frees the alternate stack of the calling worker.
void release_worker_from_faults();

// Runs `body(argument)` and returns what went wrong in it. A fault leaves `body` at once without running
// destructors, so it owns nothing on its stack.
Fault guarded(void (*body)(void*), void* argument);

// Ends the guarded body that the calling worker runs.
[[noreturn]] void raise_fault(CUresult code, const char* text, const void* address = nullptr);

}  // namespace kvdouble
