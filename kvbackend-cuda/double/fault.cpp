// Handles signals that guarded work raises on workers, by jumping out of the work.
#undef _FORTIFY_SOURCE  // Its check of longjmp knows nothing of fibres.
#include "fault.hpp"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace kvdouble {

namespace {

constexpr size_t signal_stack_bytes = 65536;
constexpr int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};

struct Guard {
    sigjmp_buf environment;
    int signal = 0;
    CUresult code = CUDA_SUCCESS;
    const void* address = nullptr;
    char text[384] = {};
};

__thread Guard* active = nullptr;
__thread void* signal_stack = nullptr;
struct sigaction previous[NSIG];

// Jumps out of guarded work that faults. Passes all other signals to the previous handler.
void handle(int signal, siginfo_t* info, void* context) {
    if (Guard* guard = active; guard != nullptr) {
        active = nullptr;
        guard->signal = signal;
        guard->address = info->si_addr;
        siglongjmp(guard->environment, 1);
    }
    const struct sigaction& before = previous[signal];
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        // After this returns, the instruction runs again, and now causes the default action.
        ::signal(signal, SIG_DFL);
    } else {
        before.sa_handler(signal);
    }
}

void install_handlers() {
    struct sigaction action;
    std::memset(&action, 0, sizeof action);
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    for (int signal : signals) sigaction(signal, &action, &previous[signal]);
}

const char* signal_text(int signal) {
    switch (signal) {
        case SIGSEGV:
        case SIGBUS: return "access to memory that is not there";
        case SIGFPE: return "integer division by zero or overflow of a division";
        default: return "trap of the compiler's checks (alignment or bounds)";
    }
}

}  // namespace

void prepare_worker_for_faults() {
    static std::once_flag once;
    std::call_once(once, install_handlers);
    void* memory = mmap(nullptr, signal_stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        std::fputs("test double: no memory for a signal stack\n", stderr);
        std::abort();
    }
    signal_stack = memory;
    stack_t stack = {};
    stack.ss_sp = memory;
    stack.ss_size = signal_stack_bytes;
    sigaltstack(&stack, nullptr);
}

void release_worker_from_faults() {
    stack_t stack = {};
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, nullptr);
    munmap(signal_stack, signal_stack_bytes);
    signal_stack = nullptr;
}

Fault guarded(void (*body)(void*), void* argument) {
    Guard guard;
    Fault fault;
    if (sigsetjmp(guard.environment, 0) == 0) {
        active = &guard;
        body(argument);
        active = nullptr;
        return fault;
    }
    const bool memory = guard.signal == SIGSEGV || guard.signal == SIGBUS;
    if (memory || guard.signal == 0) fault.address = guard.address;
    if (guard.signal != 0) {
        fault.by_signal = memory;
        fault.code = memory ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED;
        fault.text = signal_text(guard.signal);
    } else {
        fault.code = guard.code;
        fault.text = guard.text;
    }
    return fault;
}

void raise_fault(CUresult code, const char* text, const void* address) {
    Guard* guard = active;
    if (guard == nullptr) {
        std::fprintf(stderr, "test double: a function of kernels was called outside a kernel: %s\n", text);
        std::abort();
    }
    active = nullptr;
    guard->code = code;
    guard->address = address;
    std::snprintf(guard->text, sizeof guard->text, "%s", text);
    siglongjmp(guard->environment, 1);
}

}  // namespace kvdouble
