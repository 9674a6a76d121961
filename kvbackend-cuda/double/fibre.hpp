// Fibres: separate stacks between which a worker switches without the operating system.
//
// Fibres are reused: a fibre's main function runs one kernel thread after another. A fibre that a fault left
// in the middle of a kernel is reset before its next use.
#pragma once

#include <cstddef>
#include <vector>

namespace kvdouble {

// The size of the inaccessible memory after stacks and shared memory, a multiple of every common page size.
constexpr size_t guard_bytes = 65536;

struct Fibre {
    void* sp = nullptr;
    unsigned char* area = nullptr;  // A guard and the stack above it, which has at least 64 KiB.
    unsigned char* top = nullptr;
};

// Saves the caller's registers on its stack, stores its stack pointer in `*from`, and continues on the stack
// `to`.
extern "C" __attribute__((visibility("hidden"))) void kv_double_switch(void** from, void* to);

// A worker's pool of fibres. Their stacks are mapped when they are first needed, and unmapped with the pool.
class Fibres {
public:
    explicit Fibres(void (*entry)()) : entry_(entry) {}
    ~Fibres();
    Fibres(const Fibres&) = delete;
    Fibres& operator=(const Fibres&) = delete;

    // Returns an unused fibre, or null if there is no memory for one.
    Fibre* take() {
        if (free_.empty() && !grow()) return nullptr;
        Fibre* fibre = free_.back();
        free_.pop_back();
        return fibre;
    }

    // Returns a fibre to the pool. It must be waiting in its main function.
    void give(Fibre* fibre) { free_.push_back(fibre); }

    // Resets all fibres, even in the middle of a kernel.
    void reset();

    // Returns whether an address is in the guard page of a stack.
    bool in_guard(const void* address) const;

private:
    bool grow();
    void prepare(Fibre& fibre);

    void (*entry_)();
    std::vector<Fibre*> all_;
    std::vector<Fibre*> free_;
};

}  // namespace kvdouble
