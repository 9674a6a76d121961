// The context switch for x86-64 and aarch64, and the fibres' stacks.
#include "fibre.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

namespace kvdouble {

namespace {
// The tops of stacks are at different cache-line offsets, and the stacks have an odd number of pages, so that
// a block's stacks do not evict each other from caches.
constexpr size_t colour_step = 320;
constexpr size_t colours = 50;
constexpr size_t stack_bytes = 65536 + 5 * 4096;
constexpr size_t area_bytes = guard_bytes + stack_bytes;
}  // namespace

#if defined(__x86_64__)
// The frame is r15, r14, r13, r12, rbx, rbp and the return address, from low to high.
asm(R"(
    .text
    .globl kv_double_switch
    .hidden kv_double_switch
    .type kv_double_switch, @function
kv_double_switch:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
    .size kv_double_switch, .-kv_double_switch
)");

void Fibres::prepare(Fibre& fibre) {
    auto* top = reinterpret_cast<void**>(fibre.top);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(entry_);
    for (int i = 3; i <= 8; i++) top[-i] = nullptr;
    fibre.sp = top - 8;
}
#elif defined(__aarch64__)
// The frame is x19 to x30 and d8 to d15, from low to high. The switch returns to x30.
asm(R"(
    .text
    .globl kv_double_switch
    .hidden kv_double_switch
    .type kv_double_switch, %function
kv_double_switch:
    hint #34
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size kv_double_switch, .-kv_double_switch
)");

void Fibres::prepare(Fibre& fibre) {
    auto* frame = reinterpret_cast<void**>(fibre.top - 160);
    std::memset(frame, 0, 160);
    frame[11] = reinterpret_cast<void*>(entry_);
    fibre.sp = frame;
}
#else
#error "the double's fibres are written for x86-64 and aarch64"
#endif

bool Fibres::grow() {
    void* area = mmap(nullptr, area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return false;
    auto* bytes = static_cast<unsigned char*>(area);
    if (mprotect(bytes + guard_bytes, stack_bytes, PROT_READ | PROT_WRITE) != 0) {
        munmap(area, area_bytes);
        return false;
    }
    auto* fibre = new Fibre;
    fibre->area = bytes;
    fibre->top = bytes + guard_bytes + stack_bytes - all_.size() % colours * colour_step;
    prepare(*fibre);
    all_.push_back(fibre);
    free_.push_back(fibre);
    return true;
}

void Fibres::reset() {
    free_ = all_;
    for (Fibre* fibre : all_) prepare(*fibre);
}

bool Fibres::in_guard(const void* address) const {
    const auto* bytes = static_cast<const unsigned char*>(address);
    for (const Fibre* fibre : all_) {
        if (bytes >= fibre->area && bytes < fibre->area + guard_bytes) return true;
    }
    return false;
}

Fibres::~Fibres() {
    for (Fibre* fibre : all_) {
        munmap(fibre->area, area_bytes);
        delete fibre;
    }
}

}  // namespace kvdouble
