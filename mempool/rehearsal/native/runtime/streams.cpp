// Streams, events and callbacks of the CUDA runtime.
#include "runtime/runtime.hpp"

extern "C" {
int cuCtxSynchronize();
int cuStreamSynchronize(standin::Handle stream);
int cuStreamDestroy_v2(fake::Stream* stream);
int cuStreamWaitEvent(standin::Handle stream, fake::Event* event, unsigned flags);
int cuEventDestroy_v2(fake::Event* event);
int cuEventRecord(fake::Event* event, standin::Handle stream);
int cuEventQuery(fake::Event* event);
int cuEventSynchronize(fake::Event* event);
}

using namespace standin;

EXPORTED int cudaDeviceSynchronize() {
  RUNTIME("cudaDeviceSynchronize");
  return noted(cuCtxSynchronize());
}

EXPORTED int cudaStreamCreateWithPriority(fake::Stream** stream, unsigned flags, int) {
  RUNTIME("cudaStreamCreateWithPriority");
  *stream = gpu->new_stream(fake::current(), (flags & 1) == 0);
  ++gpu->streams_made;
  return 0;
}
EXPORTED int cudaStreamCreateWithFlags(fake::Stream** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORTED int cudaStreamCreate(fake::Stream** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORTED int cudaStreamDestroy(fake::Stream* stream) {
  RUNTIME("cudaStreamDestroy");
  return noted(cuStreamDestroy_v2(stream));
}
EXPORTED int cudaStreamSynchronize(Handle stream) {
  RUNTIME("cudaStreamSynchronize");
  return noted(cuStreamSynchronize(stream));
}
EXPORTED int cudaStreamQuery(Handle handle) {
  RUNTIME("cudaStreamQuery");
  const fake::Stream* const stream = call.stream(handle);
  if (stream == nullptr) return noted(fake::kInvalidHandle);
  if (stream->capture != nullptr) return noted(fake::kCaptureUnsupported);
  if (stream->done < stream->queued || (gpu->timeline != nullptr && !gpu->timeline->has_passed(*stream))) return fake::kNotReady;
  gpu->host_waited(*stream);
  return fake::kSuccess;
}
EXPORTED int cudaStreamWaitEvent(Handle stream, fake::Event* event, unsigned flags) {
  RUNTIME("cudaStreamWaitEvent");
  return noted(cuStreamWaitEvent(stream, event, flags));
}
EXPORTED int cudaStreamGetPriority(Handle, int* priority) {
  *priority = 0;
  return 0;
}
EXPORTED int cudaStreamGetFlags(Handle handle, unsigned* flags) {
  RUNTIME("cudaStreamGetFlags");
  *flags = call.stream(handle)->blocking ? 0 : 1;
  return 0;
}
EXPORTED int cudaStreamGetDevice(Handle handle, int* device) {
  RUNTIME("cudaStreamGetDevice");
  *device = call.stream(handle)->context->device;
  return 0;
}

EXPORTED int cudaEventCreateWithFlags(fake::Event** event, unsigned) {
  RUNTIME("cudaEventCreateWithFlags");
  *event = new fake::Event{fake::current(), nullptr};
  gpu->events.insert(*event);
  return 0;
}
EXPORTED int cudaEventCreate(fake::Event** event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED int cudaEventDestroy(fake::Event* event) {
  RUNTIME("cudaEventDestroy");
  return noted(cuEventDestroy_v2(event));
}
EXPORTED int cudaEventRecord(fake::Event* event, Handle stream) {
  RUNTIME("cudaEventRecord");
  return noted(cuEventRecord(event, stream));
}
EXPORTED int cudaEventRecordWithFlags(fake::Event* event, Handle stream, unsigned) { return cudaEventRecord(event, stream); }
EXPORTED int cudaEventQuery(fake::Event* event) {
  RUNTIME("cudaEventQuery");
  return noted(cuEventQuery(event));
}
EXPORTED int cudaEventSynchronize(fake::Event* event) {
  RUNTIME("cudaEventSynchronize");
  return noted(cuEventSynchronize(event));
}
// The modelled time between the two. Without a model it is the host's, at least a microsecond, because programs divide by it.
EXPORTED int cudaEventElapsedTime(float* ms, const fake::Event* begin, const fake::Event* end) {
  RUNTIME("cudaEventElapsedTime");
  if (gpu->events.count(const_cast<fake::Event*>(begin)) == 0 || gpu->events.count(const_cast<fake::Event*>(end)) == 0 ||
      begin->mark == nullptr || end->mark == nullptr) {
    return noted(fake::kInvalidHandle);
  }
  if (gpu->timeline != nullptr) {
    if (begin->mark->timed == nullptr || end->mark->timed == nullptr) return noted(fake::kInvalidHandle);
    *ms = static_cast<float>(static_cast<double>(gpu->timeline->between(*begin->mark->timed, *end->mark->timed)) * 1e-6);
    return 0;
  }
  const std::chrono::duration<float, std::milli> took = end->mark->time - begin->mark->time;
  *ms = std::max(took.count(), 1e-3F);
  return 0;
}
EXPORTED int cudaEventElapsedTime_v2(float* ms, const fake::Event* begin, const fake::Event* end) {
  return cudaEventElapsedTime(ms, begin, end);
}

namespace {

// Run a callback after everything that the stream has queued; outside of the lock, since callbacks may wait for other
// threads. In a capture the callback belongs to the graph and does not run.
template <class Function>
int call_back(Handle handle, Function function) {
  {
    RUNTIME("cudaLaunchHostFunc");
    fake::Stream* const stream = call.stream(handle);
    if (stream == nullptr) return noted(fake::kInvalidHandle);
    if (stream->capture != nullptr) return noted(gpu->enqueue(stream, fake::Work{}));
    gpu->force(stream, stream->queued);
  }
  function();
  return 0;
}

}  // namespace

EXPORTED int cudaStreamAddCallback(Handle stream, void (*function)(Handle, int, void*), void* data, unsigned) {
  return call_back(stream, [=] { function(stream, 0, data); });
}
EXPORTED int cudaLaunchHostFunc(Handle stream, void (*function)(void*), void* data) {
  return call_back(stream, [=] { function(data); });
}
