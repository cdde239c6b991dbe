// Memory of the CUDA runtime: device, host and managed memory, copies and fills.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "runtime/contents.hpp"
#include "runtime/runtime.hpp"

namespace standin {

namespace {

constexpr std::size_t kSmall = std::size_t{1} << 20;  // bytes up to which host memory is cleared by writing to the memory

bool on_device(const void* pointer) {
  std::uintptr_t begin = 0;
  const fake::Allocation* const in = gpu->found(reinterpret_cast<std::uintptr_t>(pointer), begin);
  return in != nullptr && in->kind != fake::kHost;
}

// Give pages back, which read as zero then. False for pages of files and of shared memory, which keep their contents.
bool drop(char* first, std::size_t bytes, std::size_t page) {
  unsigned char resident = 1;
  return madvise(first, bytes, MADV_DONTNEED) == 0 && mincore(first, page, &resident) == 0 && (resident & 1) == 0;
}

// Set host memory to zero without making its pages resident where they are many.
void clear(void* to, std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  auto* const begin = static_cast<char*>(to);
  auto* const end = begin + bytes;
  auto* const first = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page);
  auto* const last = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(end) / page * page);
  if (bytes <= kSmall || !drop(first, static_cast<std::size_t>(last - first), page)) {
    std::memset(to, 0, bytes);
    return;
  }
  std::memset(begin, 0, static_cast<std::size_t>(first - begin));
  std::memset(last, 0, static_cast<std::size_t>(end - last));
}

// Every eighth byte is 0 or 1: as bool, as integer and as a size the values are possible ones.
void draw(void* to, std::size_t bytes) {
  static std::mt19937 generator(0);
  clear(to, bytes);
  if (bytes > kSmall) return;
  auto* const into = static_cast<unsigned char*>(to);
  for (std::size_t i = 0; i < bytes; i += 8) into[i] = generator() & 1;
}

// Ranges of device memory whose bytes are known: small ones with bytes from the host, and ranges of one value that somebody
// promises. Programs and PyTorch itself read bytes of the host back: the buckets of DistributedDataParallel, for one, travel
// through a device. Such a range counts for reads of the same range alone, since what a kernel writes is unknown.
class Known {
 public:
  void add(const void* address, std::size_t bytes) {
    forget(address, bytes);
    if (bytes <= kKept) ranges_[number(address)] = {bytes, kCopied};
  }
  void promise(const void* address, std::size_t bytes, unsigned char value) {
    forget(address, bytes);
    ranges_[number(address)] = {bytes, value};
  }
  void forget(const void* address, std::size_t bytes) {
    const std::uintptr_t begin = number(address);
    auto range = ranges_.lower_bound(begin);
    if (range != ranges_.begin() && std::prev(range)->first + std::prev(range)->second.bytes > begin) --range;
    while (range != ranges_.end() && range->first < begin + bytes) range = ranges_.erase(range);
  }
  // True: the bytes are in the memory.
  bool has(const void* address, std::size_t bytes) const {
    const auto range = ranges_.find(number(address));
    return range != ranges_.end() && range->second.bytes == bytes && range->second.value == kCopied;
  }
  // The value of all bytes; negative: none is promised.
  int promised(const void* address, std::size_t bytes) const {
    auto range = ranges_.upper_bound(number(address));
    if (range == ranges_.begin()) return kCopied;
    --range;
    return number(address) + bytes <= range->first + range->second.bytes ? range->second.value : kCopied;
  }

 private:
  static constexpr std::size_t kKept = std::size_t{64} << 10;  // bytes: larger copies would fill the host's memory
  static constexpr int kCopied = -1;
  struct Contents {
    std::size_t bytes;
    int value;
  };
  static std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }
  std::map<std::uintptr_t, Contents> ranges_;
};
Known& known() {
  static auto* const made = new Known;
  return *made;
}

}  // namespace

void copy_contents(void* to, const void* from, std::size_t bytes) {
  const bool to_device = on_device(to), from_device = on_device(from);
  const int promised = from_device ? known().promised(from, bytes) : -1;
  if (promised >= 0) {
    if (to_device) known().promise(to, bytes, static_cast<unsigned char>(promised));
    else std::memset(to, promised, bytes);
    return;
  }
  const bool readable = !from_device || known().has(from, bytes);
  if (to_device) known().forget(to, bytes);
  if (to_device && readable) known().add(to, bytes);
  const bool moves = to_device ? known().has(to, bytes) : readable;
  if (moves || settings().values == Values::copied) {
    std::memmove(to, from, bytes);
  } else if (!to_device && settings().values == Values::random) {
    draw(to, bytes);
  } else if (!to_device) {
    clear(to, bytes);
  }
}

void fill_contents(void* to, int value, std::size_t bytes) {
  known().forget(to, bytes);
  if (settings().values == Values::copied || !on_device(to)) std::memset(to, value, bytes);
}

int queue_copy(void* to, const void* from, std::size_t bytes, fake::Stream* stream) {
  if (stream == nullptr) return fake::kInvalidHandle;
  fake::Work work{[=] { copy_contents(to, from, bytes); }, {}, nullptr, nullptr};
  // As CUDA does, return once pageable memory has been copied, to other memory or to its destination.
  const bool late = gpu->late && stream->capture == nullptr;
  if (late && gpu->is_pageable(reinterpret_cast<std::uintptr_t>(from))) {
    const auto* const begin = static_cast<const char*>(from);
    const auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    work.run = [=] { copy_contents(to, staged->data(), bytes); };
  }
  work.cost = gpu->copy_cost(reinterpret_cast<std::uintptr_t>(to), reinterpret_cast<std::uintptr_t>(from), bytes);
  if (on_device(to)) work.uses.push_back({reinterpret_cast<std::uintptr_t>(to), bytes, true});
  if (on_device(from)) work.uses.push_back({reinterpret_cast<std::uintptr_t>(from), bytes});
  const int code = gpu->enqueue(stream, std::move(work));
  if (code == fake::kSuccess && late && gpu->is_pageable(reinterpret_cast<std::uintptr_t>(to))) {
    gpu->force(stream, stream->queued);
    gpu->host_waited(*stream);
  }
  return code;
}

int queue_fill(void* to, int value, std::size_t bytes, fake::Stream* stream) {
  if (stream == nullptr) return fake::kInvalidHandle;
  fake::Work work{[=] { fill_contents(to, value, bytes); }, {}, nullptr, nullptr};
  work.cost = gpu->fill_cost(bytes);
  work.uses.push_back({reinterpret_cast<std::uintptr_t>(to), bytes, true});
  return gpu->enqueue(stream, std::move(work));
}

void forget_contents(const void* address) { known().forget(address, 1); }

}  // namespace standin

using namespace standin;

extern "C" int cuCtxSynchronize();
extern "C" int cuStreamSynchronize(Handle stream);

namespace {

int get(void** pointer, std::size_t bytes, fake::Kind kind, const RuntimeCall& call) {
  if (const int code = gpu->unsafe(fake::self().mode)) return noted(code);
  std::uintptr_t address = 0;
  const int code = bytes == 0 ? fake::kSuccess : gpu->allocate(bytes, call.device(), address, kind);
  *pointer = reinterpret_cast<void*>(address);
  return noted(code);
}

int give_back(void* pointer, std::initializer_list<fake::Kind> kinds) {
  if (pointer == nullptr) return fake::kSuccess;
  if (const int code = gpu->unsafe(fake::self().mode)) return noted(code);
  if (const int code = cuCtxSynchronize()) return noted(code);
  return noted(gpu->free(reinterpret_cast<std::uintptr_t>(pointer), kinds));
}

struct PointerAttributes {
  int type, device;
  void *on_device, *on_host;
};
enum MemoryType { kUnregistered = 0, kOfHost = 1, kOfDevice = 2, kOfBoth = 3 };

}  // namespace

EXPORTED int cudaMalloc(void** pointer, std::size_t bytes) {
  RUNTIME("cudaMalloc");
  return get(pointer, bytes, fake::kPlain, call);
}
EXPORTED int cudaFree(void* pointer) {
  RUNTIME("cudaFree");
  return give_back(pointer, {fake::kPlain, fake::kManaged});
}
EXPORTED int cudaMallocAsync(void** pointer, std::size_t bytes, Handle) { return cudaMalloc(pointer, bytes); }
EXPORTED int cudaMallocFromPoolAsync(void** pointer, std::size_t bytes, void*, Handle) { return cudaMalloc(pointer, bytes); }
EXPORTED int cudaFreeAsync(void* pointer, Handle stream) {
  RUNTIME("cudaFreeAsync");
  if (const int code = cuStreamSynchronize(stream)) return noted(code);
  return give_back(pointer, {fake::kPlain});
}
EXPORTED int cudaMallocManaged(void** pointer, std::size_t bytes, unsigned) {
  RUNTIME("cudaMallocManaged");
  return get(pointer, bytes, fake::kManaged, call);
}
EXPORTED int cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  RUNTIME("cudaHostAlloc");
  return get(pointer, bytes, fake::kHost, call);
}
EXPORTED int cudaMallocHost(void** pointer, std::size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
EXPORTED int cudaFreeHost(void* pointer) {
  RUNTIME("cudaFreeHost");
  return give_back(pointer, {fake::kHost});
}
EXPORTED int cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  RUNTIME("cudaHostRegister");
  return noted(gpu->lock(reinterpret_cast<std::uintptr_t>(address), bytes));
}
EXPORTED int cudaHostUnregister(void* address) {
  RUNTIME("cudaHostUnregister");
  return noted(gpu->unlock(reinterpret_cast<std::uintptr_t>(address)));
}
EXPORTED int cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  *on_device = on_host;
  return 0;
}

EXPORTED int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  RUNTIME("cudaMemGetInfo");
  const fake::Device& device = gpu->devices[static_cast<std::size_t>(call.device())];
  *total = device.capacity;
  *free = device.capacity - std::min(device.capacity, device.live_bytes);
  return 0;
}

EXPORTED int cudaPointerGetAttributes(PointerAttributes* into, const void* pointer) {
  RUNTIME("cudaPointerGetAttributes");
  std::uintptr_t begin = 0;
  const fake::Allocation* const in = gpu->found(reinterpret_cast<std::uintptr_t>(pointer), begin);
  auto* const address = const_cast<void*>(pointer);
  *into = {kUnregistered, -2, nullptr, address};
  if (in == nullptr) return 0;
  if (in->kind == fake::kHost) *into = {kOfHost, in->device, address, address};
  if (in->kind == fake::kManaged) *into = {kOfBoth, in->device, address, address};
  if (in->kind == fake::kPlain) *into = {kOfDevice, in->device, address, nullptr};
  if (in->kind == fake::kAddresses) {
    const auto mapping = in->mapped.find(reinterpret_cast<std::uintptr_t>(pointer) / fake::Gpu::kWhole * fake::Gpu::kWhole);
    if (mapping != in->mapped.end()) *into = {kOfDevice, gpu->memories[mapping->second.memory].device, address, nullptr};
  }
  return 0;
}

EXPORTED int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, Handle stream) {
  RUNTIME("cudaMemcpyAsync");
  return noted(queue_copy(to, from, bytes, call.stream(stream)));
}
EXPORTED int cudaMemcpy(void* to, const void* from, std::size_t bytes, int) {
  RUNTIME("cudaMemcpy");
  if (const int code = queue_copy(to, from, bytes, call.stream(0))) return noted(code);
  return noted(cuCtxSynchronize());
}
EXPORTED int cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, Handle stream) {
  return cudaMemcpyAsync(to, from, bytes, 4, stream);
}
EXPORTED int cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                               std::size_t height, int kind, Handle stream) {
  for (std::size_t row = 0; row < height; ++row) {
    const int code = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                                     width, kind, stream);
    if (code != 0) return code;
  }
  return 0;
}
EXPORTED int cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, int) { return 0; }
EXPORTED int cudaMemcpyToSymbolAsync(const void*, const void*, std::size_t, std::size_t, int, Handle) { return 0; }
EXPORTED int cudaMemcpyFromSymbol(void* to, const void*, std::size_t bytes, std::size_t, int) {
  std::memset(to, 0, bytes);
  return 0;
}
EXPORTED int cudaGetSymbolAddress(void** address, const void*) {
  static char symbols[1 << 16];
  *address = symbols;
  return 0;
}
EXPORTED int cudaMemsetAsync(void* to, int value, std::size_t bytes, Handle stream) {
  RUNTIME("cudaMemsetAsync");
  return noted(queue_fill(to, value, bytes, call.stream(stream)));
}
EXPORTED int cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, 0); }

// Promise that all bytes of a range read as one value until the range is written or the promise is taken back.
EXPORTED void mempool_standin_promise(void* address, std::size_t bytes, unsigned char value) {
  RuntimeCall call(NAMED("mempool_standin_promise"));
  known().promise(address, bytes, value);
}
EXPORTED void mempool_standin_forget(void* address, std::size_t bytes) {
  RuntimeCall call(NAMED("mempool_standin_forget"));
  known().forget(address, bytes);
}
// 1: the host has copied these bytes there. 2: they are promised. 0: they are unknown.
EXPORTED int mempool_standin_knows(const void* address, std::size_t bytes) {
  RuntimeCall call(NAMED("mempool_standin_knows"));
  return known().has(address, bytes) ? 1 : known().promised(address, bytes) >= 0 ? 2 : 0;
}

// Pools of the driver, which backend cudaMallocAsync of PyTorch uses: one, of which everything is the device's.
EXPORTED int cudaDeviceGetDefaultMemPool(void** pool, int) {
  static char one;
  *pool = &one;
  return 0;
}
EXPORTED int cudaMemPoolGetAttribute(void*, int attribute, void* value) {
  RUNTIME("cudaMemPoolGetAttribute");
  constexpr int kReservedHigh = 6, kUsedHigh = 8;
  const fake::Device& device = gpu->devices[static_cast<std::size_t>(call.device())];
  const std::size_t bytes = attribute == kReservedHigh || attribute == kUsedHigh ? device.peak_bytes : device.live_bytes;
  const std::uint64_t held = bytes - std::min(bytes, settings().context);  // a context is in no pool
  std::memcpy(value, &held, sizeof held);
  return 0;
}
EXPORTED int cudaMemPoolSetAttribute(void*, int, void*) { return 0; }
EXPORTED int cudaMemPoolSetAccess(void*, const void*, std::size_t) { return 0; }
EXPORTED int cudaMemPoolTrimTo(void*, std::size_t) { return 0; }

// Memory and events of other processes: addresses of the same size here, which count in the other process alone.
namespace {

struct Shared {
  std::uintptr_t address;  // in the process that made the handle
  std::size_t bytes;
  int device;
  char rest[40];
};
static_assert(sizeof(Shared) == 64, "as large as a handle of CUDA");

}  // namespace

EXPORTED int cudaIpcGetMemHandle(Shared* handle, void* pointer) {
  RUNTIME("cudaIpcGetMemHandle");
  std::uintptr_t begin = 0;
  const fake::Allocation* const in = gpu->found(reinterpret_cast<std::uintptr_t>(pointer), begin);
  if (in == nullptr || in->kind != fake::kPlain) return noted(fake::kInvalidValue);
  *handle = {begin, in->bytes, in->device, {}};
  return 0;
}
EXPORTED int cudaIpcOpenMemHandle(void** pointer, Shared handle, unsigned) {
  RUNTIME("cudaIpcOpenMemHandle");
  std::uintptr_t address = 0;
  const int code = gpu->allocate(handle.bytes, handle.device, address, fake::kShared);
  *pointer = reinterpret_cast<void*>(address);
  return noted(code);
}
EXPORTED int cudaIpcCloseMemHandle(void* pointer) {
  RUNTIME("cudaIpcCloseMemHandle");
  return give_back(pointer, {fake::kShared});
}
EXPORTED int cudaIpcGetEventHandle(Shared* handle, void* event) {
  *handle = {reinterpret_cast<std::uintptr_t>(event), 0, 0, {}};
  return 0;
}
extern "C" int cudaEventCreateWithFlags(fake::Event** event, unsigned);
EXPORTED int cudaIpcOpenEventHandle(fake::Event** event, Shared) { return cudaEventCreateWithFlags(event, 0); }
