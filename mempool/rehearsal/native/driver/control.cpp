// What is beside the driver's symbols: for the test to set up, let streams go on, and look.
#include <algorithm>
#include <cstring>

#include "call.hpp"

using namespace fake;

#define LOCKED const std::lock_guard<std::recursive_mutex> guard(gpu->mutex)

EXPORTED void fake_reset(int devices) {
  LOCKED;
  // Everything is forgotten but what the core holds for good: that the driver was initialised.
  gpu->forget_all();
  for (Event* const event : gpu->events) delete event;
  gpu->devices.assign(static_cast<std::size_t>(devices), Device{});
  gpu->primaries.assign(static_cast<std::size_t>(devices), nullptr);
  gpu->events.clear();
  gpu->captures.clear();
  gpu->graphs.clear();
  gpu->faults.clear();
  for (Function& function : gpu->functions) function = Function{function.name};
  if (gpu->order != nullptr) gpu->order = std::make_unique<Order>();
  gpu->timeline.reset();
  for (const auto& stream : gpu->streams) *stream = Stream{};  // their handles are not used again
  gpu->alignment = 0;
  gpu->lockable = SIZE_MAX;
  gpu->version = 12080;
  gpu->granularity = Gpu::kWhole;
  gpu->streams_made = 0;
  gpu->gone = false;
  ++gpu->generation;
}

EXPORTED void fake_set_capacity(int device, std::size_t bytes) {
  LOCKED;
  gpu->devices[static_cast<std::size_t>(device)].capacity = bytes;
}
EXPORTED void fake_set_lockable(std::size_t bytes) {
  LOCKED;
  gpu->lockable = bytes;
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
  gpu->function(symbol).failure = {code, after, times};
}
// The next call of `symbol` without an answer ends with `code`; where the code is 0 and the function is one that tells two
// numbers, with these.
EXPORTED void fake_answer(const char* symbol, int code, std::size_t first, std::size_t second) {
  LOCKED;
  gpu->function(symbol).answers.push_back({code, first, second});
}
EXPORTED void fake_slow(const char* symbol, int ms) {
  LOCKED;
  gpu->function(symbol).slow = std::chrono::milliseconds(ms);
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
  if (from.capture == nullptr || to.capture != nullptr) return kInvalidValue;
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
  if (found == gpu->graphs.end()) return kInvalidHandle;
  return gpu->launch(*found->second, gpu->stream(handle, context));
}
EXPORTED void fake_destroy_graph(int graph) {
  LOCKED;
  gpu->graphs.erase(graph);
}

EXPORTED int fake_calls(const char* symbol) {
  LOCKED;
  return gpu->function(symbol).calls;
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
  Allocation* const in = gpu->found(address, begin);
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
