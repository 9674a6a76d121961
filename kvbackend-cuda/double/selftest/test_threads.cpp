// Tests of threads: positions, barriers, collectives, matrices, asynchronous copies, and mistakes in kernels.
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>

#include "../elements.hpp"
#include "test.hpp"

TEST(places_of_threads) {
    Bench bench(0);
    unsigned* out = bench.alloc<unsigned>(2 * 3 * 2 * 60);
    PlacesArgs args{out};
    void* parameters[] = {&args};
    OK(cuLaunchKernel(bench.function("test_places"), 2, 3, 2, 5, 4, 3, 0, bench.stream, parameters, nullptr));
    const auto places = bench.download(out, 2 * 3 * 2 * 60);
    for (unsigned i = 0; i < places.size(); i++) CHECK(places[i] == i / 60 * 10000 + i % 60);
}

TEST(speed_without_barriers) {
    Bench bench(0);
    const unsigned count = 128000;
    float* in = bench.upload(std::vector<float>(count, 1.0f));
    float* out = bench.alloc<float>(count);
    bench.launch("test_add", 1000, 128, 0, VectorArgs{out, in, count, 1.0f, 0});
    OK(bench.sync());
    const auto start = std::chrono::steady_clock::now();
    bench.launch("test_add", 1000, 128, 0, VectorArgs{out, in, count, 2.0f, 0});
    OK(bench.sync());
    const auto time = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    std::printf("(1000 blocks of 128 threads: %.2f ms) ", time);
    for (const float value : bench.download(out, count)) CHECK(value == 3.0f);
}

TEST(barriers) {
    Bench bench(0);
    std::vector<float> values(16 * 256);
    std::iota(values.begin(), values.end(), 0.0f);
    float* in = bench.upload(values);
    float* out = bench.alloc<float>(16);
    bench.launch("test_block_sum", 16, 256, 1024, VectorArgs{out, in, 0, 0, 0});
    const auto sums = bench.download(out, 16);
    for (unsigned b = 0; b < 16; b++) {
        CHECK(sums[b] == std::accumulate(values.begin() + b * 256, values.begin() + (b + 1) * 256, 0.0f));
    }
    // Without barriers, the result must be wrong in some block.
    bench.launch("test_block_sum", 16, 256, 1024, VectorArgs{out, in, 0, 0, 1});
    CHECK(bench.download(out, 16) != sums);
}

TEST(blocks_in_any_order) {
    Bench bench(0);
    float* out = bench.alloc<float>(64);
    bench.launch("test_blocks_in_order", 64, 32, 0, VectorArgs{out, nullptr, 0, 0, 0});
    const auto values = bench.download(out, 64);
    bool wrong = false;
    for (unsigned i = 0; i < 64; i++) wrong |= values[i] != static_cast<float>(i + 1);
    CHECK(wrong);
}

TEST(collectives) {
    Bench bench(0);
    unsigned* out = bench.alloc<unsigned>(64 * 16 + 1);
    OK(cuMemsetD8Async(Bench::address(out), 0, (64 * 16 + 1) * 4, bench.stream));
    bench.launch("test_collectives", 1, 64, 0, PlacesArgs{out});
    const auto all = bench.download(out, 64 * 16 + 1);
    CHECK(all[64 * 16] == 64);
    for (unsigned t = 0; t < 64; t++) {
        const unsigned lane = t % 32;
        const unsigned* got = &all[t * 16];
        CHECK(got[0] == 15);
        CHECK(got[1] == (lane / 8 * 8 + 1) * 3);
        CHECK(got[2] == (lane ^ 16));
        CHECK(got[3] == (lane ^ 3));
        CHECK(got[4] == (lane < 28 ? lane + 4 : lane));
        CHECK(got[5] == (lane % 8 < 5 ? lane + 3 : lane));
        CHECK(got[6] == (lane >= 4 ? lane - 4 : lane));
        CHECK(got[7] == (lane % 8 >= 3 ? lane - 3 : lane));
        CHECK(got[8] == 0x49249249u);
        CHECK(got[9] == 1);
        CHECK(got[10] == 0);
        CHECK(got[11] == 496);
        CHECK(got[12] == (lane < 16 ? 15 : 16));
        CHECK(got[13] == 1);
        CHECK(got[14] == 0);
        CHECK(got[15] == 31 + 3 + 2);
    }
}

TEST(conversions) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const auto half = static_cast<uint16_t>(bits);
        const float wide = f16_to_f32(half);
        const bool nan = (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0;
        CHECK(std::isnan(wide) == nan);
        if (!nan) CHECK(f32_to_f16(wide) == half);
        if (!nan && (bits & 0x7fff) < 0x7bff) {
            // The midpoint of two neighbours must be rounded to the even one, and other values to the nearer
            // one.
            const float next = f16_to_f32(static_cast<uint16_t>(bits + 1)), middle = (wide + next) / 2;
            const auto even = static_cast<uint16_t>(bits + bits % 2);
            CHECK(f32_to_f16(middle) == even);
            CHECK(f32_to_f16(std::nextafterf(middle, wide)) == half);
            CHECK(f32_to_f16(std::nextafterf(middle, next)) == bits + 1);
        }
        const float brain = bf16_to_f32(half);
        if (std::isnan(brain)) {
            CHECK(std::isnan(bf16_to_f32(f32_to_bf16(brain))));
        } else {
            CHECK(f32_to_bf16(brain) == half);
        }
    }
    CHECK(f32_to_f16(65519.0f) == 0x7bff);
    CHECK(f32_to_f16(65520.0f) == 0x7c00);
    CHECK(f32_to_f16(-INFINITY) == 0xfc00);
    CHECK(std::isnan(f16_to_f32(f32_to_f16(NAN))));
    CHECK(f32_to_bf16(__uint_as_float(0x3f808000)) == 0x3f80);
    CHECK(f32_to_bf16(__uint_as_float(0x3f818000)) == 0x3f82);
    CHECK(f32_to_bf16(__uint_as_float(0x7f7fffff)) == 0x7f80);
    CHECK(pack_bf16x2(1.0f, 2.0f) == 0x40003f80u);
    CHECK(unpack_f16x2(pack_f16x2(1.5f, -2.5f)).y == -2.5f);
}

TEST(matrices) {
    Bench bench(0);
    for (const bool bf16 : {false, true}) {
        for (const bool by_rows : {false, true}) {
            const auto narrow = bf16 ? f32_to_bf16 : f32_to_f16;
            std::vector<uint16_t> left(256), right(128);
            std::vector<float> x(256), y(128), sums(128);
            for (unsigned i = 0; i < 256; i++)
                left[i] = narrow(x[i] = static_cast<float>(static_cast<int>(i * 7 % 23) - 11));
            for (unsigned k = 0; k < 16; k++) {
                for (unsigned c = 0; c < 8; c++) {
                    y[k * 8 + c] = static_cast<float>(static_cast<int>((k * 8 + c) * 5 % 17) - 8) / 4;
                    right[by_rows ? k * 8 + c : c * 16 + k] = narrow(y[k * 8 + c]);
                }
            }
            for (unsigned i = 0; i < 128; i++) sums[i] = static_cast<float>(i);
            float* out = bench.upload(sums);
            bench.launch("test_multiply", 1, 32, 768,
                         MultiplyArgs{out, bench.upload(left), bench.upload(right), bf16, by_rows});
            const auto got = bench.download(out, 128);
            for (unsigned r = 0; r < 16; r++) {
                for (unsigned c = 0; c < 8; c++) {
                    float sum = sums[r * 8 + c];
                    for (unsigned k = 0; k < 16; k++) sum += x[r * 16 + k] * y[k * 8 + c];
                    CHECK(got[r * 8 + c] == sum);
                }
            }
        }
    }
    std::vector<uint16_t> elements(256);
    std::iota(elements.begin(), elements.end(), uint16_t{0});
    float* out = bench.alloc<float>(128);
    bench.launch("test_load_transposed", 1, 32, 512, MultiplyArgs{out, bench.upload(elements), nullptr, false, false});
    const auto words = bench.download(reinterpret_cast<const uint32_t*>(out), 128);
    for (unsigned l = 0; l < 32; l++) {
        for (unsigned m = 0; m < 4; m++) {
            const uint32_t low = m * 64 + (l % 4 * 2) * 8 + l / 4, high = low + 8;
            CHECK(words[l * 4 + m] == (low | high << 16));
        }
    }
}

TEST(asynchronous_copies) {
    Bench bench(0);
    std::vector<float> values(256);
    std::iota(values.begin(), values.end(), 1.0f);
    float* in = bench.upload(values);
    float* out = bench.alloc<float>(256);
    for (int mode = 0; mode < 3; mode++) {
        bench.launch("test_copies", 1, 32, 1024, VectorArgs{out, in, 0, 0, mode});
        const auto got = bench.download(out, 256);
        for (unsigned i = 0; i < 256; i++) {
            const bool second = i % 8 >= 4;
            const bool waited = mode == 0 || (mode == 1 && !second);
            if (!waited) {
                CHECK(std::isnan(got[i]));
            } else {
                CHECK(got[i] == (second && i / 8 % 2 == 1 ? 0.0f : values[i]));
            }
        }
    }
}

TEST(what_is_wrong_in_kernels) {
    const std::tuple<int, CUresult, const char*> cases[] = {
        {0, CUDA_ERROR_LAUNCH_FAILED, "divergent barrier"},
        {1, CUDA_ERROR_LAUNCH_FAILED, "has exited"},
        {2, CUDA_ERROR_LAUNCH_FAILED, "divergent barrier"},
        {3, CUDA_ERROR_LAUNCH_FAILED, "block (1, 0, 0), thread (40, 0, 0): __trap()"},
        {4, CUDA_ERROR_ILLEGAL_ADDRESS, "behind the end of shared memory"},
        {5, CUDA_ERROR_ILLEGAL_ADDRESS, "test_wrong"},
        {6, CUDA_ERROR_LAUNCH_FAILED, "alignment"},
        {8, CUDA_ERROR_LAUNCH_FAILED, "bounds"},
        {9, CUDA_ERROR_INVALID_ADDRESS_SPACE, "outside shared memory"},
    };
    for (const auto& [mode, code, words] : cases) {
        Bench bench(0);
        float* memory = bench.alloc<float>(64);
        bench.launch("test_wrong", 2, 64, 100, VectorArgs{memory, memory, mode == 4 ? 28u : 64u, 0, mode});
        IS(bench.sync(), code);
        CHECK(fault_says(words));
        CUdeviceptr other = 0;
        IS(cuMemAlloc_v2(&other, 16), code);
    }
    // A write beside an allocation must be found when the allocation is freed.
    Bench bench(0);
    float* memory = bench.alloc<float>(64);
    bench.launch("test_wrong", 1, 64, 100, VectorArgs{memory, memory, 64, 0, 7});
    OK(bench.sync());
    IS(cuMemFree_v2(Bench::address(memory)), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(fault_says("beside the allocation"));
}

TEST(launches_that_are_refused) {
    Bench bench(0);
    const VectorArgs args{};
    IS(bench.try_launch("test_add", 1, 512, 0, args, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(bench.try_launch("test_add", 0, 32, 0, args, bench.stream), CUDA_ERROR_INVALID_VALUE);
    IS(bench.try_launch("test_add", 1, 32, 48 * 1024 + 4, args, bench.stream), CUDA_ERROR_INVALID_VALUE);
    OK(cuFuncSetAttribute(bench.function("test_add"), 8, 227 * 1024));
    OK(bench.try_launch("test_add", 1, 32, 227 * 1024, args, bench.stream));
    IS(cuFuncSetAttribute(bench.function("test_add"), 8, 228 * 1024), CUDA_ERROR_INVALID_VALUE);
    IS(bench.try_launch("test_add", 1, 32, 0, args, reinterpret_cast<CUstream>(0x1234)), CUDA_ERROR_INVALID_HANDLE);
    Bench other(2);
    IS(other.try_launch("test_add", 1, 32, 0, args, bench.stream), CUDA_ERROR_INVALID_HANDLE);
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    IS(cuModuleLoadData(&module, "no module"), CUDA_ERROR_INVALID_IMAGE);
    IS(cuModuleLoadData(&module, ".version 8.0 only"), CUDA_ERROR_INVALID_PTX);
    IS(cuModuleLoadData(&module, ".version 9.1\n.target sm_80\n"), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    IS(cuModuleLoadData(&module, ".version 8.0\n.target sm_100\n"), CUDA_ERROR_NO_BINARY_FOR_GPU);
    const std::string text = ".version 8.0\n.target sm_80\n" + ptx_of("test_nothing", 8) + ptx_of("test_places", 16);
    OK(cuModuleLoadData(&module, text.c_str()));
    IS(cuModuleGetFunction(&function, module, "test_nothing"), CUDA_ERROR_NOT_FOUND);
    IS(cuModuleGetFunction(&function, module, "test_add"), CUDA_ERROR_NOT_FOUND);
    IS(cuModuleGetFunction(&function, module, "test_places"), CUDA_ERROR_INVALID_IMAGE);
}
