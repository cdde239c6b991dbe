// A CUDA driver without a GPU: the driver's symbols on the model of fake_gpu.hpp, and fake_* for the test to set up,
// let streams go on, and look.

#include <algorithm>
#include <cstring>

#include "fake_gpu.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using fake::Context;
using fake::Event;
using fake::Mark;
using fake::Stream;
using fake::Work;
using Handle = std::uintptr_t;

fake::Gpu* gpu = new fake::Gpu;  // never destroyed: calls come until the process has ended

struct Thread {
  int generation = 0;
  int mode = fake::kGlobal;
  std::vector<Context*> contexts;
};

Thread& self() {
  thread_local Thread thread;
  if (thread.generation != gpu->generation) thread = Thread{gpu->generation, fake::kGlobal, {}};
  return thread;
}

Context* current() { return self().contexts.empty() ? nullptr : self().contexts.back(); }

enum Needs { kNothing, kInit, kContext };

// Every call of the driver: counted, refused on demand, and by the driver's own rules.
class Call {
 public:
  explicit Call(const char* symbol, Needs needs = kContext) : guard_((sleep(symbol), gpu->mutex)) {
    ++gpu->calls[symbol];
    if (gpu->log.size() < fake::kMostLogged) gpu->log.emplace_back(symbol);
    const auto found = gpu->failures.find(symbol);
    if (gpu->gone) {
      refused_ = fake::kDeinitialized;
    } else if (needs != kNothing && !gpu->initialized) {
      refused_ = fake::kNotInitialized;
    } else if (found != gpu->failures.end() && found->second.after-- <= 0 && found->second.times-- > 0) {
      refused_ = found->second.code;
    } else if (needs == kContext && current() == nullptr) {
      refused_ = fake::kInvalidContext;
      gpu->fault(std::string(symbol) + " without a current context");
    }
  }
  int refused() const { return refused_; }

 private:
  // Others may call meanwhile.
  static void sleep(const char* symbol) {
    std::chrono::milliseconds time{0};
    {
      const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
      const auto found = gpu->slow.find(symbol);
      if (found != gpu->slow.end()) time = found->second;
    }
    if (time.count() != 0) std::this_thread::sleep_for(time);
  }

  std::lock_guard<std::recursive_mutex> guard_;
  int refused_ = 0;
};

#define CALL(...)              \
  const Call call(__VA_ARGS__); \
  if (call.refused() != 0) return call.refused()

Event* known(Event* event) {
  if (gpu->events.count(event) != 0) return event;
  gpu->fault("an unknown event");
  return nullptr;
}

// To ask a captured event breaks the capture that it belongs to.
int ask(const Event* event) {
  if (event->mark != nullptr && event->mark->capture != nullptr) {
    gpu->invalidate(*event->mark->capture);
    return fake::kCapturedEvent;
  }
  return gpu->unsafe(self().mode);
}

int queue_bytes(Handle handle, std::vector<fake::Range> uses, std::function<void()> run) {
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return fake::kInvalidHandle;
  return gpu->enqueue(stream, Work{std::move(run), std::move(uses), nullptr, nullptr});
}

const std::map<int, const char*> kNames = {{0, "CUDA_SUCCESS"},
                                           {1, "CUDA_ERROR_INVALID_VALUE"},
                                           {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                           {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                           {4, "CUDA_ERROR_DEINITIALIZED"},
                                           {100, "CUDA_ERROR_NO_DEVICE"},
                                           {101, "CUDA_ERROR_INVALID_DEVICE"},
                                           {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                           {400, "CUDA_ERROR_INVALID_HANDLE"},
                                           {719, "CUDA_ERROR_LAUNCH_FAILED"},
                                           {800, "CUDA_ERROR_NOT_PERMITTED"},
                                           {801, "CUDA_ERROR_NOT_SUPPORTED"},
                                           {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                           {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
                                           {907, "CUDA_ERROR_CAPTURED_EVENT"}};

}  // namespace

// --- the driver

EXPORTED int cuInit(unsigned int) {
  CALL("cuInit", kNothing);
  gpu->initialized = true;
  return gpu->devices.empty() ? fake::kNoDevice : fake::kSuccess;
}

EXPORTED int cuGetErrorName(int code, const char** name) {
  const auto found = kNames.find(code);
  *name = found != kNames.end() ? found->second : nullptr;
  return found != kNames.end() ? fake::kSuccess : fake::kInvalidValue;
}

EXPORTED int cuGetErrorString(int, const char** text) {
  *text = "of the fake driver";
  return 0;
}

EXPORTED int cuDeviceGetCount(int* count) {
  CALL("cuDeviceGetCount", kInit);
  *count = static_cast<int>(gpu->devices.size());
  return 0;
}

EXPORTED int cuDeviceGet(int* device, int index) {
  CALL("cuDeviceGet", kInit);
  *device = index;
  return index >= 0 && index < static_cast<int>(gpu->devices.size()) ? fake::kSuccess : fake::kInvalidDevice;
}

EXPORTED int cuDeviceGetName(char* name, int length, int device) {
  CALL("cuDeviceGetName", kInit);
  std::strncpy(name, ("Fake GPU " + std::to_string(device)).c_str(), static_cast<std::size_t>(length));
  return 0;
}

EXPORTED int cuDevicePrimaryCtxRetain(Context** context, int device) {
  CALL("cuDevicePrimaryCtxRetain", kInit);
  if (const int code = gpu->unsafe(self().mode)) return code;
  ++gpu->devices[static_cast<std::size_t>(device)].primary_retained;
  *context = gpu->primary(device);
  return 0;
}

EXPORTED int cuCtxGetCurrent(Context** context) {
  CALL("cuCtxGetCurrent", kInit);
  *context = current();
  return 0;
}

EXPORTED int cuCtxPushCurrent_v2(Context* context) {
  CALL("cuCtxPushCurrent_v2", kInit);
  self().contexts.push_back(context);
  return 0;
}

EXPORTED int cuCtxPopCurrent_v2(Context** context) {
  CALL("cuCtxPopCurrent_v2", kInit);
  if (self().contexts.empty()) return fake::kInvalidContext;
  *context = current();
  self().contexts.pop_back();
  return 0;
}

EXPORTED int cuCtxSynchronize() {
  CALL("cuCtxSynchronize");
  int code = 0;
  for (const auto& stream : gpu->streams) {
    if (stream->context != current() || stream->capture == nullptr) continue;
    gpu->invalidate(*stream->capture);
    code = fake::kCaptureUnsupported;
  }
  if (code != 0) return code;
  for (std::size_t i = 0; i < gpu->streams.size(); ++i) {
    if (gpu->streams[i]->context == current()) gpu->force(gpu->streams[i].get(), gpu->streams[i]->queued);
  }
  return 0;
}

EXPORTED int cuMemAlloc_v2(std::uintptr_t* address, std::size_t bytes) {
  CALL("cuMemAlloc_v2");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->allocate(bytes, current()->device, *address);
}

EXPORTED int cuMemFree_v2(std::uintptr_t address) {
  CALL("cuMemFree_v2");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->free(address);
}

EXPORTED int cuDriverGetVersion(int* version) {
  CALL("cuDriverGetVersion", kNothing);
  *version = gpu->version;
  return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALL("cuDeviceGetAttribute", kInit);
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return fake::kInvalidDevice;
  *value = gpu->devices[static_cast<std::size_t>(device)].attributes[attribute];
  return 0;
}

EXPORTED int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  CALL("cuDeviceCanAccessPeer", kInit);
  *can = device != peer;
  return 0;
}

// Pages, which old drivers lack

#ifndef FAKE_WITHOUT_PAGES
struct Prop {
  int type, shared_as, place_type, device;
  void* of_windows;
  unsigned char flags[8];
};
struct Access {
  int place_type, device, flags;
};
static_assert(sizeof(Prop) == 32 && sizeof(Access) == 12, "as the driver has them");

EXPORTED int cuMemGetAllocationGranularity(std::size_t* bytes, const Prop* prop, int) {
  CALL("cuMemGetAllocationGranularity", kInit);
  if (prop->type != 1 || prop->place_type != 1) return fake::kInvalidValue;
  *bytes = gpu->granularity;
  return 0;
}

EXPORTED int cuMemAddressReserve(std::uintptr_t* address, std::size_t bytes, std::size_t alignment, std::uintptr_t,
                                 unsigned long long) {
  CALL("cuMemAddressReserve", kInit);
  if (bytes % fake::Gpu::kWhole != 0 || (alignment & (alignment - 1)) != 0) return fake::kInvalidValue;
  return gpu->allocate(bytes, 0, *address, fake::kAddresses);
}

EXPORTED int cuMemAddressFree(std::uintptr_t address, std::size_t bytes) {
  CALL("cuMemAddressFree", kInit);
  if (gpu->allocations.count(address) != 0 && gpu->allocations[address].bytes != bytes) {
    gpu->fault("address space is freed otherwise than it was reserved");
  }
  return gpu->free(address, {fake::kAddresses});
}

EXPORTED int cuMemCreate(unsigned long long* handle, std::size_t bytes, const Prop* prop, unsigned long long) {
  CALL("cuMemCreate", kInit);
  if (prop->type != 1 || prop->place_type != 1 || bytes % fake::Gpu::kWhole != 0) return fake::kInvalidValue;
  if (const int code = gpu->take(prop->device, bytes)) return code;
  *handle = gpu->next_memory++;
  gpu->memories[*handle] = {bytes, prop->device, 1, 0};
  return 0;
}

EXPORTED int cuMemRelease(unsigned long long handle) {
  CALL("cuMemRelease", kInit);
  const auto found = gpu->memories.find(handle);
  if (found == gpu->memories.end() || found->second.handles == 0) {
    gpu->fault("a handle of memory is released twice");
    return fake::kInvalidValue;
  }
  --found->second.handles;
  gpu->perhaps_gone(found);
  return 0;
}

EXPORTED int cuMemMap(std::uintptr_t address, std::size_t bytes, std::size_t offset, unsigned long long handle,
                      unsigned long long) {
  CALL("cuMemMap", kInit);
  return offset != 0 ? fake::kInvalidValue : gpu->map(address, bytes, handle);
}

EXPORTED int cuMemUnmap(std::uintptr_t address, std::size_t bytes) {
  CALL("cuMemUnmap", kInit);
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->unmap(address, bytes);
}

EXPORTED int cuMemSetAccess(std::uintptr_t address, std::size_t bytes, const Access* access, std::size_t count) {
  CALL("cuMemSetAccess", kInit);
  std::uintptr_t begin = 0;
  fake::Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || count == 0 || access[0].flags != 3) return fake::kInvalidValue;
  for (std::uintptr_t page = address; page < address + bytes; page += fake::Gpu::kWhole) {
    if (in->mapped.count(page) == 0) {
      gpu->fault("access to where no memory is mapped");
      return fake::kInvalidValue;
    }
    fake::Mapping& mapping = in->mapped[page];
    const int owner = gpu->memories[mapping.memory].device;
    mapping.usable = std::any_of(access, access + count, [&](const Access& one) { return one.device == owner; });
    mapping.users.clear();
    for (const Access* one = access; one != access + count; ++one) mapping.users.insert(one->device);
  }
  return 0;
}

#endif  // FAKE_WITHOUT_PAGES

// Managed and host memory

EXPORTED int cuMemAllocManaged(std::uintptr_t* address, std::size_t bytes, unsigned int flags) {
  CALL("cuMemAllocManaged");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return flags != 1 ? fake::kInvalidValue : gpu->allocate(bytes, current()->device, *address, fake::kManaged);
}

EXPORTED int cuMemAdvise(std::uintptr_t address, std::size_t bytes, int advice, int device) {
  CALL("cuMemAdvise");
  std::uintptr_t begin = 0;
  const fake::Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || in->kind != fake::kManaged || address + bytes > begin + in->bytes) return fake::kInvalidValue;
  gpu->advice.push_back(std::to_string(address) + " " + std::to_string(bytes) + " " + std::to_string(advice) + " " +
                        std::to_string(device));
  return 0;
}

EXPORTED int cuMemPrefetchAsync(std::uintptr_t address, std::size_t bytes, int device, Handle handle) {
  CALL("cuMemPrefetchAsync");
  Stream* const stream = gpu->stream(handle, current());
  std::uintptr_t begin = 0;
  const fake::Allocation* const in = gpu->found(address, begin);
  if (in == nullptr || in->kind != fake::kManaged || address + bytes > begin + in->bytes || device != current()->device) {
    gpu->fault("a prefetch of what is not managed memory");
    return fake::kInvalidValue;
  }
  gpu->use(device, {address, bytes}, true);  // at once: it is only a question of when
  return stream == nullptr ? fake::kInvalidHandle : fake::kSuccess;
}

EXPORTED int cuStreamCreate(Stream** stream, unsigned int flags) {
  CALL("cuStreamCreate");
  *stream = gpu->new_stream(current(), (flags & 1) == 0);
  ++gpu->streams_made;
  return 0;
}

EXPORTED int cuStreamDestroy_v2(Stream* stream) {
  CALL("cuStreamDestroy_v2");
  gpu->force(stream, stream->queued);
  --gpu->streams_made;
  return 0;
}

EXPORTED int cuMemHostAlloc(std::uintptr_t* address, std::size_t bytes, unsigned int flags) {
  CALL("cuMemHostAlloc");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return flags != 1 ? fake::kInvalidValue : gpu->allocate(bytes, current()->device, *address, fake::kHost);
}

EXPORTED int cuMemFreeHost(std::uintptr_t address) {
  CALL("cuMemFreeHost");
  if (const int code = gpu->unsafe(self().mode)) return code;
  return gpu->free(address, {fake::kHost});
}

EXPORTED int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  CALL("cuMemGetInfo_v2");
  const fake::Device& device = gpu->devices[static_cast<std::size_t>(current()->device)];
  *total = device.capacity;
  *free = device.capacity - device.live_bytes;
  return 0;
}

EXPORTED int cuMemcpyAsync(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, Handle stream) {
  CALL("cuMemcpyAsync");
  return queue_bytes(stream, {{to, bytes}, {from, bytes}}, [=] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
}

EXPORTED int cuMemsetD8Async(std::uintptr_t address, unsigned char value, std::size_t bytes, Handle stream) {
  CALL("cuMemsetD8Async");
  return queue_bytes(stream, {{address, bytes}}, [=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
}

EXPORTED int cuEventCreate(Event** event, unsigned int flags) {
  CALL("cuEventCreate");
  if ((flags & 2) == 0) gpu->fault("an event that takes the time");
  *event = new Event{current(), nullptr};
  gpu->events.insert(*event);
  return 0;
}

EXPORTED int cuEventDestroy_v2(Event* event) {
  CALL("cuEventDestroy_v2");
  if (known(event) == nullptr) return fake::kInvalidHandle;
  gpu->events.erase(event);
  delete event;
  return 0;
}

EXPORTED int cuEventRecord(Event* event, Handle handle) {
  CALL("cuEventRecord");
  Stream* const stream = gpu->stream(handle, current());
  if (known(event) == nullptr || stream == nullptr || stream->context != event->context) return fake::kInvalidHandle;
  if (const int code = gpu->blocked_by_capture(stream)) return code;
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return fake::kCaptureInvalidated;
    mark->capture = stream->capture;
    mark->nodes = stream->reached;
  } else if (const int code = gpu->enqueue(stream, Work{nullptr, {}, nullptr, mark})) {
    return code;
  }
  event->mark = std::move(mark);
  return 0;
}

EXPORTED int cuEventQuery(Event* event) {
  CALL("cuEventQuery");
  if (known(event) == nullptr) return fake::kInvalidHandle;
  if (const int code = ask(event)) return code;
  return event->mark == nullptr || event->mark->done ? fake::kSuccess : fake::kNotReady;
}

EXPORTED int cuEventSynchronize(Event* event) {
  CALL("cuEventSynchronize");
  if (known(event) == nullptr) return fake::kInvalidHandle;
  if (const int code = ask(event)) return code;
  if (event->mark != nullptr) gpu->force(event->mark->stream, event->mark->position + 1);
  return 0;
}

EXPORTED int cuStreamWaitEvent(Handle handle, Event* event, unsigned int) {
  CALL("cuStreamWaitEvent");
  Stream* const stream = gpu->stream(handle, current());
  if (known(event) == nullptr || stream == nullptr) return fake::kInvalidHandle;
  if (event->mark == nullptr) return 0;
  const auto mark = event->mark;
  if (mark->capture == nullptr && stream->capture == nullptr) return gpu->enqueue(stream, Work{nullptr, {}, mark, nullptr});
  if (mark->capture == nullptr) {
    gpu->invalidate(*stream->capture);
    return fake::kCaptureIsolation;
  }
  if (mark->capture->over || !mark->capture->valid) return fake::kCaptureInvalidated;
  if (stream->capture != nullptr && stream->capture != mark->capture) {
    gpu->invalidate(*stream->capture);
    gpu->invalidate(*mark->capture);
    return fake::kCaptureMerge;
  }
  if (stream->capture == nullptr) stream->reached.clear();
  stream->capture = mark->capture;
  stream->reached.insert(mark->nodes.begin(), mark->nodes.end());
  return 0;
}

EXPORTED int cuStreamSynchronize(Handle handle) {
  CALL("cuStreamSynchronize");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return fake::kInvalidHandle;
  if (stream->capture != nullptr) {
    gpu->invalidate(*stream->capture);
    return fake::kCaptureUnsupported;
  }
  if (const int code = gpu->blocked_by_capture(stream)) return code;
  if (const int code = gpu->unsafe(self().mode)) return code;
  gpu->force(stream, stream->queued);
  return 0;
}

EXPORTED int cuStreamIsCapturing(Handle handle, int* status) {
  CALL("cuStreamIsCapturing");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return fake::kInvalidHandle;
  if (gpu->implicit(stream, false)) return fake::kCaptureImplicit;
  *status = stream->capture == nullptr ? 0 : stream->capture->valid ? 1 : 2;
  return 0;
}

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
  CALL("cuThreadExchangeStreamCaptureMode", kInit);
  std::swap(*mode, self().mode);
  return 0;
}

// --- the test

#define LOCKED const std::lock_guard<std::recursive_mutex> guard(gpu->mutex)

EXPORTED void fake_reset(int devices) {
  LOCKED;
  // Everything is forgotten but what the core holds for good: that the driver was initialised.
  gpu->forget_all();
  for (Event* const event : gpu->events) delete event;
  gpu->devices.assign(static_cast<std::size_t>(devices), fake::Device{});
  gpu->primaries.assign(static_cast<std::size_t>(devices), nullptr);
  gpu->events.clear();
  gpu->captures.clear();
  gpu->graphs.clear();
  gpu->faults.clear();
  gpu->calls.clear();
  gpu->failures.clear();
  gpu->slow.clear();
  for (const auto& stream : gpu->streams) *stream = Stream{};  // their handles are not used again
  gpu->alignment = 0;
  gpu->version = 12080;
  gpu->granularity = fake::Gpu::kWhole;
  gpu->streams_made = 0;
  gpu->gone = false;
  ++gpu->generation;
}

EXPORTED void fake_set_capacity(int device, std::size_t bytes) {
  LOCKED;
  gpu->devices[static_cast<std::size_t>(device)].capacity = bytes;
}
EXPORTED void fake_set_attribute(int device, int attribute, int value) {
  LOCKED;
  gpu->devices[static_cast<std::size_t>(device)].attributes[attribute] = value;
}
EXPORTED void fake_set_version(int version) {
  LOCKED;
  gpu->version = version;
}
EXPORTED void fake_set_granularity(std::size_t bytes) {
  LOCKED;
  gpu->granularity = bytes;
}
EXPORTED void fake_set_alignment(std::size_t bytes) {
  LOCKED;
  gpu->alignment = bytes;
}
// After so many more calls of `symbol`, so many fail with `code`.
EXPORTED void fake_fail(const char* symbol, int code, int after, int times) {
  LOCKED;
  gpu->failures[symbol] = {code, after, times};
}
EXPORTED void fake_slow(const char* symbol, int ms) {
  LOCKED;
  gpu->slow[symbol] = std::chrono::milliseconds(ms);
}
EXPORTED void fake_shut_down() {
  LOCKED;
  gpu->gone = true;
}

EXPORTED Context* fake_primary(int device) {
  LOCKED;
  return gpu->primary(device);
}
EXPORTED Context* fake_context(int device) {
  LOCKED;
  return gpu->new_context(device, false);
}
EXPORTED Context* fake_current() {
  LOCKED;
  return current();
}
EXPORTED int fake_context_depth() {
  LOCKED;
  return static_cast<int>(self().contexts.size());
}
EXPORTED int fake_exchange_mode(int mode) {
  LOCKED;
  std::swap(mode, self().mode);
  return mode;
}
EXPORTED int fake_mode() {
  LOCKED;
  return self().mode;
}
EXPORTED void fake_set_current(Context* context) {
  LOCKED;
  self().contexts.clear();
  if (context != nullptr) self().contexts.push_back(context);
}

EXPORTED Stream* fake_stream(Context* context, int blocking) {
  LOCKED;
  return gpu->new_stream(context, blocking != 0);
}
EXPORTED void fake_finish(Handle handle, Context* context) {
  LOCKED;
  gpu->finish(gpu->stream(handle, context));
}
EXPORTED std::uint64_t fake_pending(Handle handle, Context* context) {
  LOCKED;
  const Stream* const stream = gpu->stream(handle, context);
  return stream->queued - stream->done;
}
// A kernel that writes `value` to all bytes, and one that finds them all so.
EXPORTED int fake_write(Handle handle, Context* context, std::uintptr_t address, std::size_t bytes, unsigned char value) {
  LOCKED;
  Work work{[=] { std::memset(reinterpret_cast<void*>(address), value, bytes); }, {{address, bytes}}, nullptr, nullptr};
  return gpu->enqueue(gpu->stream(handle, context), std::move(work));
}
EXPORTED int fake_expect(Handle handle, Context* context, std::uintptr_t address, std::size_t bytes, unsigned char value) {
  LOCKED;
  const auto look = [=] {
    const auto* const begin = reinterpret_cast<const unsigned char*>(address);
    if (std::any_of(begin, begin + bytes, [=](unsigned char byte) { return byte != value; })) {
      gpu->fault("memory holds something else than a kernel expects");
    }
  };
  return gpu->enqueue(gpu->stream(handle, context), Work{look, {{address, bytes}}, nullptr, nullptr});
}

EXPORTED int fake_begin_capture(Handle handle, Context* context, int mode) {
  LOCKED;
  return gpu->begin_capture(gpu->stream(handle, context), mode);
}
EXPORTED int fake_capture_status(Handle handle, Context* context) {
  LOCKED;
  const Stream* const stream = gpu->stream(handle, context);
  return stream->capture == nullptr ? 0 : stream->capture->valid ? 1 : 2;
}
EXPORTED int fake_fork(Handle origin, Handle side, Context* context) {
  LOCKED;
  const Stream& from = *gpu->stream(origin, context);
  Stream& to = *gpu->stream(side, context);
  if (from.capture == nullptr || to.capture != nullptr) return fake::kInvalidValue;
  to.capture = from.capture;
  to.reached = from.reached;
  return 0;
}
EXPORTED int fake_end_capture(Handle handle, Context* context) {
  LOCKED;
  return gpu->end_capture(gpu->stream(handle, context));
}
EXPORTED int fake_launch(int graph, Handle handle, Context* context) {
  LOCKED;
  const auto found = gpu->graphs.find(graph);
  if (found == gpu->graphs.end()) return fake::kInvalidHandle;
  for (const Work& work : found->second->work) {
    if (const int code = gpu->enqueue(gpu->stream(handle, context), work)) return code;
  }
  return 0;
}
EXPORTED void fake_destroy_graph(int graph) {
  LOCKED;
  gpu->graphs.erase(graph);
}

EXPORTED int fake_calls(const char* symbol) {
  LOCKED;
  const auto found = gpu->calls.find(symbol);
  return found == gpu->calls.end() ? 0 : found->second;
}
EXPORTED std::size_t fake_live_bytes(int device) {
  LOCKED;
  return gpu->devices[static_cast<std::size_t>(device)].live_bytes;
}
EXPORTED std::size_t fake_peak_bytes(int device) {
  LOCKED;
  return gpu->devices[static_cast<std::size_t>(device)].peak_bytes;
}
EXPORTED std::size_t fake_live_allocations() {
  LOCKED;
  return gpu->allocations.size();
}
EXPORTED std::size_t fake_live_memories() {
  LOCKED;
  return gpu->memories.size();
}
EXPORTED int fake_live_streams() {
  LOCKED;
  return gpu->streams_made;
}
EXPORTED std::uint64_t fake_page_faults(int device) {
  LOCKED;
  return gpu->devices[static_cast<std::size_t>(device)].page_faults;
}
EXPORTED int fake_has_access(std::uintptr_t address, int device) {
  LOCKED;
  std::uintptr_t begin = 0;
  fake::Allocation* const in = gpu->found(address, begin);
  return in != nullptr && in->mapped.count(address) != 0 && in->mapped[address].users.count(device) != 0;
}
EXPORTED std::size_t fake_logged() {
  LOCKED;
  return gpu->log.size();
}
EXPORTED void fake_log(std::size_t index, char* text, std::size_t bytes) {
  LOCKED;
  std::snprintf(text, bytes, "%s", gpu->log.at(index).c_str());
}
EXPORTED std::size_t fake_advised() {
  LOCKED;
  return gpu->advice.size();
}
EXPORTED void fake_advice(std::size_t index, char* text, std::size_t bytes) {
  LOCKED;
  std::snprintf(text, bytes, "%s", gpu->advice.at(index).c_str());
}
EXPORTED std::size_t fake_live_events() {
  LOCKED;
  return gpu->events.size();
}
EXPORTED int fake_primary_retained(int device) {
  LOCKED;
  return gpu->devices[static_cast<std::size_t>(device)].primary_retained;
}
EXPORTED std::size_t fake_faults() {
  LOCKED;
  return gpu->faults.size();
}
EXPORTED void fake_fault(std::size_t index, char* text, std::size_t bytes) {
  LOCKED;
  std::snprintf(text, bytes, "%s", gpu->faults.at(index).c_str());
}
