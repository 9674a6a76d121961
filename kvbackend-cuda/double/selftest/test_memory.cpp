// Tests of memory: poison, freed memory, sticky errors, virtual memory, pools, limits.
#include <cmath>
#include <cstring>

#include "test.hpp"

namespace {

constexpr size_t granule = 2 << 20;

CUmemAllocationProp property(int device) {
    CUmemAllocationProp result{};
    result.type = 1;
    result.location = {1, device};
    return result;
}

uint64_t pool_value(CUmemoryPool pool, int attribute) {
    uint64_t value = 0;
    OK(cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

}  // namespace

TEST(memory_is_poisoned) {
    Bench bench(0);
    for (const size_t count : {size_t{7}, size_t{4} << 20}) {
        const float* memory = bench.alloc<float>(count);
        CHECK(Bench::address(memory) % 256 == 0);
        for (const float value : bench.download(memory, count)) CHECK(std::isnan(value));
        OK(cuMemsetD32Async(Bench::address(memory), 0x3f800000, count, bench.stream));
        for (const float value : bench.download(memory, count)) CHECK(value == 1.0f);
        OK(cuMemFree_v2(Bench::address(memory)));
    }
}

TEST(ranges_are_checked) {
    Bench bench(0);
    float* memory = bench.alloc<float>(10);
    const CUdeviceptr at = Bench::address(memory);
    std::vector<float> host(16);
    IS(cuMemcpyHtoDAsync_v2(at, host.data(), 44, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemcpyHtoDAsync_v2(at - 4, host.data(), 8, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemcpyDtoHAsync_v2(host.data(), at + 4, 40, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemcpyDtoHAsync_v2(memory, at, 4, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemcpyDtoDAsync_v2(at, at + 4, 8, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemsetD8Async(at + 8, 0, 40, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemsetD32Async(at + 2, 0, 1, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemFree_v2(at + 4), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(at));
    IS(cuMemFree_v2(at), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemcpyHtoDAsync_v2(at, host.data(), 4, bench.stream), CUDA_ERROR_INVALID_VALUE);
    Bench other(2);
    const float* foreign = other.alloc<float>(4);
    OK(cuCtxSetCurrent(bench.context));
    IS(cuMemcpyDtoHAsync_v2(host.data(), Bench::address(foreign), 4, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(cuMemFree_v2(Bench::address(foreign)), CUDA_ERROR_INVALID_VALUE);
}

TEST(freed_memory_faults_and_the_error_stays) {
    Bench lazy(1);
    Bench eager(0);
    for (const bool kernel : {true, false}) {
        CUcontext context = nullptr;
        OK(cuCtxSetCurrent(lazy.context));
        float* from = lazy.alloc<float>(32);
        float* to = lazy.alloc<float>(32);
        if (kernel) {
            lazy.launch("test_add", 1, 32, 0, VectorArgs{to, from, 32, 1.0f, 0});
        } else {
            OK(cuMemcpyDtoDAsync_v2(Bench::address(to), Bench::address(from), 128, lazy.stream));
        }
        OK(cuMemFree_v2(Bench::address(from)));
        IS(lazy.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
        CHECK(fault_says("in the freed allocation of 128 bytes"));
        CHECK(fault_says(kernel ? "kernel test_add" : "memcpy_dtod of 128 bytes"));
        IS(lazy.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
        IS(cuStreamQuery(lazy.stream), CUDA_ERROR_ILLEGAL_ADDRESS);
        // The other device must still work.
        OK(cuCtxSetCurrent(eager.context));
        float* fine = eager.alloc<float>(32);
        eager.launch("test_slow", 1, 32, 0, VectorArgs{fine, nullptr, 1, 5.0f, 0});
        CHECK(eager.download(fine, 32)[31] == 5.0f);
        // A new context must work, and handles of the old context must be unknown.
        OK(cuCtxSetCurrent(lazy.context));
        const CUstream old = lazy.stream;
        OK(cuDevicePrimaryCtxRelease_v2(1));
        IS(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
        OK(cuDevicePrimaryCtxRetain(&context, 1));
        lazy.context = context;
        OK(cuCtxSetCurrent(context));
        IS(cuStreamSynchronize(old), CUDA_ERROR_INVALID_HANDLE);
        OK(cuStreamCreate(&lazy.stream, 1));
        const std::string text = ".version 8.0\n.target sm_80\n" + ptx_of("test_add", sizeof(VectorArgs));
        OK(cuModuleLoadData(&lazy.module, text.c_str()));
    }
}

TEST(memory_runs_out) {
    Bench bench(2);
    size_t free = 0, total = 0;
    OK(cuMemGetInfo_v2(&free, &total));
    CHECK(free == 64 << 20 && total == free);
    char* most = bench.alloc<char>(63 << 20);
    CUdeviceptr more = 0;
    IS(cuMemAlloc_v2(&more, 2 << 20), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(kv_double_live_bytes(2) == 63 << 20);
    OK(cuMemFree_v2(Bench::address(most)));
    kv_double_limit(2, 1 << 20);
    IS(cuMemAlloc_v2(&more, 2 << 20), CUDA_ERROR_OUT_OF_MEMORY);
    kv_double_limit(2, 64 << 20);
    OK(cuMemAlloc_v2(&more, 2 << 20));
}

TEST(virtual_memory) {
    Bench bench(0);
    const auto prop = property(0);
    size_t least = 0;
    OK(cuMemGetAllocationGranularity(&least, &prop, 0));
    CHECK(least == granule);
    CUdeviceptr base = 0;
    OK(cuMemAddressReserve(&base, 4 * granule, 0, 0, 0));
    CUmemGenericAllocationHandle handles[2];
    const CUmemAccessDesc access{{1, 0}, 3};
    for (int i = 0; i < 2; i++) {
        OK(cuMemCreate(&handles[i], granule, &prop, 0));
        OK(cuMemMap(base + static_cast<unsigned>(i) * granule, granule, 0, handles[i], 0));
    }
    IS(cuMemMap(base, granule, 0, handles[0], 0), CUDA_ERROR_INVALID_VALUE);
    auto* values = reinterpret_cast<float*>(base);
    const VectorArgs args{values, nullptr, 1, 7.0f, 0};
    IS(cuMemsetD8Async(base, 0, 16, bench.stream), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemSetAccess(base, 2 * granule, &access, 1));
    CHECK(std::isnan(bench.download(values, 4)[3]));
    // A fill may cover both mappings, but must not exceed them.
    OK(cuMemsetD8Async(base, 0, 2 * granule, bench.stream));
    IS(cuMemsetD8Async(base, 0, 2 * granule + 1, bench.stream), CUDA_ERROR_INVALID_VALUE);
    bench.launch("test_slow", 1, 32, 0, args);
    OK(bench.sync());
    CHECK(kv_double_live_bytes(0) == 2 * granule);
    // Sleep: the second part is freed; the first part moves and must keep its contents.
    OK(cuMemUnmap(base, 2 * granule));
    OK(cuMemRelease(handles[1]));
    CHECK(kv_double_live_bytes(0) == granule);
    OK(cuMemMap(base + 2 * granule, granule, 0, handles[0], 0));
    OK(cuMemSetAccess(base + 2 * granule, granule, &access, 1));
    const auto moved = bench.download(values + 2 * granule / 4, 33);
    CHECK(moved[31] == 7.0f && moved[32] == 0.0f);
    OK(cuMemRelease(handles[0]));
    CHECK(kv_double_live_bytes(0) == granule);
    IS(cuMemAddressFree(base, 4 * granule), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemUnmap(base + 2 * granule, granule));
    CHECK(kv_double_live_bytes(0) == 0);
    // Access to unmapped memory must fault.
    bench.launch("test_slow", 1, 32, 0, args);
    IS(bench.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(fault_says("reserved addresses without accessible memory"));
    IS(cuMemAddressFree(base, 4 * granule), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST(virtual_memory_without_access) {
    Bench bench(0);
    const auto prop = property(0);
    CUdeviceptr base = 0;
    CUmemGenericAllocationHandle handle = 0;
    OK(cuMemAddressReserve(&base, granule, granule, 0, 0));
    OK(cuMemCreate(&handle, granule, &prop, 0));
    OK(cuMemMap(base, granule, 0, handle, 0));
    bench.launch("test_slow", 1, 32, 0, VectorArgs{reinterpret_cast<float*>(base), nullptr, 1, 7.0f, 0});
    IS(bench.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST(pools) {
    Bench bench(1);
    CUmemPoolProps properties{};
    properties.allocType = 1;
    properties.location = {1, 1};
    CUmemoryPool pool = nullptr;
    OK(cuMemPoolCreate(&pool, &properties));
    uint64_t threshold = 8 << 20;
    OK(cuMemPoolSetAttribute(pool, 4, &threshold));
    CUdeviceptr one = 0, two = 0;
    OK(cuMemAllocFromPoolAsync(&one, 5 << 20, pool, bench.stream));
    OK(cuMemAllocFromPoolAsync(&two, 7 << 20, pool, bench.stream));
    CHECK(pool_value(pool, 7) == 12 << 20);
    CHECK(pool_value(pool, 5) == 12 << 20);
    OK(cuMemsetD8Async(one, 1, 5 << 20, bench.stream));
    OK(cuMemFreeAsync(one, bench.stream));
    IS(cuMemFreeAsync(one, bench.stream), CUDA_ERROR_INVALID_VALUE);
    CHECK(pool_value(pool, 7) == 12 << 20);
    OK(bench.sync());
    CHECK(pool_value(pool, 7) == 7 << 20);
    CHECK(pool_value(pool, 8) == 12 << 20);
    CHECK(pool_value(pool, 5) == 8 << 20);
    OK(cuMemFreeAsync(two, bench.stream));
    OK(bench.sync());
    CHECK(pool_value(pool, 7) == 0);
    CHECK(pool_value(pool, 5) == 8 << 20);
    OK(cuMemPoolTrimTo(pool, 0));
    CHECK(pool_value(pool, 5) == 0);
    // If memory is short, an allocation must wait for queued frees.
    kv_double_limit(1, 8 << 20);
    for (int i = 0; i < 4; i++) {
        OK(cuMemAllocFromPoolAsync(&one, 6 << 20, pool, bench.stream));
        OK(cuMemsetD8Async(one, 1, 6 << 20, bench.stream));
        OK(cuMemFreeAsync(one, bench.stream));
    }
    OK(cuMemAllocFromPoolAsync(&one, 6 << 20, pool, bench.stream));
    IS(cuMemAllocFromPoolAsync(&two, 6 << 20, pool, bench.stream), CUDA_ERROR_OUT_OF_MEMORY);
    kv_double_limit(1, size_t{2} << 30);
    OK(cuMemPoolDestroy(pool));
    OK(cuMemFreeAsync(one, bench.stream));
    OK(bench.sync());
    CHECK(kv_double_live_bytes(1) == 0);
}

TEST(pool_memory_belongs_to_its_stream) {
    Bench bench(1);
    CUstream other = nullptr;
    OK(cuStreamCreate(&other, 1));
    CUdeviceptr memory = 0;
    OK(cuMemAllocAsync(&memory, 4096, bench.stream));
    // The other stream does not wait for the allocation, so it must fault.
    OK(cuMemsetD8Async(memory, 0, 4096, other));
    IS(cuStreamSynchronize(other), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(fault_says("that its stream has not reached"));
}

TEST(memory_that_is_never_freed) {
    {
        Bench bench(0);
        float* memory = bench.alloc<float>(64);
        bench.launch("test_wrong", 1, 64, 100, VectorArgs{memory, memory, 64, 0, 7});
        OK(bench.sync());
    }
    // Destroying the context must check the bytes beside allocations, too.
    CHECK(fault_says("beside the allocation of 256 bytes"));
}

TEST(many_allocations) {
    Bench bench(0);
    std::vector<CUdeviceptr> all(5000);
    for (int round = 0; round < 2; round++) {
        for (auto& pointer : all) OK(cuMemAlloc_v2(&pointer, 1000));
        for (const auto pointer : all) OK(cuMemFree_v2(pointer));
    }
}

TEST(planned_results) {
    Bench bench(0);
    CUdeviceptr memory = 0;
    kv_double_fail("cuMemAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&memory, 64));
    IS(cuMemAlloc_v2(&memory, 64), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&memory, 64));
    kv_double_fail("cuMemAlloc_v2", 1, 999);
    kv_double_fail("cuMemAlloc", 0, 0);
    OK(cuMemAlloc_v2(&memory, 64));
    CHECK(kv_double_live_bytes(0) == 3 * 256);
    kv_double_ignore("cuMemFree*", 1);
    OK(cuMemFree_v2(memory));
    CHECK(kv_double_live_bytes(0) == 3 * 256);
    kv_double_ignore("cuMemFree*", 0);
    OK(cuMemFree_v2(memory));
    CHECK(kv_double_live_bytes(0) == 2 * 256);
    const char* name = nullptr;
    OK(cuGetErrorName(700, &name));
    CHECK(std::string(name) == "CUDA_ERROR_ILLEGAL_ADDRESS");
}
