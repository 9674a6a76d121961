// The self-test's kernels.
#include "kernels.hpp"

#include "../kernel.hpp"

// Each thread writes its position in the grid.
KV_KERNEL(test_places, PlacesArgs, 1024) {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    args.out[block * threads + thread] = block * 10000 + thread;
}

// Adds a value to each element, without synchronisation.
KV_KERNEL(test_add, VectorArgs, 256) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.count) args.out[i] = args.in[i] + args.value;
}

// Sums a block's values through shared memory. One mode omits the barriers.
KV_KERNEL(test_block_sum, VectorArgs, 256) {
    auto* values = reinterpret_cast<float*>(kv_shared());
    values[threadIdx.x] = args.in[blockIdx.x * blockDim.x + threadIdx.x];
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (args.mode == 0) __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    }
    if (threadIdx.x == 0) args.out[blockIdx.x] = values[0];
}

// Each block adds one to the previous block's result, although a device does not guarantee this order.
KV_KERNEL(test_blocks_in_order, VectorArgs, 32) {
    if (threadIdx.x == 0) args.out[blockIdx.x] = blockIdx.x == 0 ? 1.0f : args.out[blockIdx.x - 1] + 1.0f;
}

// Writes the results of collectives, 16 values for each lane.
KV_KERNEL(test_collectives, PlacesArgs, 64) {
    const unsigned lane = threadIdx.x % 32;
    unsigned* out = args.out + threadIdx.x * 16;
    out[0] = __shfl_sync(~0u, lane * 3, 5);
    out[1] = __shfl_sync(~0u, lane * 3, 9, 8);
    out[2] = __shfl_xor_sync(~0u, lane, 16);
    out[3] = __shfl_xor_sync(~0u, lane, 3, 4);
    out[4] = __shfl_down_sync(~0u, lane, 4u);
    out[5] = __shfl_down_sync(~0u, lane, 3u, 8);
    out[6] = __shfl_up_sync(~0u, lane, 4u);
    out[7] = __shfl_up_sync(~0u, lane, 3u, 8);
    out[8] = __ballot_sync(~0u, lane % 3 == 0);
    out[9] = static_cast<unsigned>(__any_sync(~0u, lane == 7));
    out[10] = static_cast<unsigned>(__all_sync(~0u, lane < 31));
    float sum = static_cast<float>(lane);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    out[11] = static_cast<unsigned>(sum);
    if (lane < 16) {
        out[12] = __shfl_sync(0xffffu, lane, 15);
    } else {
        out[12] = __shfl_sync(0xffff0000u, lane, 16);
    }
    __syncwarp();
    out[13] = atomicAdd(args.out + 64 * 16, 1u) < 64 ? 1 : 0;
    out[14] = static_cast<unsigned>(__shfl_sync(~0u, -static_cast<int>(lane), 2) + 2);
    out[15] = static_cast<unsigned>(__clz(1)) + static_cast<unsigned>(__popc(7)) + __umulhi(1u << 31, 4);
}

// Loads fragments with ldmatrix, multiplies them, and writes the sums. The left matrix is stored by rows of
// 16 elements. The right matrix is stored by columns or, in one mode, by rows, which requires the transposed
// load.
KV_KERNEL(test_multiply, MultiplyArgs, 32) {
    const unsigned lane = threadIdx.x;
    auto* left = reinterpret_cast<uint16_t*>(kv_shared());
    auto* right = left + 16 * 16;
    for (unsigned i = lane; i < 256; i += 32) left[i] = args.left[i];
    for (unsigned i = lane; i < 128; i += 32) right[i] = args.right[i];
    __syncwarp();
    uint32_t a[4], b[2];
    ldmatrix_x4(a, left + (lane % 16) * 16 + lane / 16 * 8);
    if (args.right_by_rows) {
        ldmatrix_x2_trans(b, right + (lane % 16) * 8);
    } else {
        ldmatrix_x2(b, right + (lane % 8) * 16 + lane / 8 % 2 * 8);
    }
    float d[4];
    const unsigned row = lane / 4, column = lane % 4 * 2;
    for (unsigned i = 0; i < 4; i++) d[i] = args.sums[(row + i / 2 * 8) * 8 + column + i % 2];
    if (args.bf16) {
        mma_bf16(d, a, b);
    } else {
        mma_f16(d, a, b);
    }
    for (unsigned i = 0; i < 4; i++) args.sums[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}

// Writes the elements that a transposed load of four matrices gives to each lane.
KV_KERNEL(test_load_transposed, MultiplyArgs, 32) {
    auto* matrix = reinterpret_cast<uint16_t*>(kv_shared());
    for (unsigned i = threadIdx.x; i < 256; i += 32) matrix[i] = args.left[i];
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4_trans(r, matrix + threadIdx.x * 8);
    auto* out = reinterpret_cast<uint32_t*>(args.sums);
    for (unsigned i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

// Copies through shared memory in two groups. Mode 1 waits only for the first group, and mode 2 for no group.
KV_KERNEL(test_copies, VectorArgs, 32) {
    unsigned char* shared = kv_shared() + threadIdx.x * 32;
    const float* from = args.in + threadIdx.x * 8;
    cp_async16(shared, from);
    cp_async_commit();
    cp_async16_zfill(shared + 16, from + 4, threadIdx.x % 2 == 0);
    cp_async_commit();
    if (args.mode == 0) cp_async_wait<0>();
    if (args.mode == 1) cp_async_wait<1>();
    const auto* values = reinterpret_cast<const float*>(shared);
    for (unsigned i = 0; i < 8; i++) args.out[threadIdx.x * 8 + i] = values[i];
}

// Makes a different mistake in each mode.
KV_KERNEL(test_wrong, VectorArgs, 64) {
    auto* shared = reinterpret_cast<float*>(kv_shared());
    switch (args.mode) {
        case 0:
            if (threadIdx.x < 16) __syncthreads();
            __syncwarp();
            break;
        case 1:
            if (threadIdx.x >= 3) __syncwarp();
            break;
        case 2:
            if (threadIdx.x < 32) {
                __syncthreads();
            } else {
                __syncthreads();
            }
            break;
        case 3:
            if (blockIdx.x == 1 && threadIdx.x == 40) __trap();
            break;
        case 4: shared[args.count + threadIdx.x] = 1.0f; break;
        case 5: args.out[args.count] = 1.0f; break;
        case 6: args.out[0] = reinterpret_cast<const float4*>(args.in + 1)->x; break;
        case 7:
            if (threadIdx.x == 0) args.out[-1] = 1.0f;
            break;
        case 8: {
            float values[4] = {};
            values[args.count + threadIdx.x] = 1.0f;
            args.out[threadIdx.x] = values[threadIdx.x % 4];
            break;
        }
        default: cp_async16(args.out, args.in);
    }
}

// Counts for a while, so that later work has to wait.
KV_KERNEL(test_slow, VectorArgs, 32) {
    volatile float sum = 0.0f;
    for (unsigned i = 0; i < args.count; i++) sum = sum + 1.0f;
    args.out[threadIdx.x] = args.value;
}
