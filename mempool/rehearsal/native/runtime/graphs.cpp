// Captures and graphs of the CUDA runtime.
#include "runtime/runtime.hpp"

extern "C" {
int cuStreamIsCapturing(standin::Handle stream, int* status);
int cuThreadExchangeStreamCaptureMode(int* mode);
}

using namespace standin;

namespace {

// Handles of graphs and of executable graphs, which share the captured work, are the model's numbers.
Handle made(const std::shared_ptr<fake::Capture>& capture) {
  gpu->graphs[gpu->next_graph] = capture;
  return static_cast<Handle>(gpu->next_graph++);
}
std::shared_ptr<fake::Capture> known(Handle graph) {
  const auto found = gpu->graphs.find(static_cast<int>(graph));
  return found == gpu->graphs.end() ? nullptr : found->second;
}

int capture_info(Handle handle, int* status, unsigned long long* number, Handle* graph, std::size_t* dependencies) {
  RUNTIME("cudaStreamGetCaptureInfo");
  const fake::Stream* const stream = call.stream(handle);
  if (stream == nullptr) return noted(fake::kInvalidHandle);
  if (const int code = cuStreamIsCapturing(handle, status)) return noted(code);
  if (dependencies != nullptr) *dependencies = 0;
  if (*status != 1) return 0;
  if (number != nullptr) *number = stream->capture->number;
  if (graph != nullptr) *graph = 0;
  return 0;
}

}  // namespace

EXPORTED int cudaStreamBeginCapture(Handle stream, int mode) {
  RUNTIME("cudaStreamBeginCapture");
  return noted(gpu->begin_capture(call.stream(stream), mode));
}
EXPORTED int cudaStreamEndCapture(Handle stream, Handle* graph) {
  RUNTIME("cudaStreamEndCapture");
  const int number = gpu->end_capture(call.stream(stream));
  *graph = number > 0 ? static_cast<Handle>(number) : 0;
  return noted(number > 0 ? fake::kSuccess : -number);
}
EXPORTED int cudaStreamIsCapturing(Handle stream, int* status) {
  RUNTIME("cudaStreamIsCapturing");
  return noted(cuStreamIsCapturing(stream, status));
}
EXPORTED int cudaStreamGetCaptureInfo(Handle stream, int* status, unsigned long long* number, Handle* graph, void*, void*,
                                      std::size_t* dependencies) {
  return capture_info(stream, status, number, graph, dependencies);
}
EXPORTED int cudaStreamGetCaptureInfo_v2(Handle stream, int* status, unsigned long long* number, Handle* graph, void*,
                                         std::size_t* dependencies) {
  return capture_info(stream, status, number, graph, dependencies);
}
EXPORTED int cudaStreamGetCaptureInfo_v3(Handle stream, int* status, unsigned long long* number, Handle* graph, void*, void*,
                                         std::size_t* dependencies) {
  return capture_info(stream, status, number, graph, dependencies);
}
EXPORTED int cudaThreadExchangeStreamCaptureMode(int* mode) {
  RUNTIME("cudaThreadExchangeStreamCaptureMode");
  return noted(cuThreadExchangeStreamCaptureMode(mode));
}

EXPORTED int cudaGraphInstantiate(Handle* executable, Handle graph, unsigned long long) {
  RUNTIME("cudaGraphInstantiate");
  const auto capture = known(graph);
  if (capture == nullptr) return noted(fake::kInvalidValue);
  *executable = made(capture);
  return 0;
}
EXPORTED int cudaGraphInstantiateWithFlags(Handle* executable, Handle graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
EXPORTED int cudaGraphLaunch(Handle executable, Handle stream) {
  RUNTIME("cudaGraphLaunch");
  const auto capture = known(executable);
  if (capture == nullptr) return noted(fake::kInvalidValue);
  return noted(gpu->launch(*capture, call.stream(stream)));
}
EXPORTED int cudaGraphUpload(Handle, Handle) { return 0; }
EXPORTED int cudaGraphDestroy(Handle graph) {
  RUNTIME("cudaGraphDestroy");
  return gpu->graphs.erase(static_cast<int>(graph)) == 1 ? fake::kSuccess : noted(fake::kInvalidValue);
}
EXPORTED int cudaGraphExecDestroy(Handle executable) { return cudaGraphDestroy(executable); }
EXPORTED int cudaGraphDebugDotPrint(Handle, const char*, unsigned) { return 0; }
EXPORTED int cudaGraphGetNodes(Handle graph, Handle* nodes, std::size_t* count) {
  RUNTIME("cudaGraphGetNodes");
  const auto capture = known(graph);
  if (capture == nullptr) return noted(fake::kInvalidValue);
  const std::size_t room = *count;
  *count = static_cast<std::size_t>(capture->nodes);
  for (std::size_t i = 0; nodes != nullptr && i < std::min(room, *count); ++i) nodes[i] = i + 1;
  return 0;
}
EXPORTED int cudaGraphNodeGetDependencies(Handle, void*, void*, std::size_t* count) {
  *count = 0;
  return 0;
}
