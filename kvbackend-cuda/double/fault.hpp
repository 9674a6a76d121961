// Faults of work: an error in a kernel or copy on a worker becomes an error of the device.
#pragma once

#include <string>

#include "types.hpp"

namespace kvdouble {

// The outcome of a piece of work. Any code except success means that the device is lost.
struct Fault {
    CUresult code = CUDA_SUCCESS;
    std::string text;
    const void* address = nullptr;
    bool by_signal = false;
};

// Prepares the calling worker for faults: installs an alternate signal stack, and the process's handlers.
void prepare_worker_for_faults();

// Frees the calling worker's alternate signal stack.
void release_worker_from_faults();

// Runs `body(argument)` and returns its fault, if there is one. A fault leaves `body` at once without running
// destructors, so `body` must own nothing on its stack.
Fault guarded(void (*body)(void*), void* argument);

// Ends the guarded body that the calling worker is running with a fault.
[[noreturn]] void raise_fault(CUresult code, const char* text, const void* address = nullptr);

}  // namespace kvdouble
