// Modules and kernels of the stand-in's driver, its functions by name, and functions that only some programs call.
#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "call.hpp"

using namespace fake;

namespace {

// A kernel of a module, as far as its machine code tells.
struct KernelCode {
  const char* name = "a kernel of a module";
  std::vector<std::size_t> arguments = {};  // bytes of each
  int registers = 0, shared_bytes = 0;
};
using Module = std::map<std::string, KernelCode>;  // empty: an image that is not machine code

// Read the kernels of machine code, an ELF file: `.text.KERNEL`, whose header has the number of registers, `.nv.shared.KERNEL`, and
// `.nv.info.KERNEL` with the attributes, KPARAM_INFO for each argument.
Module read_module(const char* image) {
  constexpr int kWithBytes = 4, kArgument = 0x17;
  Module module;
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return module;
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  const char* const names = image + sections[header->e_shstrndx].sh_offset;
  static auto* const kept = new std::set<std::string>;  // works and faults name kernels
  const auto kernel = [&](const Elf64_Shdr& section, const std::string& prefix) -> KernelCode* {
    const std::string name = names + section.sh_name;
    if (name.compare(0, prefix.size(), prefix) != 0) return nullptr;
    KernelCode& code = module[name.substr(prefix.size())];
    code.name = kept->insert(name.substr(prefix.size())).first->c_str();
    return &code;
  };
  for (const Elf64_Shdr* section = sections; section != sections + header->e_shnum; ++section) {
    if (KernelCode* const code = kernel(*section, ".text.")) code->registers = static_cast<int>(section->sh_info >> 24);
    if (KernelCode* const code = kernel(*section, ".nv.shared.")) code->shared_bytes = static_cast<int>(section->sh_size);
    KernelCode* const code = kernel(*section, ".nv.info.");
    if (code == nullptr) continue;
    const char* const end = image + section->sh_offset + section->sh_size;
    for (const char* at = image + section->sh_offset; at + 4 <= end;) {
      std::uint16_t bytes = 0, number = 0;
      std::uint32_t packed = 0;
      std::memcpy(&bytes, at + 2, sizeof bytes);
      if (at[0] == kWithBytes && at[1] == kArgument) {
        std::memcpy(&number, at + 8, sizeof number);
        std::memcpy(&packed, at + 12, sizeof packed);
        if (code->arguments.size() <= number) code->arguments.resize(number + std::size_t{1});
        code->arguments[number] = packed >> 18;
      }
      at += 4 + (at[0] == kWithBytes ? bytes : 0);
    }
  }
  return module;
}

// Return the function that CUDA's headers map a short name to: the newest of this driver.
void* function_of(const char* name) {
  for (const char* const version : {"_v3", "_v2", ""}) {
    if (void* const found = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str())) return found;
  }
  return nullptr;
}

int launch(const KernelCode* code, Handle handle, void** arguments) {
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  Work work;
  work.name = code->name;
  work.cost = kernel_cost();
  for (std::size_t i = 0; arguments != nullptr && i < code->arguments.size(); ++i) {
    std::uintptr_t word = 0;
    if (code->arguments[i] != sizeof word) continue;
    std::memcpy(&word, arguments[i], sizeof word);
    if (!gpu->is_device(word)) continue;
    work.uses.push_back({word, 1});
    gpu->forget_bytes(word);
  }
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

EXPORTED int cuModuleLoadData(Module** module, const void* image) {
  CALL("cuModuleLoadData");
  *module = new Module(read_module(static_cast<const char*>(image)));
  return 0;
}
EXPORTED int cuModuleLoadDataEx(Module** module, const void* image, unsigned, void*, void*) {
  return cuModuleLoadData(module, image);
}
EXPORTED int cuLibraryLoadData(Module** library, const void* image, void*, void*, unsigned, void*, void*, unsigned) {
  return cuModuleLoadData(library, image);
}
EXPORTED int cuModuleLoad(Module** module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return kFileNotFound;
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  return cuModuleLoadData(module, image.c_str());
}
EXPORTED int cuModuleUnload(Module* module) {
  CALL("cuModuleUnload");
  delete module;
  return 0;
}
EXPORTED int cuModuleGetFunction(const KernelCode** function, const Module* module, const char* name) {
  CALL("cuModuleGetFunction");
  static const KernelCode unknown;
  const auto found = module->find(name);
  *function = found != module->end() ? &found->second : &unknown;
  return found != module->end() || module->empty() ? kSuccess : kNotFound;
}
EXPORTED int cuModuleGetGlobal_v2(std::uintptr_t* address, std::size_t* bytes, Handle, const char*) {
  static char symbol[1 << 16];
  *address = reinterpret_cast<std::uintptr_t>(symbol);
  if (bytes != nullptr) *bytes = sizeof symbol;
  return 0;
}
EXPORTED int cuFuncGetAttribute(int* value, int attribute, const KernelCode* code) {
  constexpr int kMostThreads = 0, kSharedBytes = 1, kRegisters = 4;
  *value = attribute == kMostThreads   ? 1024
           : attribute == kSharedBytes ? code->shared_bytes
           : attribute == kRegisters   ? code->registers
                                       : 0;
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
EXPORTED int cuLaunchKernel(const KernelCode* code, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream,
                            void** arguments, void**) {
  CALL("cuLaunchKernel");
  return launch(code, stream, arguments);
}
EXPORTED int cuLaunchCooperativeKernel(const KernelCode* code, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       Handle stream, void** arguments) {
  CALL("cuLaunchCooperativeKernel");
  return launch(code, stream, arguments);
}
struct LaunchConfiguration {
  unsigned grid[3], block[3], shared;
  Handle stream;
};
EXPORTED int cuLaunchKernelEx(const LaunchConfiguration* with, const KernelCode* code, void** arguments, void**) {
  CALL("cuLaunchKernelEx");
  return launch(code, with->stream, arguments);
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
EXPORTED int cuCtxGetLimit(std::size_t* value, int) {
  *value = 1 << 20;
  return 0;
}
EXPORTED int cuCtxSetLimit(int, std::size_t) { return 0; }
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
