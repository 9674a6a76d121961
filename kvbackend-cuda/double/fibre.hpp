// Fibres: stacks of their own that a worker switches between without the operating system.
//
// A fibre is used again and again: its main function runs one thread of a kernel after the other. A fibre that a
// fault left in the middle of a kernel is prepared again before its next use.
#pragma once

#include <cstddef>
#include <vector>

namespace kvdouble {

// The size of inaccessible memory after stacks and shared memory: a multiple of every page size in use.
constexpr size_t guard_bytes = 65536;

struct Fibre {
    void* sp = nullptr;
    unsigned char* area = nullptr;  // A guard and the stack above it, which has at least 64 KiB.
    unsigned char* top = nullptr;
};

// Saves the registers of the caller on its stack, stores its stack pointer in `*from`, and goes on at `to`.
extern "C" __attribute__((visibility("hidden"))) void kv_double_switch(void** from, void* to);

// The fibres of one worker. The stacks are mapped when they are first needed and unmapped with the pool.
class Fibres {
public:
    explicit Fibres(void (*entry)()) : entry_(entry) {}
    ~Fibres();
    Fibres(const Fibres&) = delete;
    Fibres& operator=(const Fibres&) = delete;

    // Returns a fibre that no thread of a kernel uses, or null when there is no memory for one.
    Fibre* take() {
        if (free_.empty() && !grow()) return nullptr;
        Fibre* fibre = free_.back();
        free_.pop_back();
        return fibre;
    }

    // Takes back a fibre that waits in its main function.
    void give(Fibre* fibre) { free_.push_back(fibre); }

    // Prepares all fibres again, whatever they were doing.
    void reset();

    // Whether the address lies in the guard page of one of the stacks.
    bool in_guard(const void* address) const;

private:
    bool grow();
    void prepare(Fibre& fibre);

    void (*entry_)();
    std::vector<Fibre*> all_;
    std::vector<Fibre*> free_;
};

}  // namespace kvdouble
