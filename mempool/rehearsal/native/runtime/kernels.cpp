// Kernels of the CUDA runtime: registered, asked about and launched, and never run.
#include <unordered_map>
#include <vector>

#include "runtime/contents.hpp"
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

// Return the memory that a kernel's arguments point to, with one byte each, because how far a kernel goes is unknown. A word of
// the arguments is a pointer if it was an address of live memory in each launch of the kernel, two at least: structures have
// parts that no launch writes, in which stale addresses of the caller's stack lie.
std::vector<fake::Range> uses_of(const KernelTraits& traits, void** arguments) {
  enum Word : unsigned char { unseen, address, other };
  static std::unordered_map<const void*, std::vector<Word>> kernels;
  std::vector<Word>& words = kernels[traits.arguments];
  std::vector<fake::Range> uses;
  std::size_t number = 0;
  for (std::size_t i = 0; i < traits.arguments->size(); ++i) {
    const auto* const bytes = static_cast<const char*>(arguments[i]);
    for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= (*traits.arguments)[i]; at += sizeof(std::uintptr_t)) {
      std::uintptr_t word = 0;
      std::memcpy(&word, bytes + at, sizeof word);
      if (number == words.size()) words.push_back(unseen);
      Word& state = words[number++];
      if (state == other || !gpu->is_device(word)) {
        state = other;
      } else if (state == unseen) {
        state = address;
      } else {
        uses.push_back({word, 1, static_cast<int>(uses.size()) == traits.written});
      }
    }
  }
  return uses;
}

// Forget what is known of the memory at the first live address in an argument, whose size may be unknown: arguments lie on the
// stack of the caller, so that the words behind a short one can be read.
void forget_first(const void* argument) {
  constexpr std::size_t kMost = 1024;  // bytes: more than the calculator of offsets that comes before some pointers
  for (std::size_t at = 0; at < kMost; at += sizeof(std::uintptr_t)) {
    std::uintptr_t word = 0, begin = 0;
    std::memcpy(&word, static_cast<const char*>(argument) + at, sizeof word);
    if (gpu->found(word, begin) != nullptr) return forget_contents(reinterpret_cast<const void*>(word));
  }
}

// Queue a kernel as work that uses what its arguments point to, as far as they are known.
int launch(const void* kernel, Handle stream, void** arguments) {
  RUNTIME("cudaLaunchKernel");
  if (architecture_of(kernel) == 0) return noted(kNoKernelImage);
  fake::Stream* const on = call.stream(stream);
  if (on == nullptr) return noted(fake::kInvalidHandle);
  const KernelTraits traits = traits_of_kernel(kernel);
  fake::Work work;
  work.name = traits.name;
  work.cost = fake::kernel_cost();
  if (traits.arguments != nullptr) work.uses = uses_of(traits, arguments);
  if (traits.output >= 0) forget_first(arguments[traits.output]);
  for (const fake::Range& range : work.uses) {
    if (range.writes) forget_contents(reinterpret_cast<const void*>(range.begin));
  }
  return noted(gpu->enqueue(on, std::move(work)));
}

}  // namespace

EXPORTED int cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void** arguments, std::size_t, Handle stream) {
  return launch(kernel, stream, arguments);
}
EXPORTED int __cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void** arguments, std::size_t, Handle stream) {
  return launch(kernel, stream, arguments);
}
EXPORTED int cudaLaunchCooperativeKernel(const void* kernel, Dimensions, Dimensions, void** arguments, std::size_t, Handle stream) {
  return launch(kernel, stream, arguments);
}
EXPORTED int cudaLaunchKernelExC(const Configuration* with, const void* kernel, void** arguments) {
  return launch(kernel, with->stream, arguments);
}

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
