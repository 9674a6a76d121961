// Entry points for the driver and its devices.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "block.hpp"
#include "call.hpp"

using namespace kvdouble;

namespace {

constexpr size_t default_limit = size_t{2} << 30;
constexpr size_t small_limit = size_t{64} << 20;
constexpr int default_devices = 4;
constexpr int max_devices = 16;

int number_of(const char* variable, int otherwise) {
    const char* text = std::getenv(variable);
    return text == nullptr || *text == 0 ? otherwise : std::atoi(text);
}

void make_devices(int count) {
    for (int i = 0; i < count; i++) {
        auto device = std::make_unique<Device>();
        device->ordinal = i;
        device->lazy = i == 1;
        device->limit = i == 2 ? small_limit : default_limit;
        device->name = std::string("test double (") + (i == 1 ? "lazy" : i == 2 ? "small" : "eager") + ")";
        state().devices.push_back(std::move(device));
    }
}

struct Attribute {
    int number;
    int value;
};
constexpr Attribute attributes[] = {
    {1, 1024},                                 // MAX_THREADS_PER_BLOCK
    {2, 1024},                                 // MAX_BLOCK_DIM_X
    {3, 1024},                                 // MAX_BLOCK_DIM_Y
    {4, 64},                                   // MAX_BLOCK_DIM_Z
    {5, 2147483647},                           // MAX_GRID_DIM_X
    {6, 65535},                                // MAX_GRID_DIM_Y
    {7, 65535},                                // MAX_GRID_DIM_Z
    {8, 48 * 1024},                            // MAX_SHARED_MEMORY_PER_BLOCK
    {9, 65536},                                // TOTAL_CONSTANT_MEMORY
    {10, 32},                                  // WARP_SIZE
    {11, 2147483647},                          // MAX_PITCH
    {12, 65536},                               // MAX_REGISTERS_PER_BLOCK
    {13, 1980000},                             // CLOCK_RATE
    {14, 512},                                 // TEXTURE_ALIGNMENT
    {15, 1},                                   // GPU_OVERLAP
    {16, 132},                                 // MULTIPROCESSOR_COUNT
    {19, 1},                                   // CAN_MAP_HOST_MEMORY
    {31, 1},                                   // CONCURRENT_KERNELS
    {36, 2619000},                             // MEMORY_CLOCK_RATE
    {37, 5120},                                // GLOBAL_MEMORY_BUS_WIDTH
    {38, 50 << 20},                            // L2_CACHE_SIZE
    {39, 2048},                                // MAX_THREADS_PER_MULTIPROCESSOR
    {40, 3},                                   // ASYNC_ENGINE_COUNT
    {41, 1},                                   // UNIFIED_ADDRESSING
    {75, 9},                                   // COMPUTE_CAPABILITY_MAJOR
    {76, 0},                                   // COMPUTE_CAPABILITY_MINOR
    {78, 1},                                   // STREAM_PRIORITIES_SUPPORTED
    {79, 1},                                   // GLOBAL_L1_CACHE_SUPPORTED
    {80, 1},                                   // LOCAL_L1_CACHE_SUPPORTED
    {81, 228 * 1024},                          // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    {82, 65536},                               // MAX_REGISTERS_PER_MULTIPROCESSOR
    {87, 2},                                   // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
    {90, 1},                                   // COMPUTE_PREEMPTION_SUPPORTED
    {91, 1},                                   // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    {97, static_cast<int>(max_shared_bytes)},  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    {99, 1},                                   // HOST_REGISTER_SUPPORTED
    {102, 1},                                  // VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
    {106, 32},                                 // MAX_BLOCKS_PER_MULTIPROCESSOR
    {108, 0},                                  // MAX_PERSISTING_L2_CACHE_SIZE
    {111, 1024},                               // RESERVED_SHARED_MEMORY_PER_BLOCK
    {115, 1},                                  // MEMORY_POOLS_SUPPORTED
};
constexpr int last_attribute = 147;

}  // namespace

namespace kvdouble {

Device* device_at(CUdevice ordinal) {
    const auto& devices = state().devices;
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) return nullptr;
    return devices[static_cast<size_t>(ordinal)].get();
}

CUresult find_device(CUdevice ordinal, Device*& device) {
    if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED;
    device = device_at(ordinal);
    return device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

}  // namespace kvdouble

KV_API CUresult cuInit(unsigned flags) {
    KV_ENTER(cuInit);
    Call call;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (state().initialised) return CUDA_SUCCESS;
    const int count = std::min(number_of("KV_DOUBLE_DEVICES", default_devices), max_devices);
    if (count <= 0) return CUDA_ERROR_NO_DEVICE;
    make_devices(count);
    state().initialised = true;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDriverGetVersion(int* version) {
    KV_ENTER(cuDriverGetVersion);
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = number_of("KV_DOUBLE_DRIVER", 13000);
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetCount(int* count) {
    KV_ENTER_STARTED(cuDeviceGetCount);
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<int>(state().devices.size());
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGet(CUdevice* result, int ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGet, ordinal);
    if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *result = ordinal;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetName, ordinal);
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(name, static_cast<size_t>(length), "%s", device->name.c_str());
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetUuid_v2, ordinal);
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(uuid->bytes, "kv test double ", 15);
    uuid->bytes[15] = static_cast<unsigned char>(ordinal);
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

KV_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceTotalMem_v2, ordinal);
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *bytes = device->limit;
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetAttribute, ordinal);
    if (value == nullptr || attribute < 1 || attribute > last_attribute) return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == 33 ? ordinal + 1 : 0;  // PCI_BUS_ID
    for (const Attribute& known : attributes) {
        if (known.number == attribute) *value = known.value;
    }
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice ordinal) {
    KV_ENTER_ORDINAL(cuDeviceGetPCIBusId, ordinal);
    if (id == nullptr || length < 13) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(ordinal + 1) & 0xff);
    return CUDA_SUCCESS;
}

KV_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer) {
    KV_ENTER_ORDINAL(cuDeviceCanAccessPeer, ordinal);
    KV_TRY(find_device(peer, device));
    if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *can = ordinal != peer;
    return CUDA_SUCCESS;
}

// The double has no tables of internal functions. NVRTC asks for such a table as soon as it finds a driver.
KV_API CUresult cuGetExportTable(const void** table, const CUuuid*) {
    KV_ENTER(cuGetExportTable);
    if (table != nullptr) *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}
