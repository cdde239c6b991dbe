// Kernels of the CUDA runtime: registered, asked about and launched, and never run.
#include "runtime/images.hpp"
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

constexpr int kNoKernelImage = 209;

thread_local Configuration configuration;

// Queue a kernel as work without a range of memory, since the types of a kernel's arguments are unknown here.
int launch(const void* kernel, Handle stream) {
  RUNTIME("cudaLaunchKernel");
  if (architecture_of(kernel) == 0) return noted(kNoKernelImage);
  fake::Stream* const on = call.stream(stream);
  return noted(on == nullptr ? fake::kInvalidHandle : gpu->enqueue(on, fake::Work{}));
}

}  // namespace

EXPORTED int cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t, Handle stream) { return launch(kernel, stream); }
EXPORTED int __cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t, Handle stream) {
  return launch(kernel, stream);
}
EXPORTED int cudaLaunchCooperativeKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t, Handle stream) {
  return launch(kernel, stream);
}
EXPORTED int cudaLaunchKernelExC(const Configuration* with, const void* kernel, void**) { return launch(kernel, with->stream); }

EXPORTED int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}
EXPORTED int cudaGetFuncBySymbol(const void** kernel, const void* symbol) { return __cudaGetKernel(kernel, symbol); }
EXPORTED int cudaFuncSetAttribute(const void*, int, int) { return 0; }
EXPORTED int cudaFuncSetCacheConfig(const void*, int) { return 0; }
EXPORTED int cudaFuncGetAttributes(FunctionAttributes* into, const void* kernel) {
  const int binary = architecture_of(kernel);
  if (binary == 0) return noted(kNoKernelImage);
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
