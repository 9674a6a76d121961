// Helpers for the self-test: the library's entry points, checks, and a device with a module.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../control.h"
#include "../types.hpp"
#include "kernels.hpp"

extern "C" {
CUresult cuInit(unsigned);
CUresult cuDeviceGetName(char*, int, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuMemGetInfo_v2(size_t*, size_t*);
CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemHostAlloc(void**, size_t, unsigned);
CUresult cuMemFreeHost(void*);
CUresult cuPointerGetAttribute(void*, int, CUdeviceptr);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void*, size_t);
CUresult cuMemcpyDtoH_v2(void*, CUdeviceptr, size_t);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void*, size_t, CUstream);
CUresult cuMemcpyDtoHAsync_v2(void*, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamQuery(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void*);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventElapsedTime_v2(float*, CUevent, CUevent);
CUresult cuModuleLoadData(CUmodule*, const void*);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*);
CUresult cuFuncSetAttribute(CUfunction, int, int);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void**, void**);
CUresult cuMemGetAllocationGranularity(size_t*, const CUmemAllocationProp*, int);
CUresult cuMemAddressReserve(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemAddressFree(CUdeviceptr, size_t);
CUresult cuMemCreate(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
CUresult cuMemAllocAsync(CUdeviceptr*, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr*, size_t, CUmemoryPool, CUstream);
CUresult cuMemPoolCreate(CUmemoryPool*, const CUmemPoolProps*);
CUresult cuMemPoolDestroy(CUmemoryPool);
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t);
CUresult cuMemPoolGetAttribute(CUmemoryPool, int, void*);
CUresult cuMemPoolSetAttribute(CUmemoryPool, int, void*);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuStreamIsCapturing(CUstream, int*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t*);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGetErrorName(CUresult, const char**);
}

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::printf("FAILED\n%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

#define IS(call, expected)                                                                                        \
    do {                                                                                                          \
        const CUresult is_result = (call);                                                                        \
        if (is_result != (expected)) {                                                                            \
            std::printf("FAILED\n%s:%d: %s gave %d, not %d\n", __FILE__, __LINE__, #call, is_result, (expected)); \
            std::exit(1);                                                                                         \
        }                                                                                                         \
    } while (0)

#define OK(call) IS(call, CUDA_SUCCESS)

struct Test {
    const char* name;
    void (*run)();
    inline static std::vector<Test>& all() {
        static std::vector<Test> tests;
        return tests;
    }
    Test(const char* name, void (*run)()) : name(name), run(run) { all().push_back(*this); }
};

#define TEST(name)                                 \
    static void name();                            \
    static const Test test_of_##name(#name, name); \
    static void name()

inline std::string ptx_of(const char* kernel, size_t bytes) {
    const std::string name = kernel;
    return ".visible .entry " + name + "(\n\t.param .align 8 .b8 " + name + "_param_0[" + std::to_string(bytes) +
           "]\n)\n{\n\tret;\n}\n";
}

// A device with a current context, a stream, and a module with all kernels. The destructor frees everything,
// regardless of the device's state.
struct Bench {
    int ordinal;
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    CUmodule module = nullptr;

    explicit Bench(int ordinal) : ordinal(ordinal) {
        OK(cuDevicePrimaryCtxRetain(&context, ordinal));
        OK(cuCtxSetCurrent(context));
        OK(cuStreamCreate(&stream, 1));
        std::string ptx = ".version 8.0\n.target sm_80\n.address_size 64\n";
        for (const char* name :
             {"test_add", "test_block_sum", "test_blocks_in_order", "test_copies", "test_wrong", "test_slow"}) {
            ptx += ptx_of(name, sizeof(VectorArgs));
        }
        for (const char* name : {"test_places", "test_collectives"}) ptx += ptx_of(name, sizeof(PlacesArgs));
        for (const char* name : {"test_multiply", "test_load_transposed"}) ptx += ptx_of(name, sizeof(MultiplyArgs));
        OK(cuModuleLoadData(&module, ptx.c_str()));
    }
    ~Bench() {
        OK(cuCtxSetCurrent(context));
        OK(cuDevicePrimaryCtxRelease_v2(ordinal));
        CHECK(kv_double_live_objects(ordinal) == 0);
        CHECK(kv_double_live_bytes(ordinal) == 0);
        OK(cuCtxSetCurrent(nullptr));
    }
    Bench(const Bench&) = delete;
    Bench& operator=(const Bench&) = delete;

    CUfunction function(const char* name) const {
        CUfunction found = nullptr;
        OK(cuModuleGetFunction(&found, module, name));
        return found;
    }
    template <typename Args>
    CUresult try_launch(const char* name, unsigned grid, unsigned block, unsigned shared, Args args,
                        CUstream on) const {
        void* parameters[] = {&args};
        return cuLaunchKernel(function(name), grid, 1, 1, block, 1, 1, shared, on, parameters, nullptr);
    }
    template <typename Args>
    void launch(const char* name, unsigned grid, unsigned block, unsigned shared, Args args) const {
        OK(try_launch(name, grid, block, shared, args, stream));
    }
    template <typename T>
    T* alloc(size_t count) const {
        CUdeviceptr pointer = 0;
        OK(cuMemAlloc_v2(&pointer, count * sizeof(T)));
        return reinterpret_cast<T*>(pointer);
    }
    template <typename T>
    T* upload(const std::vector<T>& values) const {
        T* pointer = alloc<T>(values.size());
        OK(cuMemcpyHtoDAsync_v2(address(pointer), values.data(), values.size() * sizeof(T), stream));
        return pointer;
    }
    template <typename T>
    std::vector<T> download(const T* pointer, size_t count) const {
        std::vector<T> values(count);
        OK(cuMemcpyDtoHAsync_v2(values.data(), address(pointer), count * sizeof(T), stream));
        OK(cuStreamSynchronize(stream));
        return values;
    }
    static CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
    CUresult sync() const { return cuStreamSynchronize(stream); }
};

inline bool fault_says(const char* words) {
    return std::string(kv_double_last_fault()).find(words) != std::string::npos;
}
