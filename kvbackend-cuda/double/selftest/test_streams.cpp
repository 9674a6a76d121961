// Tests of streams, events, pinned memory, captures and graphs.
#include <cmath>
#include <cstring>
#include <thread>

#include "test.hpp"

namespace {

constexpr int captured_none = 0, captured_active = 1, captured_invalid = 2;

VectorArgs add(float* out, const float* in, float value) { return {out, in, 32, value, 0}; }

}  // namespace

TEST(lazy_work_waits_for_the_host) {
    Bench bench(1);
    int calls = 0;
    const CUhostFn count = [](void* number) { ++*static_cast<int*>(number); };
    CUstream other = nullptr;
    OK(cuStreamCreate(&other, 1));
    CUevent event = nullptr;
    OK(cuEventCreate(&event, 0));
    OK(cuLaunchHostFunc(bench.stream, count, &calls));
    OK(cuEventRecord(event, bench.stream));
    OK(cuLaunchHostFunc(bench.stream, count, &calls));
    OK(cuLaunchHostFunc(other, count, &calls));
    for (int i = 0; i < 50; i++) IS(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    CHECK(calls == 0);
    OK(cuEventSynchronize(event));
    CHECK(calls == 1);
    OK(cuEventQuery(event));
    IS(cuStreamQuery(bench.stream), CUDA_ERROR_NOT_READY);
    // Enough queries must let an operation run.
    int queries = 0;
    while (cuStreamQuery(other) == CUDA_ERROR_NOT_READY) CHECK(++queries < 1000000);
    CHECK(calls == 2 && queries >= 99);
    OK(cuCtxSynchronize());
    CHECK(calls == 3);
    OK(cuStreamDestroy_v2(other));
}

TEST(events_order_streams) {
    for (const int ordinal : {0, 1}) {
        for (const bool ignored : {false, true}) {
            Bench bench(ordinal);
            CUstream first = nullptr;
            OK(cuStreamCreate(&first, 1));
            CUevent event = nullptr;
            OK(cuEventCreate(&event, 2));
            float* one = bench.alloc<float>(32);
            float* two = bench.alloc<float>(32);
            if (ignored) kv_double_ignore("cuStreamWaitEvent", 1);
            OK(bench.try_launch("test_slow", 1, 32, 0, VectorArgs{one, nullptr, 100000, 3.0f, 0}, first));
            OK(cuEventRecord(event, first));
            OK(cuStreamWaitEvent(bench.stream, event, 0));
            bench.launch("test_add", 1, 32, 0, add(two, one, 1.0f));
            kv_double_ignore("cuStreamWaitEvent", 0);
            const float got = bench.download(two, 32)[31];
            // Without the wait, the lazy device must never run the first stream.
            if (!ignored) CHECK(got == 4.0f);
            if (ignored && ordinal == 1) CHECK(std::isnan(got));
        }
    }
}

TEST(events_across_devices) {
    Bench lazy(1);
    Bench eager(0);
    CUevent event = nullptr;
    OK(cuCtxSetCurrent(lazy.context));
    OK(cuEventCreate(&event, 0));
    float* source = lazy.alloc<float>(32);
    lazy.launch("test_slow", 1, 32, 0, VectorArgs{source, nullptr, 1000, 3.0f, 0});
    OK(cuEventRecord(event, lazy.stream));
    OK(cuCtxSetCurrent(eager.context));
    IS(cuEventRecord(event, eager.stream), CUDA_ERROR_INVALID_HANDLE);
    float* target = eager.alloc<float>(32);
    OK(cuStreamWaitEvent(eager.stream, event, 0));
    OK(cuMemcpyPeerAsync(Bench::address(target), eager.context, Bench::address(source), lazy.context, 128,
                         eager.stream));
    CHECK(eager.download(target, 32)[5] == 3.0f);
}

TEST(time_between_events) {
    Bench bench(0);
    CUevent start = nullptr, end = nullptr;
    OK(cuEventCreate(&start, 0));
    OK(cuEventCreate(&end, 0));
    float time = -1.0f;
    IS(cuEventElapsedTime_v2(&time, start, end), CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventRecord(start, bench.stream));
    OK(cuLaunchHostFunc(
        bench.stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
    OK(cuEventRecord(end, bench.stream));
    OK(bench.sync());
    OK(cuEventElapsedTime_v2(&time, start, end));
    CHECK(time >= 5.0f);
    OK(cuEventDestroy_v2(start));
    IS(cuEventQuery(start), CUDA_ERROR_INVALID_HANDLE);
}

TEST(pinned_memory_is_read_late) {
    Bench bench(1);
    void* memory = nullptr;
    OK(cuMemHostAlloc(&memory, 128, 0));
    auto* pinned = static_cast<float*>(memory);
    std::vector<float> pageable(32, 1.0f);
    float* from_pinned = bench.alloc<float>(32);
    float* from_pageable = bench.alloc<float>(32);
    for (int i = 0; i < 32; i++) pinned[i] = 1.0f;
    OK(cuMemcpyHtoDAsync_v2(Bench::address(from_pinned), pinned, 128, bench.stream));
    OK(cuMemcpyHtoDAsync_v2(Bench::address(from_pageable), pageable.data(), 128, bench.stream));
    pinned[0] = pageable[0] = 2.0f;
    CHECK(bench.download(from_pinned, 1)[0] == 2.0f);
    CHECK(bench.download(from_pageable, 1)[0] == 1.0f);
    // The destination must be written only when the copy runs.
    OK(cuMemcpyDtoHAsync_v2(pinned, Bench::address(from_pageable), 128, bench.stream));
    CHECK(pinned[0] == 2.0f);
    OK(bench.sync());
    CHECK(pinned[0] == 1.0f);
    // Pinned memory is freed before the copy runs.
    OK(cuMemcpyDtoHAsync_v2(pinned, Bench::address(from_pageable), 128, bench.stream));
    OK(cuMemFreeHost(pinned));
    IS(bench.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST(trace_of_what_was_queued) {
    Bench bench(0);
    std::vector<char> text(kv_double_trace(nullptr, 0));
    kv_double_trace(text.data(), text.size());
    float* memory = bench.alloc<float>(64);
    bench.launch("test_slow", 3, 32, 64, VectorArgs{memory, nullptr, 1, 0, 0});
    OK(cuMemsetD32Async(Bench::address(memory), 0, 64, bench.stream));
    bench.download(memory, 64);
    text.resize(kv_double_trace(nullptr, 0));
    kv_double_trace(text.data(), text.size());
    CHECK(std::string(text.data()) == "0 1 kernel test_slow 3x1x1 32x1x1 64\n0 1 memset32 256\n0 1 memcpy_dtoh 256\n");
    CHECK(kv_double_trace(nullptr, 0) == 1);
}

TEST(graphs) {
    for (const int ordinal : {0, 1}) {
        Bench bench(ordinal);
        CUstream side = nullptr;
        OK(cuStreamCreate(&side, 1));
        CUevent fork = nullptr, join = nullptr;
        OK(cuEventCreate(&fork, 2));
        OK(cuEventCreate(&join, 2));
        float* values[4];
        for (float*& value : values) value = bench.alloc<float>(32);
        OK(cuStreamBeginCapture_v2(bench.stream, 1));
        bench.launch("test_slow", 1, 32, 0, VectorArgs{values[0], nullptr, 1, 1.0f, 0});
        OK(cuEventRecord(fork, bench.stream));
        OK(cuStreamWaitEvent(side, fork, 0));
        bench.launch("test_add", 1, 32, 0, add(values[1], values[0], 1.0f));
        OK(bench.try_launch("test_add", 1, 32, 0, add(values[2], values[0], 10.0f), side));
        OK(cuEventRecord(join, side));
        OK(cuStreamWaitEvent(bench.stream, join, 0));
        OK(cuMemcpyDtoDAsync_v2(Bench::address(values[3]), Bench::address(values[2]), 128, bench.stream));
        bench.launch("test_add", 1, 32, 0, add(values[2], values[1], 100.0f));
        CUgraph graph = nullptr;
        OK(cuStreamEndCapture(bench.stream, &graph));
        size_t nodes = 0;
        OK(cuGraphGetNodes(graph, nullptr, &nodes));
        CHECK(nodes == 5);
        // Nothing must have run yet.
        CHECK(std::isnan(bench.download(values[3], 1)[0]));
        CUgraphExec exec = nullptr;
        OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
        OK(cuGraphDestroy(graph));
        for (int i = 0; i < 20; i++) {
            for (float* value : values) OK(cuMemsetD8Async(Bench::address(value), 0xff, 128, bench.stream));
            OK(cuGraphLaunch(exec, bench.stream));
            CHECK(bench.download(values[3], 1)[0] == 11.0f);
            CHECK(bench.download(values[2], 1)[0] == 102.0f);
        }
        OK(cuGraphExecDestroy(exec));
    }
}

TEST(fault_in_a_graph) {
    Bench bench(1);
    float* memory = bench.alloc<float>(32);
    OK(cuStreamBeginCapture_v2(bench.stream, 2));
    bench.launch("test_slow", 1, 32, 0, VectorArgs{memory, nullptr, 1, 1.0f, 0});
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    OK(cuStreamEndCapture(bench.stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphLaunch(exec, bench.stream));
    OK(bench.sync());
    OK(cuMemFree_v2(Bench::address(memory)));
    OK(cuGraphLaunch(exec, bench.stream));
    IS(bench.sync(), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(fault_says("kernel test_slow") && fault_says("in the freed allocation of 128 bytes"));
}

TEST(captures_that_fail) {
    Bench bench(0);
    CUstream side = nullptr;
    OK(cuStreamCreate(&side, 1));
    CUevent event = nullptr;
    OK(cuEventCreate(&event, 2));
    float* memory = bench.alloc<float>(32);
    const VectorArgs args{memory, nullptr, 1, 1.0f, 0};
    CUgraph graph = nullptr;
    CUdeviceptr other = 0;
    int status = 0;
    const auto ends_with = [&](CUresult code) {
        IS(cuStreamEndCapture(bench.stream, &graph), code);
        CHECK(graph == nullptr);
        OK(cuStreamIsCapturing(bench.stream, &status));
        CHECK(status == captured_none);
    };
    OK(cuStreamBeginCapture_v2(bench.stream, 0));
    OK(cuStreamIsCapturing(bench.stream, &status));
    CHECK(status == captured_active);
    IS(cuStreamSynchronize(bench.stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    OK(cuStreamIsCapturing(bench.stream, &status));
    CHECK(status == captured_invalid);
    IS(bench.try_launch("test_slow", 1, 32, 0, args, bench.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    OK(cuStreamBeginCapture_v2(bench.stream, 1));
    IS(cuMemAlloc_v2(&other, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    OK(cuStreamBeginCapture_v2(bench.stream, 2));
    OK(cuMemAlloc_v2(&other, 64));
    IS(cuMemcpyHtoD_v2(other, &status, 4), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    OK(cuStreamBeginCapture_v2(bench.stream, 1));
    OK(cuEventRecord(event, bench.stream));
    OK(cuStreamWaitEvent(side, event, 0));
    OK(bench.try_launch("test_slow", 1, 32, 0, args, side));
    ends_with(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

    OK(cuEventRecord(event, side));
    OK(cuStreamBeginCapture_v2(bench.stream, 1));
    IS(cuStreamWaitEvent(bench.stream, event, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    OK(cuStreamBeginCapture_v2(bench.stream, 1));
    OK(cuEventRecord(event, bench.stream));
    IS(cuEventQuery(event), CUDA_ERROR_CAPTURED_EVENT);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    OK(cuCtxSynchronize());
}

TEST(missing_join_is_found) {
    Bench bench(0);
    CUstream side = nullptr;
    OK(cuStreamCreate(&side, 1));
    CUevent fork = nullptr, join = nullptr;
    OK(cuEventCreate(&fork, 2));
    OK(cuEventCreate(&join, 2));
    float* one = bench.alloc<float>(32);
    float* two = bench.alloc<float>(32);
    OK(cuStreamBeginCapture_v2(bench.stream, 1));
    OK(cuEventRecord(fork, bench.stream));
    OK(cuStreamWaitEvent(side, fork, 0));
    OK(bench.try_launch("test_slow", 1, 32, 0, VectorArgs{one, nullptr, 1, 1.0f, 0}, side));
    OK(cuEventRecord(join, side));
    // Uses the other stream's result before waiting for it.
    bench.launch("test_add", 1, 32, 0, add(two, one, 1.0f));
    OK(cuStreamWaitEvent(bench.stream, join, 0));
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    OK(cuStreamEndCapture(bench.stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    bool wrong = false;
    for (int i = 0; i < 20; i++) {
        OK(cuMemsetD8Async(Bench::address(one), 0xff, 128, bench.stream));
        OK(cuGraphLaunch(exec, bench.stream));
        wrong |= bench.download(two, 1)[0] != 2.0f;
    }
    CHECK(wrong);
}

TEST(many_streams_at_once) {
    Bench bench(0);
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; t++) {
        threads.emplace_back([&, t] {
            OK(cuCtxSetCurrent(bench.context));
            for (int round = 0; round < 20; round++) {
                CUstream stream = nullptr;
                OK(cuStreamCreate(&stream, 1));
                float* memory = bench.alloc<float>(32);
                const auto value = static_cast<float>(t * 100 + round);
                OK(bench.try_launch("test_slow", 4, 32, 0, VectorArgs{memory, nullptr, 100, value, 0}, stream));
                std::vector<float> host(32);
                OK(cuMemcpyDtoHAsync_v2(host.data(), Bench::address(memory), 128, stream));
                for (const float got : host) CHECK(got == value);
                OK(cuMemFree_v2(Bench::address(memory)));
                OK(cuStreamDestroy_v2(stream));
            }
        });
    }
    for (auto& thread : threads) thread.join();
}

TEST(contexts_come_and_go) {
    // Each thread retains and releases the context. Only the last release may drop other threads' work.
    for (const int ordinal : {0, 1}) {
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; t++) {
            threads.emplace_back([ordinal] {
                for (int round = 0; round < 50; round++) {
                    CUcontext context = nullptr;
                    OK(cuDevicePrimaryCtxRetain(&context, ordinal));
                    OK(cuCtxSetCurrent(context));
                    CUstream stream = nullptr;
                    OK(cuStreamCreate(&stream, 1));
                    CUdeviceptr memory = 0;
                    OK(cuMemAlloc_v2(&memory, 4096));
                    OK(cuMemsetD8Async(memory, 1, 4096, stream));
                    if (round % 2 == 0) OK(cuStreamSynchronize(stream));
                    if (round % 3 == 0) OK(cuStreamDestroy_v2(stream));
                    OK(cuDevicePrimaryCtxRelease_v2(ordinal));
                }
            });
        }
        for (auto& thread : threads) thread.join();
        CHECK(kv_double_live_objects(ordinal) == 0);
        CHECK(kv_double_live_bytes(ordinal) == 0);
    }
}

TEST(workers_end) {
    const auto threads = [] {
        std::FILE* file = std::fopen("/proc/self/status", "r");
        CHECK(file != nullptr);
        char line[128];
        int count = 0;
        while (std::fgets(line, sizeof line, file) != nullptr) std::sscanf(line, "Threads: %d", &count);
        std::fclose(file);
        return count;
    };
    Bench bench(0);
    CUstream stream = nullptr;
    OK(bench.sync());
    for (int i = 0; i < 100; i++) {
        OK(cuStreamCreate(&stream, 1));
        OK(cuLaunchHostFunc(stream, [](void*) {}, nullptr));
        OK(cuStreamSynchronize(stream));
        OK(cuStreamDestroy_v2(stream));
    }
    for (int i = 0; i < 1000 && threads() > 3; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(threads() <= 3);
}
