// The entry point that launches a kernel.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "block.hpp"
#include "call.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

// Returns the calling worker's runner for kernels.
Runner& my_runner() {
    static thread_local std::unique_ptr<Runner> runner;
    if (runner == nullptr) runner = std::make_unique<Runner>();
    return *runner;
}

std::shared_ptr<void> copy_arguments(const Kernel& kernel, const void* from) {
    const size_t alignment = std::max<size_t>(kernel.argument_alignment, 16);
    const size_t size = (kernel.argument_bytes + alignment - 1) / alignment * alignment;
    std::shared_ptr<void> copy(std::aligned_alloc(alignment, size), std::free);
    std::memcpy(copy.get(), from, kernel.argument_bytes);
    return copy;
}

bool sizes_fit(const Index& grid, const Index& block, const Kernel& kernel) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) return false;
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return false;
    if (block.x > 1024 || block.y > 1024 || block.z > 64) return false;
    const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
    return threads <= 1024 && threads <= kernel.threads;
}

}  // namespace

KV_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream_handle,
                               void** parameters, void** extra) {
    KV_ENTER_STREAM(cuLaunchKernel, stream_handle);
    const auto function = state().functions.find(handle);
    if (function == nullptr || function->device != device) return CUDA_ERROR_INVALID_HANDLE;
    const Kernel& kernel = *function->kernel;
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    const Index grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
    if (parameters == nullptr || parameters[0] == nullptr || !sizes_fit(grid, block, kernel) ||
        shared > function->max_dynamic_shared) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    char line[256];
    std::snprintf(line, sizeof line, "%d %u %skernel %s %ux%ux%u %ux%ux%u %u", device->ordinal, stream->number,
                  stream->capture != nullptr ? "captured " : "", kernel.name, grid_x, grid_y, grid_z, block_x, block_y,
                  block_z, shared);
    trace(line);
    const Launch launch{&kernel, grid, block, shared, copy_arguments(kernel, parameters[0])};
    auto seed = std::make_shared<std::atomic<uint64_t>>(state().launches++ << 20);
    return submit(stream, 0, [launch, seed] { return my_runner().run(launch, (*seed)++); });
}
