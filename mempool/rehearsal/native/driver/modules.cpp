// Modules and kernels of the stand-in's driver, its functions by name, and functions that only some programs call.
#include <dlfcn.h>

#include <cstring>

#include "call.hpp"

using namespace fake;

namespace {

// Return the function that CUDA's headers map a short name to: the newest of this driver.
void* function_of(const char* name) {
  for (const char* const version : {"_v3", "_v2", ""}) {
    if (void* const found = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str())) return found;
  }
  return nullptr;
}

int launch(Handle handle) {
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  Work work;
  work.cost = kernel_cost();
  return gpu->enqueue(stream, std::move(work));
}

}  // namespace

EXPORTED int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  *function = function_of(name);
  if (status != nullptr) *status = *function != nullptr ? 0 : 1;
  return *function != nullptr ? kSuccess : kNotFound;
}
EXPORTED int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
EXPORTED int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long flags, int* status) {
  return cuGetProcAddress_v2(name, function, 0, flags, status);
}
EXPORTED int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* status) {
  return cuGetProcAddress_v2(name, function, 0, flags, status);
}

// A program that is linked with a runtime of its own asks for internal tables, which only the real driver has.
EXPORTED int cuGetExportTable(const void** table, const void*) {
  Dl_info caller{};
  dladdr(__builtin_return_address(0), &caller);
  const char* const library = caller.dli_fname != nullptr ? caller.dli_fname : "a library";
  std::fprintf(stderr, "mempool: %s is linked with a CUDA runtime of its own, which a rehearsal cannot replace\n", library);
  *table = nullptr;
  return kNotSupported;
}

EXPORTED int cuModuleLoadData(Handle* module, const void*) {
  CALL("cuModuleLoadData");
  *module = 1;
  return 0;
}
EXPORTED int cuModuleLoadDataEx(Handle* module, const void* image, unsigned, void*, void*) {
  return cuModuleLoadData(module, image);
}
EXPORTED int cuLibraryLoadData(Handle* library, const void* image, void*, void*, unsigned, void*, void*, unsigned) {
  return cuModuleLoadData(library, image);
}
EXPORTED int cuModuleUnload(Handle) { return 0; }
EXPORTED int cuModuleGetFunction(Handle* function, Handle, const char*) {
  *function = 1;
  return 0;
}
EXPORTED int cuModuleGetGlobal_v2(std::uintptr_t* address, std::size_t* bytes, Handle, const char*) {
  static char symbol[1 << 16];
  *address = reinterpret_cast<std::uintptr_t>(symbol);
  if (bytes != nullptr) *bytes = sizeof symbol;
  return 0;
}
EXPORTED int cuFuncGetAttribute(int* value, int attribute, Handle) {
  *value = attribute == 0 ? 1024 : 0;  // the largest number of threads in a block
  return 0;
}
EXPORTED int cuFuncSetAttribute(Handle, int, int) { return 0; }
EXPORTED int cuFuncSetCacheConfig(Handle, int) { return 0; }
EXPORTED int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle, int threads, std::size_t) {
  *blocks = threads > 0 ? std::max(1, 2048 / threads) : 1;
  return 0;
}
EXPORTED int cuOccupancyMaxActiveClusters(int* clusters, Handle, const void*) {
  *clusters = 1;
  return 0;
}
EXPORTED int cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream, void**,
                            void**) {
  CALL("cuLaunchKernel");
  return launch(stream);
}
EXPORTED int cuLaunchCooperativeKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       Handle stream, void**) {
  CALL("cuLaunchCooperativeKernel");
  return launch(stream);
}
struct LaunchConfiguration {
  unsigned grid[3], block[3], shared;
  Handle stream;
};
EXPORTED int cuLaunchKernelEx(const LaunchConfiguration* with, Handle, void**, void**) {
  CALL("cuLaunchKernelEx");
  return launch(with->stream);
}
EXPORTED int cuTensorMapEncodeTiled(void* map, int, unsigned, void*, const void*, const void*, const void*, const void*, int, int,
                                    int, int) {
  std::memset(map, 0, 128);
  return 0;
}

EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
EXPORTED int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORTED int cuCtxSetCurrent(Context* context) {
  CALL("cuCtxSetCurrent", kInit);
  auto& contexts = self().contexts;
  if (!contexts.empty()) contexts.pop_back();
  if (context != nullptr) contexts.push_back(context);
  return 0;
}
EXPORTED int cuCtxGetDevice(int* device) {
  CALL("cuCtxGetDevice");
  *device = current()->device;
  return 0;
}
EXPORTED int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  std::snprintf(uuid, 16, "stand-in-%d", device);
  return 0;
}
EXPORTED int cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
EXPORTED int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  CALL("cuDeviceTotalMem_v2", kInit);
  *bytes = gpu->devices[static_cast<std::size_t>(device)].capacity;
  return 0;
}
EXPORTED int cuMemGetAddressRange_v2(std::uintptr_t* begin, std::size_t* bytes, std::uintptr_t address) {
  CALL("cuMemGetAddressRange_v2");
  std::uintptr_t first = 0;
  const Allocation* const in = gpu->found(address, first);
  if (in == nullptr) return kInvalidValue;
  if (begin != nullptr) *begin = first;
  if (bytes != nullptr) *bytes = in->bytes;
  return 0;
}
EXPORTED int cuPointerGetAttribute(void* into, int attribute, std::uintptr_t address) {
  CALL("cuPointerGetAttribute");
  constexpr int kMemoryType = 2, kDevicePointer = 3, kDeviceOrdinal = 9;
  std::uintptr_t begin = 0;
  const Allocation* const in = gpu->found(address, begin);
  if (in == nullptr) return kInvalidValue;
  if (attribute == kMemoryType) *static_cast<int*>(into) = in->kind == kHost ? 1 : 2;
  if (attribute == kDevicePointer) *static_cast<std::uintptr_t*>(into) = address;
  if (attribute == kDeviceOrdinal) *static_cast<int*>(into) = in->device;
  return attribute == kMemoryType || attribute == kDevicePointer || attribute == kDeviceOrdinal ? kSuccess : kNotSupported;
}
EXPORTED int cuMemHostRegister_v2(std::uintptr_t address, std::size_t bytes, unsigned) {
  CALL("cuMemHostRegister_v2");
  return gpu->lock(address, bytes);
}
EXPORTED int cuMemHostUnregister(std::uintptr_t address) {
  CALL("cuMemHostUnregister");
  return gpu->unlock(address);
}
EXPORTED int cuMemsetD32Async(std::uintptr_t address, unsigned, std::size_t words, Handle handle) {
  CALL("cuMemsetD32Async");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  Work work{[=] { gpu->fill(reinterpret_cast<void*>(address), 0, 4 * words); }, {{address, 4 * words, true}}, nullptr, nullptr};
  work.cost = gpu->fill_cost(4 * words);
  return gpu->enqueue(stream, std::move(work));
}

// Memory that processes or several devices share, green contexts and waits for values: no device of the stand-in has them.
#define LACKS(symbol) \
  EXPORTED int symbol(...) { return kNotSupported; }
LACKS(cuMemGetHandleForAddressRange)
LACKS(cuMemImportFromShareableHandle)
LACKS(cuMemRetainAllocationHandle)
LACKS(cuMemGetAllocationPropertiesFromHandle)
LACKS(cuCtxFromGreenCtx)
LACKS(cuGreenCtxCreate)
LACKS(cuGreenCtxDestroy)
LACKS(cuGreenCtxStreamCreate)
LACKS(cuDevResourceGenerateDesc)
LACKS(cuDeviceGetDevResource)
LACKS(cuDevSmResourceSplitByCount)
LACKS(cuMulticastAddDevice)
LACKS(cuMulticastBindMem)
LACKS(cuMulticastCreate)
LACKS(cuMulticastUnbind)
LACKS(cuStreamWriteValue32_v2)
LACKS(cuStreamWaitValue32_v2)
