// What all kernels need from the device: kernel definitions, shared memory, asynchronous copies, matrix
// instructions, and conversions of elements.
//
// nvcc compiles these sources for the device and, with KV_DOUBLE, the host's compiler compiles them for the
// driver library's test double. In that case, `kernel.hpp` defines the same names with the same meaning.
//
// A kernel takes one struct by value and uses only dynamic shared memory, so that the double can give it
// poisoned memory surrounded by guards.
#pragma once

#ifdef KV_DOUBLE
#include "kernel.hpp"
#else

#ifdef __CUDACC_RTC__
// NVRTC, which compiles at run time, has no system headers.
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

// Defines the kernel `name` with the argument `args` of type `Args`, for blocks of at most `threads` threads.
#define KV_KERNEL(name, Args, threads) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Args args)

extern __shared__ __align__(128) unsigned char kv_shared_memory[];

// Returns the block's shared memory. Its size is set at launch.
__device__ __forceinline__ unsigned char* kv_shared() { return kv_shared_memory; }

__device__ __forceinline__ uint32_t kv_shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory without waiting. Both addresses must be multiples of 16 bytes.
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(kv_shared_address(shared)), "l"(global));
}

// Copies 16 bytes like cp_async16. If `valid` is false, writes zeros instead, and reads nothing.
__device__ __forceinline__ void cp_async16_zfill(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(kv_shared_address(shared)), "l"(global),
                 "r"(bytes));
}

// Commits the copies that were started since the last commit as a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most the `N` newest copy groups of this thread are unfinished.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

// Loads four matrices of 8 rows of 16 bytes. Lane l of the warp passes row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kv_shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(kv_shared_address(row)));
}

// Loads four matrices like ldmatrix_x4, but transposes each of them.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kv_shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(kv_shared_address(row)));
}

// Adds the product of a 16x16 and a 16x8 bf16 matrix to a 16x8 f32 matrix, as fragments of mma.m16n8k16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Conversions of elements, rounded to nearest even. They use PTX instructions instead of CUDA's headers, so
// that only a compiler is needed.
__device__ __forceinline__ float f16_to_f32(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ uint16_t f32_to_f16(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float bf16_to_f32(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
__device__ __forceinline__ uint16_t f32_to_bf16(float x) {
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Packs two elements into a word, with the first one in the low half.
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 unpack_f16x2(uint32_t pair) {
    return make_float2(f16_to_f32(static_cast<uint16_t>(pair)), f16_to_f32(static_cast<uint16_t>(pair >> 16)));
}
__device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

#endif
