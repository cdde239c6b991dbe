// The fake driver's streams and events.
#include "call.hpp"

using namespace fake;

namespace {

Event* known(Event* event) {
  if (gpu->events.count(event) != 0) return event;
  gpu->fault("an unknown event");
  return nullptr;
}

// To ask a captured event breaks the capture that it belongs to.
int ask(const Event* event) {
  if (event->mark != nullptr && event->mark->capture != nullptr) {
    gpu->invalidate(*event->mark->capture);
    return kCapturedEvent;
  }
  return gpu->unsafe(self().mode);
}

}  // namespace

EXPORTED int cuStreamCreate(Stream** stream, unsigned int flags) {
  CALL("cuStreamCreate");
  *stream = gpu->new_stream(current(), (flags & 1) == 0);
  ++gpu->streams_made;
  return 0;
}

EXPORTED int cuStreamGetCtx(Handle handle, Context** context) {
  CALL("cuStreamGetCtx");
  *context = gpu->stream(handle, current())->context;
  return 0;
}

EXPORTED int cuStreamDestroy_v2(Stream* stream) {
  CALL("cuStreamDestroy_v2");
  gpu->force(stream, stream->queued);
  --gpu->streams_made;
  return 0;
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
  if (known(event) == nullptr) return kInvalidHandle;
  gpu->events.erase(event);
  delete event;
  return 0;
}

EXPORTED int cuEventRecord(Event* event, Handle handle) {
  CALL("cuEventRecord");
  Stream* const stream = gpu->stream(handle, current());
  if (known(event) == nullptr || stream == nullptr) return kInvalidHandle;
  if (stream->context != event->context) {
    gpu->fault("an event is recorded on a stream of another context");
    return kInvalidHandle;
  }
  if (const int code = gpu->blocked_by_capture(stream)) return code;
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return kCaptureInvalidated;
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
  if (known(event) == nullptr) return kInvalidHandle;
  if (const int code = ask(event)) return code;
  if (event->mark == nullptr) return kSuccess;
  if (!gpu->has_passed(*event->mark)) return kNotReady;
  gpu->host_waited(*event->mark);
  return kSuccess;
}

EXPORTED int cuEventSynchronize(Event* event) {
  CALL("cuEventSynchronize");
  if (known(event) == nullptr) return kInvalidHandle;
  if (const int code = ask(event)) return code;
  if (event->mark == nullptr) return 0;
  gpu->force(event->mark->stream, event->mark->position + 1);
  gpu->host_waited(*event->mark);
  return 0;
}

EXPORTED int cuStreamWaitEvent(Handle handle, Event* event, unsigned int) {
  CALL("cuStreamWaitEvent");
  Stream* const stream = gpu->stream(handle, current());
  if (known(event) == nullptr || stream == nullptr) return kInvalidHandle;
  if (event->mark == nullptr) return 0;
  const auto mark = event->mark;
  if (mark->capture == nullptr && stream->capture == nullptr) return gpu->enqueue(stream, Work{nullptr, {}, mark, nullptr});
  if (mark->capture == nullptr) {
    gpu->invalidate(*stream->capture);
    return kCaptureIsolation;
  }
  if (mark->capture->over || !mark->capture->valid) return kCaptureInvalidated;
  if (stream->capture != nullptr && stream->capture != mark->capture) {
    gpu->invalidate(*stream->capture);
    gpu->invalidate(*mark->capture);
    return kCaptureMerge;
  }
  if (stream->capture == nullptr) stream->reached.clear();
  stream->capture = mark->capture;
  stream->reached.insert(mark->nodes.begin(), mark->nodes.end());
  return 0;
}

EXPORTED int cuStreamSynchronize(Handle handle) {
  CALL("cuStreamSynchronize");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) {
    gpu->invalidate(*stream->capture);
    return kCaptureUnsupported;
  }
  if (const int code = gpu->blocked_by_capture(stream)) return code;
  if (const int code = gpu->unsafe(self().mode)) return code;
  gpu->force(stream, stream->queued);
  gpu->host_waited(*stream);
  return 0;
}

EXPORTED int cuStreamIsCapturing(Handle handle, int* status) {
  CALL("cuStreamIsCapturing");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  if (gpu->implicit(stream, false)) return kCaptureImplicit;
  *status = stream->capture == nullptr ? 0 : stream->capture->valid ? 1 : 2;
  return 0;
}

// As it was before it told more: a number is given for a capture that can still become a graph.
EXPORTED int cuStreamGetCaptureInfo(Handle handle, int* status, unsigned long long* number) {
  CALL("cuStreamGetCaptureInfo");
  Stream* const stream = gpu->stream(handle, current());
  if (stream == nullptr) return kInvalidHandle;
  if (gpu->implicit(stream, false)) return kCaptureImplicit;
  *status = stream->capture == nullptr ? 0 : stream->capture->valid ? 1 : 2;
  if (*status == 1) *number = stream->capture->number;
  return 0;
}

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
  CALL("cuThreadExchangeStreamCaptureMode", kInit);
  std::swap(*mode, self().mode);
  return 0;
}
