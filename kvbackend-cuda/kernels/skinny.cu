// Products of a few rows with a matrix. Each warp computes one output: it reads that output's weights once,
// in their stored format, and multiplies them with all rows in f32. Reading the matrix dominates the time.
#include "weight.cuh"

constexpr uint32_t THREADS = 256;
constexpr uint32_t WARPS = THREADS / 32;

struct SkinnyArgs {
    Weight weight;
    const float* x;
    const float* bias;
    float* out;
    // The stride between the rows of `x`, in elements.
    int64_t stride;
    // The number of rows of `x`, at most ROWS, and the number of outputs.
    uint32_t rows, outputs;
};
static_assert(sizeof(SkinnyArgs) == 72, "as in src/dense/matrix.rs");

template <int KIND, int ROWS>
__device__ __forceinline__ void skinny(const SkinnyArgs& args) {
    const uint32_t lane = threadIdx.x % 32, width = args.weight.width, stride = gridDim.x * WARPS;
    for (uint32_t o = blockIdx.x * WARPS + threadIdx.x / 32; o < args.outputs; o += stride) {
        float sums[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
        const uint32_t whole = width % 8 == 0 && args.stride % 4 == 0 ? width : 0;
        for (uint32_t i = 8 * lane; i < whole; i += 256) {
            float w[8];
            weight8<KIND>(args.weight, o, i, w);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r < static_cast<int>(args.rows)) {
                    float x[8];
                    load8<F32>(reinterpret_cast<const unsigned char*>(args.x + args.stride * r + i), x);
#pragma unroll
                    for (int j = 0; j < 8; j++) sums[r] = fmaf(w[j], x[j], sums[r]);
                }
            }
        }
        for (uint32_t i = whole + lane; i < width; i += 32) {
            const float w = weight1(args.weight, o, i);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r < static_cast<int>(args.rows)) sums[r] = fmaf(w, args.x[args.stride * r + i], sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            for (int step = 16; step > 0; step >>= 1) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
        }
        const float bias = args.bias ? args.bias[o] : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (static_cast<int>(lane) == r && r < static_cast<int>(args.rows)) {
                args.out[static_cast<int64_t>(r) * args.outputs + o] = sums[r] + bias;
            }
        }
    }
}

#define KV_SKINNY(name, kind)                                                          \
    KV_KERNEL(skinny_##name##_1, SkinnyArgs, THREADS) { skinny<kind, 1>(args); } \
    KV_KERNEL(skinny_##name##_4, SkinnyArgs, THREADS) { skinny<kind, 4>(args); } \
    KV_KERNEL(skinny_##name##_8, SkinnyArgs, THREADS) { skinny<kind, 8>(args); }

KV_SKINNY(f32, F32)
KV_SKINNY(f16, F16)
KV_SKINNY(bf16, BF16)
KV_SKINNY(q8_0, Q8_0)
KV_SKINNY(q4_k, Q4_K)
