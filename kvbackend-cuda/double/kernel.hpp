// Kernel sources include this file when the host's compiler compiles them for the double (with KV_DOUBLE).
//
// The names have the same meaning as in CUDA and in the CUDA part of device.cuh. There is no `__shared__`;
// kernels use kv_shared(). Sources with `#pragma unroll` need -Wno-unknown-pragmas. A thread that spins until
// another thread writes never ends, because threads of a block run one after another, from barrier to
// barrier.
#pragma once

#include <math.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.hpp"
#include "runtime.hpp"
#include "vectors.hpp"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (::kvdouble::current->index)
#define blockIdx (::kvdouble::current->group->block)
#define blockDim (::kvdouble::current->group->block_size)
#define gridDim (::kvdouble::current->group->grid_size)
constexpr int warpSize = 32;

// Defines the kernel `name` with the argument `args` of type `Args`, for blocks of at most `threads` threads.
// Two kernels with the same name cause a link error.
#define KV_KERNEL(name, Args, threads) KV_KERNEL_EXPANDED(name, Args, threads)
#define KV_KERNEL_EXPANDED(name, Args, threads)                                                                        \
    static void name(const Args& args);                                                                                \
    extern "C" __attribute__((visibility("hidden"))) const ::kvdouble::Kernel kv_registered_##name(                    \
        #name, [](const void* arguments) { name(*static_cast<const Args*>(arguments)); }, sizeof(Args), alignof(Args), \
        threads);                                                                                                      \
    static void name([[maybe_unused]] const Args& args)

inline unsigned char* kv_shared() { return kvdouble::current->group->shared; }

inline void __syncthreads(int line = __builtin_LINE()) { kvdouble::block_barrier(line); }

inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    kvdouble::Request request{kvdouble::Collective::sync, mask, line};
    kvdouble::collective(request);
}

namespace kvdouble {

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, int line) {
    static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
    Request request{Collective::shuffle, mask, line};
    std::memcpy(&request.value, &value, sizeof value);
    request.source = source;
    collective(request);
    T result;
    std::memcpy(&result, &request.result, sizeof result);
    return result;
}

inline unsigned lane() { return current->number % 32; }

inline uint64_t ballot(unsigned mask, bool predicate, int line) {
    Request request{Collective::ballot, mask, line};
    request.value = predicate;
    collective(request);
    return request.result;
}

template <typename T>
T fetch_add(T* address, T value) {
    if constexpr (std::is_floating_point_v<T>) {
        return std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
    } else {
        return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
    }
}

inline void load_matrices(uint32_t* registers, const void* row, int variant, int line) {
    Request request{Collective::load_matrices, ~0u, line, variant};
    request.row = row;
    request.matrices = registers;
    collective(request);
}

inline void multiply(Collective kind, float* sum, const uint32_t* left, const uint32_t* right, int line) {
    Request request{kind, ~0u, line};
    request.sum = sum;
    request.left = left;
    request.right = right;
    collective(request);
}

}  // namespace kvdouble

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = kvdouble::lane(), segment = static_cast<unsigned>(width);
    return kvdouble::shuffle(mask, value, (lane & ~(segment - 1)) | (static_cast<unsigned>(source) & (segment - 1)),
                             line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = kvdouble::lane(), segment = static_cast<unsigned>(width);
    const unsigned source = lane ^ static_cast<unsigned>(lanes);
    return kvdouble::shuffle(mask, value, source > (lane | (segment - 1)) ? lane : source, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = kvdouble::lane(), segment = static_cast<unsigned>(width);
    const bool inside = delta < segment && (lane & (segment - 1)) + delta < segment;
    return kvdouble::shuffle(mask, value, inside ? lane + delta : lane, line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    const unsigned lane = kvdouble::lane(), segment = static_cast<unsigned>(width);
    return kvdouble::shuffle(mask, value, (lane & (segment - 1)) >= delta ? lane - delta : lane, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return static_cast<unsigned>(kvdouble::ballot(mask, predicate != 0, line));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return kvdouble::ballot(mask, predicate != 0, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return kvdouble::ballot(mask, predicate != 0, line) == mask;
}

template <typename T>
T __ldg(const T* address) {
    return *address;
}

// The device's approximate functions are replaced by the exact ones.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __fdividef(x, y) ((x) / (y))
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }

#define KV_MIN_MAX(type)                                      \
    inline type min(type x, type y) { return y < x ? y : x; } \
    inline type max(type x, type y) { return x < y ? y : x; }
KV_MIN_MAX(int)
KV_MIN_MAX(unsigned)
KV_MIN_MAX(long)
KV_MIN_MAX(unsigned long)
KV_MIN_MAX(long long)
KV_MIN_MAX(unsigned long long)
#undef KV_MIN_MAX
inline unsigned min(int x, unsigned y) { return min(static_cast<unsigned>(x), y); }
inline unsigned min(unsigned x, int y) { return min(x, static_cast<unsigned>(y)); }
inline unsigned max(int x, unsigned y) { return max(static_cast<unsigned>(x), y); }
inline unsigned max(unsigned x, int y) { return max(x, static_cast<unsigned>(y)); }
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>((static_cast<unsigned long long>(x) * y) >> 32);
}

inline float atomicAdd(float* address, float value) { return kvdouble::fetch_add(address, value); }
inline int atomicAdd(int* address, int value) { return kvdouble::fetch_add(address, value); }
inline unsigned atomicAdd(unsigned* address, unsigned value) { return kvdouble::fetch_add(address, value); }
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return kvdouble::fetch_add(address, value);
}

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
[[noreturn]] inline void __trap() { kvdouble::trap(); }

// The shared memory contains poison from this call until the wait for the copy's group.
inline void cp_async16(void* shared, const void* global) { kvdouble::copy_async(shared, global, true); }
inline void cp_async16_zfill(void* shared, const void* global, bool valid) {
    kvdouble::copy_async(shared, global, valid);
}
inline void cp_async_commit() { kvdouble::commit_copies(); }
template <int N>
void cp_async_wait() {
    static_assert(N >= 0);
    kvdouble::wait_copies(N);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
    kvdouble::load_matrices(r, row, 4, line);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, int line = __builtin_LINE()) {
    kvdouble::load_matrices(r, row, 2, line);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
    kvdouble::load_matrices(r, row, -4, line);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, int line = __builtin_LINE()) {
    kvdouble::load_matrices(r, row, -2, line);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line = __builtin_LINE()) {
    kvdouble::multiply(kvdouble::Collective::multiply_bf16, d, a, b, line);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int line = __builtin_LINE()) {
    kvdouble::multiply(kvdouble::Collective::multiply_f16, d, a, b, line);
}
