// Kernels of the CUDA runtime: registered, asked about and launched, and never run.
#include "runtime/runtime.hpp"

using namespace standin;

namespace {

struct Dimensions {
  unsigned x, y, z;
};
struct Configuration {
  Dimensions grid, block;
  std::size_t shared;
  Handle stream;
};
struct FunctionAttributes {
  std::size_t shared, constant, local;
  int threads, registers, ptx, binary, cache, dynamic_shared, carveout;
};

thread_local Configuration configuration;

// Queue a kernel as work without a range of memory, since the types of a kernel's arguments are unknown here.
int launch(Handle stream) {
  RUNTIME("cudaLaunchKernel");
  fake::Stream* const on = call.stream(stream);
  return noted(on == nullptr ? fake::kInvalidHandle : gpu->enqueue(on, fake::Work{}));
}

}  // namespace

EXPORTED int cudaLaunchKernel(const void*, Dimensions, Dimensions, void**, std::size_t, Handle stream) { return launch(stream); }
EXPORTED int __cudaLaunchKernel(const void*, Dimensions, Dimensions, void**, std::size_t, Handle stream) {
  return launch(stream);
}
EXPORTED int cudaLaunchCooperativeKernel(const void*, Dimensions, Dimensions, void**, std::size_t, Handle stream) {
  return launch(stream);
}
EXPORTED int cudaLaunchKernelExC(const Configuration* with, const void*, void**) { return launch(with->stream); }

EXPORTED int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}
EXPORTED int cudaGetFuncBySymbol(const void** kernel, const void* symbol) { return __cudaGetKernel(kernel, symbol); }
EXPORTED int cudaFuncSetAttribute(const void*, int, int) { return 0; }
EXPORTED int cudaFuncSetCacheConfig(const void*, int) { return 0; }
EXPORTED int cudaFuncGetAttributes(FunctionAttributes* into, const void*) {
  const int binary = 10 * settings().major + settings().minor;
  *into = {0, 0, 0, 1024, 32, binary, binary, 0, 48 << 10, -1};
  return 0;
}
EXPORTED int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, std::size_t,
                                                                    unsigned) {
  *blocks = threads > 0 ? std::max(1, 2048 / threads) : 1;
  return 0;
}
EXPORTED int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
EXPORTED int cudaOccupancyMaxActiveClusters(int* clusters, const void*, const void*) {
  *clusters = settings().processors;
  return 0;
}

EXPORTED unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, std::size_t shared, Handle stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
EXPORTED int __cudaPopCallConfiguration(Dimensions* grid, Dimensions* block, std::size_t* shared, Handle* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return 0;
}

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
EXPORTED void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int, int) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
