// Modules from PTX text, their functions, and the functions' attributes.
//
// A function exists if the text has an entry with its name and a kernel with that name is linked in. If the
// text states the size of the entry's argument, this must match the kernel's.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "block.hpp"
#include "call.hpp"
#include "memory.hpp"

using namespace kvdouble;

namespace {

const Kernel*& first_kernel() {
    static const Kernel* first = nullptr;
    return first;
}

// Returns the PTX version that a driver accepts, times ten.
int ptx_version_of(int driver) {
    const int major = driver / 1000, minor = driver % 1000 / 10;
    if (major >= 13) return (major - 4) * 10 + minor;
    if (major == 12) return 80 + (minor > 5 ? minor - 1 : minor);
    return (major - 4) * 10 + minor;
}

// Returns the number after a directive, or -1 if there is none. With a minor version, its digit is appended.
int number_after(const std::string& text, const char* directive, bool with_minor) {
    size_t at = text.find(directive);
    if (at == std::string::npos) return -1;
    at = text.find_first_not_of(" \t", at + std::strlen(directive));
    if (at == std::string::npos) return -1;
    char* end = nullptr;
    const long major = std::strtol(text.c_str() + at, &end, 10);
    if (!with_minor) return static_cast<int>(major);
    return static_cast<int>(major * 10 + (*end == '.' ? std::strtol(end + 1, nullptr, 10) : 0));
}

CUresult check_ptx(const std::string& text) {
    const bool version = text.find(".version") != std::string::npos;
    const bool target = text.find(".target") != std::string::npos;
    if (!version && !target) return CUDA_ERROR_INVALID_IMAGE;
    if (!version || !target) return CUDA_ERROR_INVALID_PTX;
    const char* driver = std::getenv("KV_DOUBLE_DRIVER");
    if (number_after(text, ".version", true) >
        ptx_version_of(driver == nullptr || *driver == 0 ? 13000 : std::atoi(driver))) {
        return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    }
    if (number_after(text, ".target sm_", false) > 90) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    return CUDA_SUCCESS;
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$'; }

// Finds the entry with this name, and sets `parameters` to the text in its parentheses.
bool find_entry(const std::string& text, const std::string& name, std::string& parameters) {
    for (size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at + 1)) {
        const size_t start = text.find_first_not_of(" \t\r\n", at + 6);
        if (start == std::string::npos || text.compare(start, name.size(), name) != 0) continue;
        const size_t end = start + name.size();
        if (end < text.size() && is_name(text[end])) continue;
        const size_t open = text.find_first_not_of(" \t\r\n", end);
        parameters.clear();
        if (open != std::string::npos && text[open] == '(') {
            parameters = text.substr(open + 1, text.find(')', open) - open - 1);
        }
        return true;
    }
    return false;
}

// Returns the size of the only parameter in bytes, -1 if there is none, or 0 if there are several or it is
// not a struct.
long parameter_bytes(const std::string& parameters) {
    if (parameters.find(".param") == std::string::npos) return -1;
    const size_t open = parameters.find('[');
    if (open == std::string::npos || parameters.find(',') != std::string::npos) return 0;
    return std::strtol(parameters.c_str() + open + 1, nullptr, 10);
}

CUresult load(CUmodule* result, const void* image) {
    Call call;
    Device* device = nullptr;
    KV_TRY(call.current(device));
    if (result == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto module = std::make_shared<Module>();
    module->device = device;
    module->ptx = static_cast<const char*>(image);
    KV_TRY(check_ptx(module->ptx));
    *result = new_handle<CUmodule>();
    state().modules.entries[*result] = module;
    return CUDA_SUCCESS;
}

CUresult find_function(CUfunction handle, std::shared_ptr<Function>& function) {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    function = state().functions.find(handle);
    return function == nullptr ? CUDA_ERROR_INVALID_HANDLE : function->device->error;
}

// Computes the number of blocks that fit on an SM, limited by threads and shared memory.
CUresult occupancy(int* blocks, CUfunction handle, int threads, size_t shared) {
    Call call;
    std::shared_ptr<Function> function;
    KV_TRY(find_function(handle, function));
    if (blocks == nullptr || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = 0;
    if (static_cast<unsigned>(threads) > std::min(function->kernel->threads, 1024u)) return CUDA_SUCCESS;
    if (shared > function->max_dynamic_shared) return CUDA_SUCCESS;
    const int by_threads = 2048 / ((threads + 31) / 32 * 32);
    const auto by_shared = static_cast<int>(228 * 1024 / (shared + 1024));
    *blocks = std::min({by_threads, by_shared, 32});
    return CUDA_SUCCESS;
}

}  // namespace

namespace kvdouble {

Kernel::Kernel(const char* name, void (*run)(const void*), size_t bytes, size_t alignment, unsigned threads)
    : name(name),
      run(run),
      argument_bytes(bytes),
      argument_alignment(alignment),
      threads(threads),
      next(first_kernel()) {
    first_kernel() = this;
}

const Kernel* find_kernel(const std::string& name) {
    for (const Kernel* kernel = first_kernel(); kernel != nullptr; kernel = kernel->next) {
        if (name == kernel->name) return kernel;
    }
    return nullptr;
}

}  // namespace kvdouble

KV_API CUresult cuModuleLoadData(CUmodule* result, const void* image) {
    KV_ENTER(cuModuleLoadData);
    return load(result, image);
}

KV_API CUresult cuModuleLoadDataEx(CUmodule* result, const void* image, unsigned, int*, void**) {
    KV_ENTER(cuModuleLoadDataEx);
    return load(result, image);
}

KV_API CUresult cuModuleUnload(CUmodule handle) {
    KV_ENTER_STARTED(cuModuleUnload);
    const auto module = state().modules.find(handle);
    if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& [name, function] : module->functions) state().functions.entries.erase(function);
    state().modules.entries.erase(handle);
    return module->device->error;
}

KV_API CUresult cuModuleGetFunction(CUfunction* result, CUmodule handle, const char* name) {
    KV_ENTER_DEVICE(cuModuleGetFunction);
    const auto module = state().modules.find(handle);
    if (module == nullptr || module->device != device) return CUDA_ERROR_INVALID_HANDLE;
    if (result == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const auto known = module->functions.find(name); known != module->functions.end()) {
        *result = known->second;
        return CUDA_SUCCESS;
    }
    std::string parameters;
    const Kernel* kernel = find_kernel(name);
    if (!find_entry(module->ptx, name, parameters)) return CUDA_ERROR_NOT_FOUND;
    if (kernel == nullptr) {
        std::fprintf(stderr, "test double: the PTX has an entry %s, but no kernel of that name is linked in\n", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    const long bytes = parameter_bytes(parameters);
    if (bytes >= 0 && static_cast<size_t>(bytes) != kernel->argument_bytes) {
        std::fprintf(stderr, "test double: the PTX gives kernel %s an argument of %ld bytes, its source one of %zu\n",
                     name, bytes, kernel->argument_bytes);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    auto function = std::make_shared<Function>();
    function->device = device;
    function->module = module;
    function->kernel = kernel;
    *result = new_handle<CUfunction>();
    state().functions.entries[*result] = function;
    module->functions[name] = *result;
    return CUDA_SUCCESS;
}

KV_API CUresult cuModuleGetLoadingMode(int* mode) {
    KV_ENTER(cuModuleGetLoadingMode);
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *mode = 1;  // Eager.
    return CUDA_SUCCESS;
}

KV_API CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction handle) {
    KV_ENTER(cuFuncGetAttribute);
    Call call;
    std::shared_ptr<Function> function;
    KV_TRY(find_function(handle, function));
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case 0: *value = static_cast<int>(std::min(function->kernel->threads, 1024u)); break;
        case 1:
        case 2:
        case 3: *value = 0; break;
        case 4: *value = 32; break;
        case 5:
        case 6: *value = 90; break;
        case 8: *value = static_cast<int>(function->max_dynamic_shared); break;
        case 9: *value = -1; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

KV_API CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
    KV_ENTER(cuFuncSetAttribute);
    Call call;
    std::shared_ptr<Function> function;
    KV_TRY(find_function(handle, function));
    if (attribute == 9) return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (attribute != 8 || value < 0 || static_cast<size_t>(value) > max_shared_bytes) return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared = static_cast<size_t>(value);
    return CUDA_SUCCESS;
}

KV_API CUresult cuFuncGetName(const char** name, CUfunction handle) {
    KV_ENTER(cuFuncGetName);
    Call call;
    std::shared_ptr<Function> function;
    KV_TRY(find_function(handle, function));
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

KV_API CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* size) {
    KV_ENTER(cuFuncGetParamInfo);
    Call call;
    std::shared_ptr<Function> function;
    KV_TRY(find_function(handle, function));
    if (offset == nullptr || index != 0) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    if (size != nullptr) *size = function->kernel->argument_bytes;
    return CUDA_SUCCESS;
}

KV_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle, int threads,
                                                                     size_t shared, unsigned) {
    KV_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
    return occupancy(blocks, handle, threads, shared);
}

KV_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads,
                                                            size_t shared) {
    KV_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    return occupancy(blocks, handle, threads, shared);
}
