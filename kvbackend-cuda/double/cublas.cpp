// The few cuBLAS entry points that the backend calls. Their work runs on the handle's stream. A link makes
// the library available under cuBLAS's name. Sums are computed in f64 and rounded once.
#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "call.hpp"
#include "elements.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

using BlasStatus = int;
enum : BlasStatus { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_EXECUTED = 13, NOT_SUPPORTED = 15 };
enum : int { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum : int { OP_N = 0, OP_T = 1 };

// The memory in which products store their sums before the result, as cuBLAS may do.
struct Workspace {
    double* sums = nullptr;
    size_t room = 0;
};

struct Handle {
    CUstream stream = nullptr;
    Workspace workspace;
};

std::set<Handle*>& handles() {
    static std::set<Handle*> all;
    return all;
}

// A column-major matrix, as in cuBLAS.
struct Matrix {
    const void* data;
    int type;
    int64_t leading;
    bool transposed;

    double at(int64_t row, int64_t column) const {
        const int64_t i = transposed ? column + row * leading : row + column * leading;
        switch (type) {
            case R_16F: return f16_to_f32(static_cast<const uint16_t*>(data)[i]);
            case R_16BF: return bf16_to_f32(static_cast<const uint16_t*>(data)[i]);
            default: return static_cast<const float*>(data)[i];
        }
    }
};

bool known(int type) { return type == R_32F || type == R_16F || type == R_16BF; }

void multiply(const Workspace& workspace, int64_t m, int64_t n, int64_t k, double alpha, const Matrix& a,
              const Matrix& b, double beta, float* c, int64_t leading) {
    const int64_t at_once = std::min<int64_t>(m, workspace.room);
    for (int64_t column = 0; column < n; column++) {
        for (int64_t first = 0; first < m; first += at_once) {
            const int64_t count = std::min(at_once, m - first);
            for (int64_t row = 0; row < count; row++) {
                double sum = 0;
                for (int64_t i = 0; i < k; i++) sum += a.at(first + row, i) * b.at(i, column);
                workspace.sums[row] = sum;
            }
            for (int64_t row = 0; row < count; row++) {
                float& out = c[first + row + column * leading];
                // If the factor is 0, the previous value is not read.
                out = static_cast<float>(alpha * workspace.sums[row] + (beta == 0 ? 0 : beta * out));
            }
        }
    }
}

// Enqueues work on a handle's stream. The double allocates no workspace, because a captured product could not
// use it: the caller must set one.
template <typename Work>
BlasStatus enqueue(Handle* handle, Work work) {
    Call call;
    if (handles().count(handle) == 0) return NOT_INITIALIZED;
    if (handle->workspace.room == 0) return NOT_SUPPORTED;
    Device* device = nullptr;
    std::shared_ptr<Stream> stream;
    if (call.current(device) != CUDA_SUCCESS) return NOT_EXECUTED;
    if (find_stream(*device, handle->stream, stream) != CUDA_SUCCESS) return INVALID_VALUE;
    auto in_workspace = [work = std::move(work), workspace = handle->workspace] { return work(workspace); };
    return submit(stream, 0, std::move(in_workspace)) == CUDA_SUCCESS ? SUCCESS : NOT_EXECUTED;
}

}  // namespace

KV_API BlasStatus cublasCreate_v2(Handle** handle) {
    Call call;
    Device* device = nullptr;
    if (call.current(device) != CUDA_SUCCESS) return NOT_INITIALIZED;
    *handle = new Handle;
    handles().insert(*handle);
    return SUCCESS;
}

KV_API BlasStatus cublasDestroy_v2(Handle* handle) {
    Call call;
    if (handles().erase(handle) == 0) return NOT_INITIALIZED;
    delete handle;
    return SUCCESS;
}

KV_API BlasStatus cublasSetStream_v2(Handle* handle, CUstream stream) {
    Call call;
    if (handles().count(handle) == 0) return NOT_INITIALIZED;
    handle->stream = stream;
    handle->workspace = {};
    return SUCCESS;
}

KV_API BlasStatus cublasSetWorkspace_v2(Handle* handle, void* memory, size_t size) {
    Call call;
    if (handles().count(handle) == 0) return NOT_INITIALIZED;
    if (reinterpret_cast<uintptr_t>(memory) % 256 != 0) return INVALID_VALUE;
    handle->workspace = {static_cast<double*>(memory), size / sizeof(double)};
    return SUCCESS;
}

KV_API BlasStatus cublasGemmEx(Handle* handle, int a_operation, int b_operation, int m, int n, int k, const void* alpha,
                           const void* a, int a_type, int a_leading, const void* b, int b_type, int b_leading,
                           const void* beta, void* c, int c_type, int c_leading, int compute, int) {
    constexpr int COMPUTE_32F = 68;
    if (!known(a_type) || !known(b_type) || c_type != R_32F || compute != COMPUTE_32F) return NOT_SUPPORTED;
    if (a_type != b_type) return NOT_SUPPORTED;
    const bool a_turned = a_operation == OP_T, b_turned = b_operation == OP_T;
    if (m < 0 || n < 0 || k < 0 || a_leading < (a_turned ? k : m) || b_leading < (b_turned ? n : k) || c_leading < m) {
        return INVALID_VALUE;
    }
    const float factor = *static_cast<const float*>(alpha), kept = *static_cast<const float*>(beta);
    const Matrix left{a, a_type, a_leading, a_turned}, right{b, b_type, b_leading, b_turned};
    return enqueue(handle, [=](const Workspace& workspace) {
        multiply(workspace, m, n, k, factor, left, right, kept, static_cast<float*>(c), c_leading);
        return Fault{};
    });
}

KV_API BlasStatus cublasSgemmStridedBatched(Handle* handle, int a_operation, int b_operation, int m, int n, int k,
                                        const float* alpha, const float* a, int a_leading, long long a_stride,
                                        const float* b, int b_leading, long long b_stride, const float* beta, float* c,
                                        int c_leading, long long c_stride, int batch) {
    const bool a_turned = a_operation == OP_T, b_turned = b_operation == OP_T;
    if (m < 0 || n < 0 || k < 0 || batch < 0 || a_leading < (a_turned ? k : m) || b_leading < (b_turned ? n : k) ||
        c_leading < m) {
        return INVALID_VALUE;
    }
    const float factor = *alpha, kept = *beta;
    return enqueue(handle, [=](const Workspace& workspace) {
        for (int64_t i = 0; i < batch; i++) {
            const Matrix left{a + i * a_stride, R_32F, a_leading, a_turned};
            const Matrix right{b + i * b_stride, R_32F, b_leading, b_turned};
            multiply(workspace, m, n, k, factor, left, right, kept, c + i * c_stride, c_leading);
        }
        return Fault{};
    });
}
