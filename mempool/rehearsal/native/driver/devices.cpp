// The fake driver's devices and contexts.
#include <cstring>

#include "call.hpp"

using namespace fake;

namespace {

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
                                           {907, "CUDA_ERROR_CAPTURED_EVENT"},
                                           {999, "CUDA_ERROR_UNKNOWN"}};

}  // namespace

EXPORTED int cuInit(unsigned int) {
  CALL("cuInit", kNothing);
  gpu->initialized = true;
  return gpu->devices.empty() ? kNoDevice : kSuccess;
}

EXPORTED int cuGetErrorName(int code, const char** name) {
  const auto found = kNames.find(code);
  *name = found != kNames.end() ? found->second : nullptr;
  return found != kNames.end() ? kSuccess : kInvalidValue;
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
  return index >= 0 && index < static_cast<int>(gpu->devices.size()) ? kSuccess : kInvalidDevice;
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
  if (self().contexts.empty()) return kInvalidContext;
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
    code = kCaptureUnsupported;
  }
  if (code != 0) return code;
  for (std::size_t i = 0; i < gpu->streams.size(); ++i) {
    if (gpu->streams[i]->context != current()) continue;
    gpu->force(gpu->streams[i].get(), gpu->streams[i]->queued);
    gpu->host_waited(*gpu->streams[i]);
  }
  return 0;
}

EXPORTED int cuDriverGetVersion(int* version) {
  CALL("cuDriverGetVersion", kNothing);
  *version = gpu->version;
  return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALL("cuDeviceGetAttribute", kInit);
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return kInvalidDevice;
  *value = gpu->devices[static_cast<std::size_t>(device)].attributes[attribute];
  return 0;
}

EXPORTED int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  CALL("cuDeviceCanAccessPeer", kInit);
  *can = device != peer;
  return 0;
}
