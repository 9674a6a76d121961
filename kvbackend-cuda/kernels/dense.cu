// A model's small dense steps, in f32: embeddings, norms, gates, sums, and the steps before and after matrix
// products. Input rows need not be contiguous. Results are dense.
#include "weight.cuh"

constexpr uint32_t THREADS = 256;

// Returns the sum of a value over a block's threads. `partial` is shared memory for one number per warp.
__device__ __forceinline__ float block_sum(float x, float* partial) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (uint32_t warp = 0; warp < blockDim.x / 32; warp++) sum += partial[warp];
    return sum;
}

struct TakeArgs {
    Weight table;
    // Row indices in 32 bits.
    const uint32_t* rows;
    float* out;
    // The number of rows to take.
    uint32_t count;
    // The factor to multiply the rows by.
    float scale;
};
static_assert(sizeof(TakeArgs) == 56, "as in src/dense/steps.rs");

// Takes rows from a table by index: token embeddings, or some rows of activations.
KV_KERNEL(dense_take, TakeArgs, THREADS) {
    const uint32_t width = args.table.width;
    for (uint32_t row = blockIdx.x; row < args.count; row += gridDim.x) {
        const int64_t from = args.rows[row];
        float* out = args.out + static_cast<int64_t>(row) * width;
        for (uint32_t i = threadIdx.x; i < width; i += THREADS) out[i] = weight1(args.table, from, i) * args.scale;
    }
}

struct NormArgs {
    const float* x;
    const float* weight;
    float* out;
    // The strides of the outer and the inner rows, in elements.
    int64_t outer, inner;
    uint32_t rows, inners, width;
    float eps;
};
static_assert(sizeof(NormArgs) == 56, "as in src/dense/steps.rs");

// Root-mean-square norm over the last axis.
KV_KERNEL(dense_rms_norm, NormArgs, THREADS) {
    float* partial = reinterpret_cast<float*>(kv_shared());
    for (uint32_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const uint32_t above = row / args.inners;
        const float* x = args.x + args.outer * above + args.inner * (row - above * args.inners);
        float sum = 0.0f;
        for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) sum += x[i] * x[i];
        sum = block_sum(sum, partial);
        const float scale = sqrtf(sum / static_cast<float>(args.width) + args.eps);
        float* out = args.out + static_cast<int64_t>(row) * args.width;
        for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) out[i] = x[i] / scale * args.weight[i];
        __syncthreads(); // the next row writes `partial`
    }
}

struct PairArgs {
    const float* x;
    const float* y;
    float* out;
    uint64_t count;
};
static_assert(sizeof(PairArgs) == 32, "as in src/dense/steps.rs");

KV_KERNEL(dense_gated, PairArgs, THREADS) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * THREADS;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; i < args.count; i += stride) {
        const float x = args.x[i];
        args.out[i] = x / (1.0f + expf(-x)) * args.y[i];
    }
}

// gelu(x) * y, with the tanh approximation: x / 2 * (1 + tanh(u)) is x * sigmoid(2u).
KV_KERNEL(dense_gated_gelu, PairArgs, THREADS) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * THREADS;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; i < args.count; i += stride) {
        const float x = args.x[i];
        const float u = 0.7978845608f * x * (1.0f + 0.044715f * x * x);
        args.out[i] = x / (1.0f + expf(-2.0f * u)) * args.y[i];
    }
}

KV_KERNEL(dense_add, PairArgs, THREADS) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * THREADS;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; i < args.count; i += stride) {
        args.out[i] = args.x[i] + args.y[i];
    }
}

struct AddRowsArgs {
    // The matrix to add to, which is updated in place.
    float* sum;
    const uint32_t* rows;
    const float* factors;
    const float* y;
    uint32_t count, width;
};
static_assert(sizeof(AddRowsArgs) == 40, "as in src/dense/steps.rs");

KV_KERNEL(dense_add_rows, AddRowsArgs, THREADS) {
    for (uint32_t row = blockIdx.x; row < args.count; row += gridDim.x) {
        float* sum = args.sum + static_cast<int64_t>(args.rows[row]) * args.width;
        const float* y = args.y + static_cast<int64_t>(row) * args.width;
        const float factor = args.factors[row];
        for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) sum[i] += factor * y[i];
    }
}

struct SplitArgs {
    const float* x;
    // Three planes of `rows * width` bf16 numbers, with the largest terms first.
    uint16_t* out;
    // Stride between the rows of `x`, in elements.
    int64_t stride;
    uint32_t rows, width;
};
static_assert(sizeof(SplitArgs) == 32, "as in src/dense/matrix.rs");

// Splits f32 numbers into three bf16 terms, whose sum has 24 bits, for products with bf16 weights.
KV_KERNEL(dense_split, SplitArgs, THREADS) {
    const int64_t part = static_cast<int64_t>(args.rows) * args.width;
    for (uint32_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const float* x = args.x + args.stride * row;
        uint16_t* out = args.out + static_cast<int64_t>(row) * args.width;
        for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) {
            float rest = x[i];
#pragma unroll
            for (int term = 0; term < 3; term++) {
                const uint16_t bits = f32_to_bf16(rest);
                out[term * part + i] = bits;
                const float left = rest - bf16_to_f32(bits);
                // A non-finite value is stored only in the first term.
                rest = fabsf(left) < 3.0e38f ? left : 0.0f;
            }
        }
    }
}

struct FinishArgs {
    // `terms` matrices [rows, width] one after another.
    const float* x;
    const float* bias;
    float* out;
    uint32_t rows, width, terms, pad;
};
static_assert(sizeof(FinishArgs) == 40, "as in src/dense/matrix.rs");

// Adds a product's terms, and the bias if there is one. `out` may be `x`.
KV_KERNEL(dense_finish, FinishArgs, THREADS) {
    const int64_t part = static_cast<int64_t>(args.rows) * args.width;
    for (uint32_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t at = static_cast<int64_t>(row) * args.width;
        for (uint32_t i = threadIdx.x; i < args.width; i += THREADS) {
            float sum = 0.0f;
            for (uint32_t term = args.terms; term > 0; term--) sum += args.x[(term - 1) * part + at + i];
            args.out[at + i] = sum + (args.bias ? args.bias[i] : 0.0f);
        }
    }
}

struct WidenArgs {
    Weight weight;
    float* out;
    // The first row of the weight to widen, and the number of rows.
    uint32_t first, rows;
};
static_assert(sizeof(WidenArgs) == 48, "as in src/dense/matrix.rs");

// Widens a weight's rows to f32, for products that cuBLAS computes in f32.
KV_KERNEL(dense_widen, WidenArgs, THREADS) {
    const uint32_t width = args.weight.width;
    for (uint32_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        float* out = args.out + static_cast<int64_t>(row) * width;
        for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
            out[i] = weight1(args.weight, static_cast<int64_t>(args.first) + row, i);
        }
    }
}
