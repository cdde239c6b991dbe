// The model behind the stand-in for the CUDA driver: devices with memory, contexts, streams as queues, events, captures
// of graphs.
//
// While `late`, queued work is done only when a test lets the stream go on or somebody waits for the stream, so that
// memory used too early is seen. Otherwise work is done as soon as its events allow. Streams order each other by events
// alone, the default stream too, which asks more of a program than CUDA.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

// Bits of the address range that all memory comes from. Sanitizers bear less than a rehearsal of several large devices.
#ifndef FAKE_ADDRESS_BITS
#define FAKE_ADDRESS_BITS 38
#endif

namespace fake {

enum Code {
  kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kDeinitialized = 4, kNoDevice = 100,
  kInvalidDevice = 101, kInvalidContext = 201, kFileNotFound = 301, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kNotSupported = 801, kCaptureUnsupported = 900,
  kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
  kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907, kWrongThread = 908
};
constexpr std::size_t kMostLogged = 100000;
enum Mode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Stream;

struct Range {
  std::uintptr_t begin;
  std::size_t bytes;
  bool writes = false;  // false: reads, or unknown
};

// Number of works by stream that precede an event or a work.
using Clock = std::map<const Stream*, std::uint64_t>;
inline void join(Clock& into, const Clock& other) {
  for (const auto& [stream, works] : other) into[stream] = std::max(into[stream], works);
}

// One recording of an event.
struct Mark {
  Stream* stream = nullptr;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  std::uint64_t position = 0;  // of the recording in its stream's queue
  bool done = false;
  std::shared_ptr<struct Capture> capture;  // set: nothing is queued, and `nodes` are what it comes after
  std::set<int> nodes;
  Clock before;  // what comes before the recording, and the stream's works up to it
  std::shared_ptr<struct TimedWork> timed;  // null: recorded before the clock was started
};

// Modelled time that work needs, and the engine that does it.
struct Cost {
  enum Engine { kKernels, kOut, kBack } engine = kKernels;
  std::int64_t nanoseconds = 0;
  bool open = false;  // of an operation that has not ended, so that the time is unknown
};

struct Work {
  std::function<void()> run;
  std::vector<Range> uses;
  std::shared_ptr<Mark> waits, marks;
  const char* name = "a copy or a fill";
  std::shared_ptr<Cost> cost = nullptr;
};

struct Capture {
  unsigned long long number = 0;  // of the process
  int mode = kGlobal;
  std::thread::id thread;
  Stream* origin = nullptr;
  bool valid = true, over = false;
  bool stale = false;  // memory of its work has been freed, so that a launch would be a fault
  int nodes = 0;
  std::vector<Work> work;  // in the order of the calls, which respects all edges
};

struct Device {
  std::size_t capacity = std::size_t{1} << 40, live_bytes = 0, peak_bytes = 0;
  int primary_retained = 0;
  std::map<int, int> attributes = {{83, 1}, {89, 1}, {102, 1}};  // managed memory, used by host and device at once; pages
  std::list<std::uintptr_t> resident;  // pages of managed memory that are here, the longest unused first
  std::uint64_t page_faults = 0;       // pages that a kernel missed
};

struct Context {
  int device = 0;
  bool primary = false;
};

struct Stream {
  Context* context = nullptr;
  bool blocking = false;  // the legacy default stream waits for it: seen in captures only
  std::deque<Work> queue;
  std::uint64_t queued = 0, done = 0, allowed = 0;  // works ever
  std::shared_ptr<Capture> capture;
  Clock before;           // what comes before the next work
  std::set<int> reached;  // nodes of the capture that come before what is queued next
};

struct Event {
  Context* context = nullptr;
  std::shared_ptr<Mark> mark;
};

enum Kind { kPlain, kManaged, kHost, kAddresses, kShared };  // the last is counted in another process

struct Allocation {
  std::size_t bytes = 0;
  int device = 0;
  std::uintptr_t raw = 0;  // its first page
  std::size_t pages = 0;   // bytes
  Kind kind = kPlain;
  std::map<std::uintptr_t, struct Mapping> mapped = {};  // of addresses, by page
};

struct Mapping {
  unsigned long long memory = 0;
  bool usable = false;  // by its device
  std::set<int> users = {};
};

struct Memory {  // physical
  std::size_t bytes = 0;
  int device = 0, handles = 1, mappings = 0;
};

struct Failure {
  int code = 0, after = 0, times = 0;
};

struct Answer {  // to a call of the driver that was recorded elsewhere
  int code = 0;
  std::size_t first = 0, second = 0;  // outputs, where the function gives them
};

struct Function {  // of the driver, the runtime or a library
  std::string name;
  int calls = 0;
  std::chrono::milliseconds slow{0};
  Failure failure = {};
  std::deque<Answer> answers = {};
};

class Gpu {
 public:
  static constexpr std::size_t kWhole = std::size_t{2} << 20;
  std::recursive_mutex mutex;
  bool initialized = false, gone = false;
  bool late = true;
  // Move and set bytes of memory; a rehearsal replaces both.
  void (*copy)(void* to, const void* from, std::size_t bytes) = [](void* to, const void* from, std::size_t bytes) {
    std::memmove(to, from, bytes);
  };
  void (*fill)(void* to, int value, std::size_t bytes) = [](void* to, int value, std::size_t bytes) {
    std::memset(to, value, bytes);
  };
  void (*forget_bytes)(std::uintptr_t address) = [](std::uintptr_t) {};  // a kernel may write there
  int version = 12080;
  std::size_t granularity = kWhole;  // of pages
  int streams_made = 0;              // by the driver's own function, and not destroyed
  int generation = 1;
  // 0: as drivers do it, 2 MiB for what is as large, 512 bytes for the rest. Else, up to 2048: this and nothing larger.
  std::size_t alignment = 0;
  std::vector<Device> devices = std::vector<Device>(2);
  std::vector<std::string> faults;  // what no correct program does
  std::list<Function> functions;  // in the order of their first mention
  std::set<Event*> events;
  std::map<std::uintptr_t, Allocation> allocations;
  std::map<std::uintptr_t, std::size_t> registered;  // memory of the program that is page-locked, bytes by address
  std::size_t lockable = SIZE_MAX;  // most bytes of the host that can be page-locked
  std::map<unsigned long long, Memory> memories;  // by handle
  unsigned long long next_memory = 1;
  std::vector<std::string> log;  // symbols of the calls, in order
  std::vector<std::string> advice;
  std::vector<std::shared_ptr<Capture>> captures;  // going on
  std::map<int, std::shared_ptr<Capture>> graphs;
  int next_graph = 1;
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Context*> primaries = std::vector<Context*>(2);

  std::unique_ptr<class Order> order;        // null: the order of uses is not checked
  std::unique_ptr<class Timeline> timeline;  // null: work takes no time

  // Return a function's record, which stays at its place.
  Function& function(const char* name) {
    const std::lock_guard<std::recursive_mutex> guard(mutex);
    for (Function& known : functions) {
      if (known.name == name) return known;
    }
    return functions.emplace_back(Function{name});
  }

  bool is_registered(std::uintptr_t address) const {
    const auto next = registered.upper_bound(address);
    return next != registered.begin() && address < std::prev(next)->first + std::prev(next)->second;
  }
  // Memory of the program that is not page-locked: the host waits for copies of it.
  bool is_pageable(std::uintptr_t address) const {
    return (address < memory_ || address - memory_ >= kMemory) && !is_registered(address);
  }
  void fault(const std::string& what) { faults.push_back(what); }

  Context* new_context(int device, bool primary) {
    contexts.push_back(std::make_unique<Context>(Context{device, primary}));
    return contexts.back().get();
  }
  Context* primary(int device) {
    Context*& context = primaries[static_cast<std::size_t>(device)];
    if (context == nullptr) context = new_context(device, true);
    return context;
  }
  Stream* new_stream(Context* context, bool blocking) {
    streams.push_back(std::make_unique<Stream>());
    streams.back()->context = context;
    streams.back()->blocking = blocking;
    return streams.back().get();
  }

  // A handle as the driver takes it: 0 and 1 are the legacy default stream, 2 is the calling thread's own.
  Stream* stream(std::uintptr_t handle, Context* current) {
    if (handle <= 2) {
      const auto thread = handle == 2 ? std::this_thread::get_id() : std::thread::id();
      Stream*& found = defaults_[{current, thread}];
      if (found == nullptr) found = new_stream(current, handle != 2);
      return found;
    }
    for (const auto& made : streams) {
      if (reinterpret_cast<std::uintptr_t>(made.get()) == handle) return made.get();
    }
    fault("an unknown stream");
    return nullptr;
  }
  bool is_legacy(const Stream* stream) const {
    const auto found = defaults_.find({stream->context, std::thread::id()});
    return found != defaults_.end() && found->second == stream;
  }

  // Return whether new work of a stream follows all work of another: the default stream and blocking streams wait for each other.
  bool waits_for(const Stream& stream, const Stream& other) const {
    if (&other == &stream || other.context != stream.context) return false;
    return (is_legacy(&stream) && other.blocking) || (stream.blocking && is_legacy(&other));
  }

  // --- memory

  int take(int device, std::size_t bytes) {
    Device& on = devices[static_cast<std::size_t>(device)];
    if (bytes > on.capacity || on.live_bytes > on.capacity - bytes) return kOutOfMemory;
    on.live_bytes += bytes;
    if (on.live_bytes > on.peak_bytes) on.peak_bytes = on.live_bytes;
    return kSuccess;
  }
  bool may_lock(std::size_t bytes) const {
    std::size_t locked = bytes;
    for (const auto& [begin, size] : registered) locked += size;
    for (const auto& [begin, allocation] : allocations) locked += allocation.kind == kHost ? allocation.bytes : 0;
    return locked <= lockable;
  }
  int lock(std::uintptr_t address, std::size_t bytes) {
    if (registered.count(address) != 0) return kInvalidValue;
    if (!may_lock(bytes)) return kOutOfMemory;
    registered.emplace(address, bytes);
    return kSuccess;
  }
  int unlock(std::uintptr_t address) { return registered.erase(address) == 1 ? kSuccess : kInvalidValue; }
  int allocate(std::size_t bytes, int device, std::uintptr_t& address, Kind kind = kPlain) {
    if (bytes == 0) return kInvalidValue;
    if (bytes > kMemory) return kOutOfMemory;
    const bool whole = kind == kAddresses || kind == kManaged || kind == kShared || (alignment == 0 && bytes >= kWhole);
    const std::size_t offset = whole ? 0 : alignment != 0 ? alignment : 512;
    const std::size_t step = whole ? kWhole : kPage;
    const std::size_t pages = (offset + bytes + kPage - 1) / kPage * kPage;
    std::uintptr_t raw = memory_;  // the lowest place with room, so that addresses are the same in each run
    for (const auto& [begin, other] : allocations) {
      if (other.raw >= raw && other.raw - raw >= pages) break;
      raw = (other.raw + other.pages + step - 1) / step * step;
    }
    if (pages > kMemory || raw - memory_ > kMemory - pages) return kOutOfMemory;
    if (kind == kPlain && take(device, bytes) != kSuccess) return kOutOfMemory;
    if (kind == kHost && !may_lock(bytes)) return kOutOfMemory;
    address = raw + offset;
    allocations[address] = {bytes, device, raw, pages, kind};
    return kSuccess;
  }
  void check_unused(const Range& range) {
    for (const auto& stream : streams) {
      for (const Work& work : stream->queue) {
        if (touches(work, range)) fault("memory is freed that queued work uses");
      }
    }
    for (const auto& capture : captures) note_freed(*capture, range);
    for (const auto& [id, graph] : graphs) note_freed(*graph, range);
  }
  int free(std::uintptr_t address, std::initializer_list<Kind> kinds = {kPlain, kManaged}) {
    const auto found = allocations.find(address);
    if (found == allocations.end() || std::find(kinds.begin(), kinds.end(), found->second.kind) == kinds.end()) {
      fault("memory is freed that is not allocated");
      return kInvalidValue;
    }
    const Allocation& allocation = found->second;
    check_unused({address, allocation.bytes});
    forget_order({address, allocation.bytes});
    if (!allocation.mapped.empty()) fault("address space is freed that memory is mapped to");
    Device& on = devices[static_cast<std::size_t>(allocation.device)];
    if (allocation.kind == kPlain) on.live_bytes -= allocation.bytes;
    for (std::uintptr_t page = address; allocation.kind == kManaged && page < address + allocation.bytes; page += kWhole) {
      leave(on, page);
    }
    forget(allocation);
    allocations.erase(found);
    return kSuccess;
  }
  void forget_all() {
    for (const auto& [address, allocation] : allocations) forget(allocation);
    allocations.clear();
    memories.clear();
    log.clear();
    advice.clear();
  }
  // What lies there: its beginning and itself; null: nothing.
  Allocation* found(std::uintptr_t address, std::uintptr_t& begin) {
    auto found = allocations.upper_bound(address);
    if (found == allocations.begin()) return nullptr;
    --found;
    begin = found->first;
    return address < begin + found->second.bytes ? &found->second : nullptr;
  }
  bool is_allocated(const Range& range) {
    std::uintptr_t begin = 0;
    const Allocation* const in = found(range.begin, begin);
    if (in == nullptr || range.begin + range.bytes > begin + in->bytes) return false;
    if (in->kind != kAddresses) return true;
    std::uintptr_t page = range.begin / kWhole * kWhole;
    for (auto mapping = in->mapped.find(page); page < range.begin + range.bytes; page += kWhole, ++mapping) {
      if (mapping == in->mapped.end() || mapping->first != page || !mapping->second.usable) return false;
    }
    return true;
  }

  // Return whether an address is in live memory of a device.
  bool is_device(std::uintptr_t address) {
    std::uintptr_t begin = 0;
    const Allocation* const in = found(address, begin);
    return in != nullptr && in->kind != kHost && is_allocated({address, 1});
  }

  // --- physical memory, and address space that it is mapped to

  void perhaps_gone(std::map<unsigned long long, Memory>::iterator memory) {
    if (memory->second.handles != 0 || memory->second.mappings != 0) return;
    devices[static_cast<std::size_t>(memory->second.device)].live_bytes -= memory->second.bytes;
    memories.erase(memory);
  }
  int map(std::uintptr_t address, std::size_t bytes, unsigned long long handle) {
    std::uintptr_t begin = 0;
    Allocation* const in = found(address, begin);
    const auto memory = memories.find(handle);
    bool fits = in != nullptr && in->kind == kAddresses && address % kWhole == 0 && address + bytes <= begin + in->bytes;
    fits = fits && memory != memories.end() && memory->second.bytes == bytes;
    const auto next = fits ? in->mapped.lower_bound(address) : decltype(in->mapped.end()){};
    if (!fits || (next != in->mapped.end() && next->first < address + bytes)) {
      fault("memory is mapped to where it cannot be");
      return kInvalidValue;
    }
    for (std::uintptr_t page = address; page < address + bytes; page += kWhole) {
      in->mapped[page] = {handle, false, {}};
      ++memory->second.mappings;
    }
    return kSuccess;
  }
  int unmap(std::uintptr_t address, std::size_t bytes) {
    std::uintptr_t begin = 0;
    Allocation* const in = found(address, begin);
    bool mapped = in != nullptr && bytes % kWhole == 0;
    for (std::uintptr_t page = address; mapped && page < address + bytes; page += kWhole) mapped = in->mapped.count(page) != 0;
    if (!mapped) {
      fault("memory is unmapped otherwise than it was mapped");
      return kInvalidValue;
    }
    check_unused({address, bytes});
    for (std::uintptr_t page = address; page < address + bytes; page += kWhole) {
      const auto memory = memories.find(in->mapped[page].memory);
      in->mapped.erase(page);
      --memory->second.mappings;
      perhaps_gone(memory);
    }
    madvise(reinterpret_cast<void*>(address), bytes, MADV_DONTNEED);
    return kSuccess;
  }

  // --- managed memory: a page is on one device or on none, and the longest unused makes way

  void leave(Device& on, std::uintptr_t page) { on.resident.remove(page); }
  // False: it was not there.
  bool bring(Device& on, std::uintptr_t page) {
    const bool there = std::find(on.resident.begin(), on.resident.end(), page) != on.resident.end();
    for (Device& device : devices) leave(device, page);
    on.resident.push_back(page);
    while (on.resident.size() * kWhole > on.capacity) on.resident.pop_front();
    return there;
  }
  void use(int device, const Range& range, bool ahead) {
    std::uintptr_t begin = 0;
    const Allocation* const in = found(range.begin, begin);
    if (in == nullptr || in->kind != kManaged) return;
    Device& on = devices[static_cast<std::size_t>(device)];
    for (std::uintptr_t page = range.begin / kWhole * kWhole; page < range.begin + range.bytes; page += kWhole) {
      if (!bring(on, page) && !ahead) ++on.page_faults;
    }
  }

  // --- queues

  int enqueue(Stream* stream, Work work) {
    for (const Range& range : work.uses) {
      if (!is_allocated(range)) fault("work is queued on memory that is not allocated");
    }
    if (const int code = blocked_by_capture(stream)) return code;
    if (stream->capture != nullptr) {
      if (!stream->capture->valid) return kCaptureInvalidated;
      stream->reached.insert(stream->capture->nodes++);
      stream->capture->work.push_back(std::move(work));
      return kSuccess;
    }
    check_order(*stream, work);
    add_time(stream, work);
    if (work.marks != nullptr) work.marks->position = stream->queued;
    ++stream->queued;
    const bool ready = !late && stream->queue.empty() && (work.waits == nullptr || work.waits->done);
    stream->queue.push_back(std::move(work));
    if (!late) stream->allowed = stream->queued;
    if (ready) step(*stream);
    return kSuccess;
  }
  void progress() {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t i = 0; i < streams.size(); ++i) {
        while (step(*streams[i])) again = true;
      }
    }
  }
  void finish(Stream* stream) {
    stream->allowed = stream->queued;
    progress();
  }
  // As somebody who waits sees to it: with everything that comes before.
  void force(Stream* stream, std::uint64_t until) {
    if (stream->allowed < until) stream->allowed = until;
    for (progress(); stream->done < until; progress()) {
      const auto& waits = stream->queue.front().waits;
      force(waits->stream, waits->position + 1);
    }
  }

  // --- the order of uses: see order.hpp

  void check_order(Stream& stream, Work& work);
  void forget_order(const Range& range);

  // --- modelled time: see timeline.hpp

  void add_time(Stream* stream, const Work& work);
  // Return the cost of a fill, or of a copy; null: work takes no time.
  std::shared_ptr<Cost> fill_cost(std::size_t bytes) const;
  std::shared_ptr<Cost> copy_cost(std::uintptr_t to, std::uintptr_t from, std::size_t bytes);
  bool has_passed(const Mark& mark);

  // The host has waited for everything on a stream, or for an event.
  void host_waited(const Stream& stream);
  void host_waited(const Mark& mark);

  // --- captures

  void invalidate(Capture& capture) { capture.valid = false; }

  // Calls that a capture in global mode does not bear, unless the thread is relaxed.
  int unsafe(int thread_mode) {
    int code = kSuccess;
    for (const auto& capture : captures) {
      const bool own = capture->thread == std::this_thread::get_id() && capture->mode != kRelaxed;
      const bool harmed = thread_mode != kRelaxed && (own || (thread_mode == kGlobal && capture->mode == kGlobal));
      if (!harmed) continue;
      invalidate(*capture);
      code = kCaptureUnsupported;
    }
    return code;
  }
  bool implicit(const Stream* stream, bool harm) {
    bool found = false;
    for (const auto& other : streams) {
      if (other->capture == nullptr || !other->blocking || other->context != stream->context) continue;
      if (!is_legacy(stream)) continue;
      found = true;
      if (harm) invalidate(*other->capture);
    }
    return found;
  }
  int begin_capture(Stream* stream, int mode) {
    if (stream->capture != nullptr || is_legacy(stream)) return kCaptureUnsupported;
    auto capture = std::make_shared<Capture>();
    capture->number = ++captures_begun_;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    stream->capture = capture;
    stream->reached.clear();
    captures.push_back(std::move(capture));
    return kSuccess;
  }
  // The graph's number, or minus the error.
  int end_capture(Stream* stream) {
    const auto capture = stream->capture;
    if (capture == nullptr || capture->origin != stream) return -kCaptureUnmatched;
    int code = capture->valid ? kSuccess : kCaptureInvalidated;
    for (const auto& other : streams) {
      if (other->capture != capture) continue;
      for (const int node : other->reached) {
        if (capture->valid && stream->reached.count(node) == 0) code = kCaptureUnjoined;
      }
      other->capture = nullptr;
    }
    capture->over = true;
    for (auto it = captures.begin(); it != captures.end();) it = *it == capture ? captures.erase(it) : it + 1;
    if (code != kSuccess) return -code;
    graphs[next_graph] = capture;
    return next_graph++;
  }
  int launch(const Capture& graph, Stream* stream) {
    if (graph.stale) fault("a graph is launched whose memory was freed");
    for (const Work& work : graph.work) {
      if (const int code = enqueue(stream, work)) return code;
    }
    return kSuccess;
  }
  int blocked_by_capture(Stream* stream) { return implicit(stream, true) ? kCaptureImplicit : kSuccess; }

 private:
  static constexpr std::size_t kPage = 4096, kMemory = std::size_t{1} << FAKE_ADDRESS_BITS;

  static std::uintptr_t reserved() {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const mapped = mmap(nullptr, kMemory + kWhole, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    return (reinterpret_cast<std::uintptr_t>(mapped) + kWhole - 1) / kWhole * kWhole;
  }
  static void forget(const Allocation& allocation) {
    madvise(reinterpret_cast<void*>(allocation.raw), allocation.pages, MADV_DONTNEED);
  }
  static bool touches(const Work& work, const Range& range) {
    for (const Range& used : work.uses) {
      if (used.begin < range.begin + range.bytes && range.begin < used.begin + used.bytes) return true;
    }
    return false;
  }
  // PyTorch releases a graph's memory before it destroys the graph, which harms nobody.
  static void note_freed(Capture& graph, const Range& range) {
    for (const Work& work : graph.work) graph.stale = graph.stale || touches(work, range);
  }
  bool step(Stream& stream) {
    if (stream.done >= stream.allowed || stream.queue.empty()) return false;
    if (stream.queue.front().waits != nullptr && !stream.queue.front().waits->done) return false;
    const Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.done;
    bool allocated = true;
    for (const Range& range : work.uses) allocated = allocated && is_allocated(range);
    if (!allocated) fault("work uses memory that is not allocated");
    for (const Range& range : work.uses) use(stream.context->device, range, false);
    if (allocated && work.run) work.run();
    if (work.marks != nullptr) work.marks->done = true;
    return true;
  }

  const std::uintptr_t memory_ = reserved();
  std::map<std::pair<Context*, std::thread::id>, Stream*> defaults_;
  unsigned long long captures_begun_ = 0;
};

}  // namespace fake
