// The guest: an allocator in front of PyTorch's own CUDA allocator, the host. It serves from the pool's arena, which is one
// block of the host, the requests that the plan knows; all other requests and all other functions are the host's. Built on the
// user's machine against the headers of the user's torch (compiled_library.py); reaches the pool's core through the table of
// functions of torch_guest.hpp.
//
// Once installed the guest stays in front of the host until the process ends, because tensors keep its deleter; without a pool
// it passes everything on. Tensors that the core does not know have the host's deleter and cost nothing at their end, except those of
// private pools: the graph trees of torch.compile compare a tensor's deleter with the allocator's.
#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "guest_history.hpp"

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11 || TORCH_VERSION_MINOR > 14
#error "the guest does not know the allocator of this PyTorch"
#endif

namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;

enum Answer { unknown = 0, planned = 1, recorded = 2, prepare = 3, in_private_pool = 4, returned = 8 };

struct Core {  // mempool_guest_functions of torch_guest.hpp
  int (*concerns)(size_t bytes);
  int (*allocate)(size_t bytes, int device, intptr_t stream, void** address);
  void (*record)(void* address, size_t bytes, int device, intptr_t stream);
  int (*free)(void* address, size_t* bytes, int* device);
  int (*use)(void* address, intptr_t stream);
  void* (*arena_of)(void* address);
  size_t (*wanted)(int device);
  void* (*offer)(int device, void* block, size_t bytes);
  void* (*returned)();
  int (*make_room)(size_t bytes, int device, intptr_t stream, void** address);
  void (*begin_pool)(int device);
  void (*end_pool)(int device);
  void (*empty_cache)();
  int (*usage)(int device, size_t* bytes);
  void (*each_live)(int device, void (*visit)(void* context, void* arena, size_t begin, size_t end, int freed), void* context);
  int (*find)(void* address, size_t* bytes, int* device, intptr_t* stream);
};
const Core* core = nullptr;
cca::CUDAAllocator* host = nullptr;
std::atomic<c10::DeleterFnPtr> host_deleter{nullptr};
std::atomic<bool> host_caches{true};  // false: a program has switched the host's cache off, and the guest passes everything on

// Bytes of the host's blocks beyond the arenas in them.
class Slack {
 public:
  void set(void* block, DeviceIndex device, size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    blocks_[block] = {device, bytes};
  }
  void end(void* block) {
    const std::lock_guard<std::mutex> guard(lock_);
    blocks_.erase(block);
  }
  size_t of(DeviceIndex device) {
    const std::lock_guard<std::mutex> guard(lock_);
    size_t bytes = 0;
    for (const auto& [block, slack] : blocks_) bytes += slack.first == device ? slack.second : 0;
    return bytes;
  }

 private:
  std::mutex lock_;
  std::map<void*, std::pair<DeviceIndex, size_t>> blocks_;
};
Slack& slack = *new Slack;  // never destroyed: as the tensors

std::atomic<bool> handed_back{false};  // a block, since the host's cache was last released

History& history = *new History;  // never destroyed: as the tensors
std::shared_ptr<c10::GatheredContext> gather_for_host() { return history.gather_for_host(); }

// Calls of out-of-memory observers that wait until the program's request is known to fail; null: none wait.
using Calls = std::vector<std::function<void()>>;
thread_local Calls* waiting_calls = nullptr;
std::atomic<bool> has_observers{false};

// While alive, calls of this thread's observers wait in `calls`.
struct CallsWait {
  const bool waits = has_observers.load(std::memory_order_relaxed);
  Calls* const outer;
  explicit CallsWait(Calls* calls) : outer(waits ? std::exchange(waiting_calls, calls) : nullptr) {}
  ~CallsWait() {
    if (waits) waiting_calls = outer;
  }
};

// While alive, the host's history notes entries of this thread as the arena's, and no observer is told of a refusal.
struct ArenaRequest {
  Calls refusals;
  const CallsWait wait{&refusals};
  const bool recorded = history.records();
  const std::string metadata = recorded ? host->getUserMetadata() : "";
  ArenaRequest() {
    if (recorded) host->setUserMetadata(metadata + History::kArena);
  }
  ~ArenaRequest() {
    if (recorded) host->setUserMetadata(metadata);
  }
};

// Captures and private pools that are active. A pool that another thread had before the guest came is not among them.
class ActivePools {
 public:
  void begin(DeviceIndex device, MempoolId_t id) {
    core->begin_pool(device);
    const std::lock_guard<std::mutex> guard(lock_);
    pools_.emplace(device, id);
  }
  void end(DeviceIndex device, MempoolId_t id) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      const auto found = pools_.find({device, id});
      if (found == pools_.end()) return;
      pools_.erase(found);
    }
    core->end_pool(device);
  }
  bool any(DeviceIndex device) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = pools_.lower_bound({device, MempoolId_t{0, 0}});
    return found != pools_.end() && found->first == device;
  }
  // Begin the pools that this thread had before the guest came: a request of the thread is in such a pool's segment.
  void begin_earlier() {
    for (DeviceIndex device = 0; host->initialized() && device < c10::cuda::device_count(); ++device) {
      if (!c10::cuda::hasPrimaryContext(device)) continue;
      const c10::cuda::CUDAGuard guard(device);
      void* const probe = host->raw_alloc(1);
      for (const cca::SegmentInfo& segment : host->snapshot({0, 0}, false).segments) {
        const size_t offset = reinterpret_cast<size_t>(probe) - segment.address;
        if (offset < segment.total_size && segment.owner_private_pool_id != MempoolId_t{0, 0}) {
          begin(device, segment.owner_private_pool_id);
        }
      }
      host->raw_delete(probe);
    }
  }

 private:
  std::mutex lock_;
  std::multiset<std::pair<DeviceIndex, MempoolId_t>> pools_;
};
ActivePools& active = *new ActivePools;  // never destroyed: a capture may end with the process

void hand_back() {
  while (void* const block = core->returned()) {
    const ArenaRequest request;
    slack.end(block);
    host->raw_delete(block);
    handed_back.store(true);
  }
}

// Report a planned tensor to the profiler (a negative size: freed) and to CUDA's sanitizer, as the host does for its own.
void report(void* address, int64_t bytes, DeviceIndex device) {
  if (c10::memoryProfilingEnabled()) {
    const auto stats = cca::get()->getDeviceStats(device);
    c10::reportMemoryUsageToProfiler(address, bytes, stats.allocated_bytes[0].current, stats.reserved_bytes[0].current,
                                     c10::Device(c10::DeviceType::CUDA, device));
  }
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    if (bytes >= 0) (*interpreter)->trace_gpu_memory_allocation(c10::DeviceType::CUDA, number);
    else (*interpreter)->trace_gpu_memory_deallocation(c10::DeviceType::CUDA, number);
  }
}

// Return true if a live planned tensor begins at the address, with its size, device and stream.
bool is_planned(void* address, History::Tensor* tensor) {
  intptr_t stream = 0;
  if (core->find(address, &tensor->bytes, &tensor->device, &stream) == 0) return false;
  tensor->address = address;
  tensor->stream = reinterpret_cast<void*>(stream);
  return true;
}

// Note the end of a planned tensor in the history, before its memory is free for others.
[[gnu::cold, gnu::noinline]] void note_end(void* address) {
  History::Tensor tensor{nullptr, 0, 0, nullptr, host->getUserMetadata()};
  if (is_planned(address, &tensor)) history.freed(tensor);
}

void release(void* address) {
  size_t bytes = 0;
  int device = 0;
  if (history.knows_any()) note_end(address);
  if (address == nullptr || core->free(address, &bytes, &device) == 0) return host->raw_delete(address);
  report(address, -static_cast<int64_t>(bytes), static_cast<DeviceIndex>(device));
  hand_back();
}

struct Request {
  size_t bytes;
  DeviceIndex device;
  cudaStream_t stream;
  intptr_t number() const { return reinterpret_cast<intptr_t>(stream); }
};

class Guest final : public cca::CUDAAllocator {
 public:
  // A miss looks up device and stream once for both allocators; the host has a deleter of its own without its cache.
  DataPtr allocate(size_t bytes) override {
    if (bytes == 0 || bytes >= kRefused || !host_caches.load()) return host->allocate(bytes);
    const Request request = on_current_stream(bytes);
    const auto [address, answer] = serve(request, [&] { return host->raw_alloc_with_stream(bytes, request.stream); });
    return {address, address, answer == unknown ? host_deleter.load() : &release, c10::Device(c10::DeviceType::CUDA, request.device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void* raw_alloc(size_t bytes) override {
    return bytes == 0 ? nullptr : serve(on_current_stream(bytes), [&] { return host->raw_alloc(bytes); }).address;
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    if (bytes == 0) return nullptr;
    return serve({bytes, current_device(), stream}, [&] { return host->raw_alloc_with_stream(bytes, stream); }).address;
  }
  void raw_delete(void* address) override { release(address); }

  // --- functions about an address

  void recordStream(const DataPtr& tensor, c10::cuda::CUDAStream stream) override {
    if (tensor.get_deleter() != &release) return host->recordStream(tensor, stream);
    if (tensor.get() == nullptr || core->use(tensor.get(), reinterpret_cast<intptr_t>(stream.stream())) != 0) return;
    as_host([&](const DataPtr& own) { host->recordStream(own, stream); }, tensor);
  }
  void* getBaseAllocation(void* address, size_t* bytes) override {
    void* const arena = core->arena_of(address);
    return host->getBaseAllocation(arena != nullptr ? arena : address, bytes);
  }
  cca::ShareableHandle shareIpcHandle(void* address) override {
    void* const arena = core->arena_of(address);
    if (arena == nullptr) return host->shareIpcHandle(address);
    cca::ShareableHandle handle = host->shareIpcHandle(arena);
    handle.offset += static_cast<char*>(address) - static_cast<char*>(arena);
    return handle;
  }

  // --- captures and private pools

  void beginAllocateToPool(DeviceIndex device, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
    active.begin(device, id);
    try {
      host->beginAllocateToPool(device, id, std::move(filter));
    } catch (...) {
      active.end(device, id);
      throw;
    }
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t id) override {
    host->endAllocateToPool(device, id);
    active.end(device, id);
  }
  cca::CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) override {
    cca::CheckpointDelta delta = host->setCheckpointPoolState(device, std::move(state));
    for (DataPtr& tensor : delta.dataptrs_allocd) tensor.compare_exchange_deleter(host_deleter.load(), &release);
    return delta;
  }

  // --- memory as a whole

  void emptyCache(MempoolId_t id) override {
    if (id == MempoolId_t{0, 0}) {  // else of a private pool
      core->empty_cache();
      hand_back();
    }
    host->emptyCache(id);
  }
  // To the host the arena is one large live block; to the program, the planned tensors in the arena are live. Peaks stay the
  // host's: a plan's tensors fill the arena at their peak.
  cca::DeviceStats getDeviceStats(DeviceIndex device) override {
    hand_back();  // a block that the core has released is an arena no more
    cca::DeviceStats stats = host->getDeviceStats(device);
    Usage usage;
    core->each_live(device, &Usage::add, &usage);
    size_t arena = 0;
    const int arenas = core->usage(device, &arena);
    if (arenas == 0) return stats;
    const auto block = static_cast<int64_t>(arena + slack.of(device));
    for (const size_t kind : {kAll, kSmall, kLarge}) {
      const bool has_arena = kind != (arena <= kSmallPool ? kLarge : kSmall);
      const Usage::Sum& planned = usage.sums[kind];
      stats.allocation[kind].current += planned.tensors - planned.freed_tensors - (has_arena ? arenas : 0);
      stats.active[kind].current += planned.tensors - (has_arena ? arenas : 0);
      stats.allocated_bytes[kind].current += planned.bytes - planned.freed_bytes - (has_arena ? block : 0);
      stats.active_bytes[kind].current += planned.bytes - (has_arena ? block : 0);
      stats.requested_bytes[kind].current += planned.requested - (has_arena ? static_cast<int64_t>(arena) : 0);
      stats.inactive_split_bytes[kind].current += has_arena ? block - usage.sums[kAll].bytes : 0;
    }
    return stats;
  }
  cca::SnapshotInfo snapshot(MempoolId_t id, bool traces) override {
    hand_back();
    cca::SnapshotInfo snapshot = host->snapshot(id, traces);
    for (auto& segment : snapshot.segments) {
      const auto device = static_cast<size_t>(segment.device);
      // A history from before the guest has the host's block alone, and what is alive has to agree with the history.
      const bool has_history = device < snapshot.device_traces.size() && !snapshot.device_traces[device].empty();
      if (has_history && !history.records()) continue;
      for (size_t i = 0, address = segment.address; i < segment.blocks.size(); address += segment.blocks[i].size, ++i) {
        if (!segment.blocks[i].allocated || core->arena_of(reinterpret_cast<void*>(address)) == nullptr) continue;
        show_tensors(segment, i, address);
        break;
      }
    }
    for (size_t device = 0; id == MempoolId_t{0, 0} && device < snapshot.device_traces.size(); ++device) {
      history.merge(static_cast<int>(device), snapshot.device_traces[device]);
    }
    return snapshot;
  }

  // --- the host's

  bool initialized() override { return host->initialized(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { host->copy_data(to, from, bytes); }
  void resetAccumulatedStats(DeviceIndex device) override { host->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { host->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return host->getMemoryInfo(device); }
  void init(int devices) override { host->init(devices); }
  double getMemoryFraction(DeviceIndex device) override { return host->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override { host->setMemoryFraction(fraction, device); }
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return host->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override {
    host->enable(value);
    if (value) host_deleter.store(host->raw_deleter());
    host_caches.store(value);
  }
  bool isEnabled() const override { return host->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { host->cacheInfo(device, largest); }
  void releasePool(DeviceIndex device, MempoolId_t id) override { host->releasePool(device, id); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t id) override { return host->getPoolUseCount(device, id); }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<cca::CUDAAllocator> allocator) override {
    host->createOrIncrefPool(device, id, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use) override { host->setUseOnOOM(device, id, use); }
  void setNoSplit(DeviceIndex device, MempoolId_t id) override { host->setNoSplit(device, id); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id, const std::unordered_set<void*>& live) override {
    return host->checkPoolLiveAllocations(device, id, live);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return host->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return host->isHistoryEnabled(); }
  void recordHistory(bool enabled, cca::CreateContextFn context, size_t entries, cca::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    host->recordHistory(enabled, context == nullptr ? nullptr : &gather_for_host, entries, when, clear, skip);
    history.configure(enabled, context, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override { host->recordAnnotation(pairs); }
  void pushCompileContext(std::string& text) override {
    host->pushCompileContext(text);
    history.push_compile_context(text);
  }
  void popCompileContext() override {
    host->popCompileContext();
    history.pop_compile_context();
  }
  void setUserMetadata(const std::string& text) override { host->setUserMetadata(text); }
  std::string getUserMetadata() override { return host->getUserMetadata(); }
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
    has_observers.store(true);
    host->attachOutOfMemoryObserver([observer = std::move(observer)](auto... state) {
      if (waiting_calls == nullptr) observer(state...);
      else waiting_calls->push_back([observer, state...] { observer(state...); });
    });
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    host->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override { host->enablePeerAccess(device, peer); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peers) override {
    return host->memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  std::shared_ptr<cca::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t id) override {
    return host->getCheckpointState(device, id);
  }
  std::string name() override { return host->name(); }

  // --- the host's, in later releases

#if TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(DeviceIndex device) override { host->markCaptureBegin(device); }
  void markCaptureEnd(DeviceIndex device) override { host->markCaptureEnd(device); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) override {
    const bool is_planned = core->arena_of(const_cast<void*>(address)) != nullptr;
    return is_planned ? history.context_of(const_cast<void*>(address)) : host->getContextForPointer(address);
  }
  void attachOomRejectionObserver(cca::OomRejectionObserver observer) override {
    host->attachOomRejectionObserver(std::move(observer));
  }
  DataPtr allocateWithAddress(size_t bytes, void* address) override { return host->allocateWithAddress(bytes, address); }
#endif
#if TORCH_VERSION_MINOR >= 14
  bool supportsUserMetadata() override { return host->supportsUserMetadata(); }
  void annotateMemory(const void* address, const std::string& text) override {
    History::Tensor tensor{nullptr, 0, 0, nullptr, text};
    if (is_planned(const_cast<void*>(address), &tensor)) history.annotated(tensor);
    else host->annotateMemory(address, text);
  }
#endif

 private:
  static constexpr size_t kMostSmall = 1024;  // bytes, of the largest requests that no plan ever has
  static constexpr size_t kRefused = size_t{1} << 60;  // bytes: the host refuses larger requests by a text of its own
  static constexpr size_t kAll = 0, kSmall = 1, kLarge = 2;  // of PyTorch's statistics
  static constexpr size_t kSmallPool = size_t{1} << 20;      // bytes: larger requests are the large pool's
  static constexpr size_t kUnit = 512;           // bytes, of a tensor's place
  static constexpr size_t kSmallPage = size_t{2} << 20;  // bytes, of the small pool's expandable segments

  struct Usage {  // of the arenas, by the pool that the host has for tensors of that size
    struct Sum {
      int64_t tensors = 0, bytes = 0, requested = 0;
      int64_t freed_tensors = 0, freed_bytes = 0;  // that other streams still use
    } sums[3];
    static void add(void* usage, void*, size_t begin, size_t end, int freed) {
      const auto bytes = static_cast<int64_t>((end - begin + kUnit - 1) / kUnit * kUnit);
      for (const size_t kind : {kAll, end - begin <= kSmallPool ? kSmall : kLarge}) {
        Sum& sum = static_cast<Usage*>(usage)->sums[kind];
        ++sum.tensors;
        sum.requested += static_cast<int64_t>(end - begin);
        sum.bytes += bytes;
        sum.freed_tensors += freed;
        sum.freed_bytes += freed * bytes;
      }
    }
  };
  // Replace the arena's block of a segment by one block for each planned tensor and each gap.
  static void show_tensors(cca::SegmentInfo& segment, size_t index, size_t arena) {
    struct Pieces {
      std::vector<cca::BlockInfo> blocks;
      cca::BlockInfo whole;
      size_t arena, until, active, allocated;
      void gap(size_t begin) {
        if (begin > until) blocks.push_back(piece(begin - until, 0, false));
      }
      cca::BlockInfo piece(size_t bytes, size_t requested, bool allocated) const {
        cca::BlockInfo block = whole;
        block.size = bytes;
        block.requested_size = requested;
        block.allocated = allocated;
        block.active = requested != 0;
        return block;
      }
      static void add(void* context, void* base, size_t begin, size_t end, int freed) {
        auto& mine = *static_cast<Pieces*>(context);
        if (reinterpret_cast<size_t>(base) != mine.arena) return;
        mine.gap(begin);
        const size_t bytes = (end - begin + kUnit - 1) / kUnit * kUnit;
        mine.blocks.push_back(mine.piece(bytes, end - begin, freed == 0));
        mine.blocks.back().context_when_allocated = history.context_of(static_cast<char*>(base) + begin);
        mine.until = begin + bytes;
        mine.active += bytes;
        mine.allocated += freed == 0 ? bytes : 0;
      }
    } pieces{{}, segment.blocks[index], arena, 0, 0, 0};
    pieces.whole.context_when_allocated = nullptr;
    const size_t bytes = segment.blocks[index].size;
    core->each_live(segment.device, &Pieces::add, &pieces);
    pieces.gap(bytes);
    segment.allocated_size -= bytes - pieces.allocated;
    segment.active_size -= bytes - pieces.active;
    const auto place = segment.blocks.begin() + static_cast<std::ptrdiff_t>(index);
    segment.blocks.insert(segment.blocks.erase(place), pieces.blocks.begin(), pieces.blocks.end());
  }

  static DeviceIndex current_device() {
    static const bool only_one = c10::cuda::device_count() == 1;
    if (only_one) return 0;
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
  }
  static Request on_current_stream(size_t bytes) {
    const DeviceIndex device = current_device();
    return {bytes, device, c10::cuda::getCurrentCUDAStream(device).stream()};
  }
  // Ask the core for a planned address, after getting the arena from the host if the core needs one.
  static Answer ask(const Request& request, void** address) {
    if (request.bytes <= kMostSmall && core->concerns(request.bytes) == 0) return unknown;
    for (;;) {
      const int said = core->allocate(request.bytes, request.device, request.number(), address);
      if ((said & returned) != 0) hand_back();  // an arena that the core has just released serves the host's next request
      const auto answer = static_cast<Answer>(said & ~returned);
      if (answer == prepare) {
        get_arena(request.device);
        continue;
      }
      if (answer != planned && answer != in_private_pool && handed_back.load() && handed_back.exchange(false)) release_cache();
      return answer;
    }
  }
  // Release the memory of a former arena, which small tensors would otherwise fragment: an iteration that outgrows the plan has its
  // largest buffers last.
  static void release_cache() {
    try {
      empty_cache_of_host();
    } catch (const c10::Error&) {  // a capture has begun
    }
  }
  // The host waits for a segment's own stream before it unmaps pages, but a deleted graph may still run on another stream.
  static void empty_cache_of_host() {
    for (DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
      if (!c10::cuda::hasPrimaryContext(device) || active.any(device)) continue;  // a wait would break a capture
      const c10::cuda::CUDAGuard guard(device);
      c10::cuda::device_synchronize();
    }
    host->emptyCache({0, 0});
  }
  // Return the bytes that the host could give once its cache is released, which frees unused segments, and
  // unused pages of expandable segments. `cached`: the bytes in the host's cache that a release would free.
  static size_t room(DeviceIndex device, size_t cached) {
    constexpr size_t unit = size_t{2} << 20;  // the host's segments are multiples
    const auto reserved = static_cast<size_t>(host->getDeviceStats(device).reserved_bytes[kAll].current);
    const auto [free, total] = host->getMemoryInfo(device);
    const auto most = static_cast<size_t>(host->getMemoryFraction(device) * static_cast<double>(total));
    const size_t stays = reserved - std::min(reserved, cached);
    return std::min(most - std::min(most, stays), free + cached) / unit * unit;
  }
  static size_t releasable(DeviceIndex device) {
    const size_t large_page = c10::CachingAllocator::AcceleratorAllocatorConfig::large_segment_size();
    size_t bytes = 0;
    for (const cca::SegmentInfo& segment : host->snapshot({0, 0}, false).segments) {
      if (segment.device != device || segment.owner_private_pool_id != MempoolId_t{0, 0}) continue;
      const size_t page = !segment.is_expandable ? segment.total_size : segment.is_large ? large_page : kSmallPage;
      size_t begin = 0;  // from the segment's, as `end`
      for (const cca::BlockInfo& block : segment.blocks) {
        const size_t end = begin + block.size, first = (begin + page - 1) / page * page, last = end / page * page;
        if (!block.allocated && !block.active && last > first) bytes += last - first;
        begin = end;
      }
    }
    return bytes;
  }
  // Get the block of the arena from the host, if one is requested. Memory that the host has cached for the time before the plan
  // is released first, but not for a block that would not fit: the host would fill its cache again in another order.
  // The block may have been used on any stream, and any stream will use it: the device is waited for once.
  static void get_arena(DeviceIndex device) {
    const size_t bytes = core->wanted(device);
    if (bytes == 0) return release_cache();
    const ArenaRequest request;
    void* block = nullptr;
    if (bytes <= room(device, releasable(device))) try {
      empty_cache_of_host();
      const int64_t before = host->getDeviceStats(device).allocated_bytes[kAll].current;
      block = host->raw_alloc(bytes);
      const int64_t taken = host->getDeviceStats(device).allocated_bytes[kAll].current - before;
      slack.set(block, device, taken > static_cast<int64_t>(bytes) ? static_cast<size_t>(taken) - bytes : 0);
      c10::cuda::device_synchronize();
    } catch (const c10::Error&) {  // no memory, or a capture that forbids to wait
      drop(block);
      block = nullptr;
    }
    drop(core->offer(device, block, bytes));
  }
  static void drop(void* block) {
    if (block == nullptr) return;
    slack.end(block);
    host->raw_delete(block);
  }
  // After the host has refused: set `address` if the arena has a hole, else release the arena. False: nothing has changed.
  static bool made_room(const Request& request, void** address) {
    const int made = core->make_room(request.bytes, request.device, request.number(), address);
    if (made == 2) hand_back();
    return made != 0;
  }
  struct Served {
    void* address;
    Answer answer;
  };
  // Serve a request from the plan, or by `allocate`, which calls the host.
  template <class Allocate>
  static Served serve(const Request& request, Allocate allocate) {
    void* address = nullptr;
    Answer answer = ask(request, &address);
    Calls refusals;
    if (answer != planned) try {
      const CallsWait wait(&refusals);
      address = allocate();
    } catch (const c10::OutOfMemoryError&) {
      if (!made_room(request, &address)) {
        for (const auto& call : refusals) call();
        throw;
      }
      if (address != nullptr) answer = planned;
      else address = allocate();
    }
    if (answer == planned) {
      report(address, static_cast<int64_t>(request.bytes), request.device);
      if (history.records()) history.allocated({address, request.bytes, request.device, request.stream, host->getUserMetadata()});
    }
    if (answer == recorded) core->record(address, request.bytes, request.device, request.number());
    return {address, answer};
  }
  // Call `act` with the same tensor as the host made it: the host knows its tensors by their deleter.
  template <class Act>
  static void as_host(Act act, const DataPtr& tensor) {
    struct Borrowed {
      DataPtr own;
      ~Borrowed() { own.release_context(); }
    } borrowed{DataPtr(tensor.get(), tensor.get_context(), host_deleter.load(), tensor.device())};
    act(borrowed.own);
  }
};

Guest* guest() {
  static auto* const allocator = new Guest;
  return allocator;
}

}  // namespace

// Put the guest in front of PyTorch's CUDA allocator. 1: the guest is PyTorch's allocator; 0: PyTorch refuses.
extern "C" __attribute__((visibility("default"))) int mempool_guest_install(const void* functions) {
  if (cca::allocator.load() == guest()) return 1;
  if (host != nullptr) return 0;  // another allocator came later, and may pass on to the guest
  core = static_cast<const Core*>(functions);
  host = cca::allocator.load();
  host_deleter.store(host->raw_deleter());
  host_caches.store(host->isEnabled());
  try {
    active.begin_earlier();
  } catch (const c10::Error&) {  // no memory
  }
  cca::allocator.store(guest());
  c10::SetAllocator(c10::DeviceType::CUDA, guest(), 255);
  return c10::GetAllocator(c10::DeviceType::CUDA) == guest() ? 1 : 0;
}

// Hand released blocks back to PyTorch's allocator; there are none before the guest is installed.
extern "C" __attribute__((visibility("default"))) void mempool_guest_hand_back() {
  if (core != nullptr) hand_back();
}

// Share expandable segments by file handles. Before 2.14, PyTorch's fabric handles are misread by receivers that have made no
// tensor, and the release of a shared segment throws.
extern "C" __attribute__((visibility("default"))) void mempool_guest_share_by_files() {
  cca::CUDAAllocatorConfig::set_expandable_segments_handle_type(cca::Expandable_Segments_Handle_Type::POSIX_FD);
}

// Return the settings of PyTorch's allocator, from the environment or as set last, until the next call.
extern "C" __attribute__((visibility("default"))) const char* mempool_guest_settings() {
  static std::string settings;
  settings = c10::CachingAllocator::getAllocatorSettings();
  return settings.c_str();
}
