// Devices of the CUDA runtime: their number, properties and attributes.
#include <cstdio>

#include "runtime/contents.hpp"
#include "runtime/properties.hpp"
#include "runtime/runtime.hpp"

namespace standin {

namespace {

// The model takes the settings before the first call of driver or runtime.
const bool prepared = [] {
  const Settings& set = settings();
  gpu->late = set.late;
  gpu->copy = copy_contents;
  gpu->fill = fill_contents;
  gpu->forget_bytes = [](std::uintptr_t address) { forget_contents(reinterpret_cast<const void*>(address)); };
  gpu->version = set.runtime;
  if (!set.arguments.empty()) gpu->order = std::make_unique<fake::Order>();
  gpu->devices.assign(static_cast<std::size_t>(set.devices), fake::Device{});
  gpu->primaries.assign(static_cast<std::size_t>(set.devices), nullptr);
  for (fake::Device& device : gpu->devices) {
    device.capacity = set.memory;
    device.attributes = attributes(set);
  }
  return true;
}();

}  // namespace

void use_device(int device) {
  fake::Device& on = gpu->devices[static_cast<std::size_t>(device)];
  if (on.primary_retained == 0) {
    on.primary_retained = 1;
    on.live_bytes += settings().context;
  }
  auto& contexts = fake::self().contexts;
  if (contexts.empty()) contexts.push_back(nullptr);
  contexts.back() = gpu->primary(device);
}

}  // namespace standin

using namespace standin;

EXPORTED int cudaGetDeviceCount(int* count) {
  const fake::Call call(NAMED("cudaGetDeviceCount", fake::kNothing));
  *count = static_cast<int>(gpu->devices.size());
  return noted(gpu->devices.empty() ? fake::kNoDevice : fake::kSuccess);
}

EXPORTED int cudaGetDevice(int* device) {
  QUERY("cudaGetDevice");
  *device = fake::current() != nullptr ? fake::current()->device : 0;
  return 0;
}

EXPORTED int cudaSetDevice(int device) {
  QUERY("cudaSetDevice");
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return noted(fake::kInvalidDevice);
  use_device(device);
  return 0;
}

EXPORTED int cudaSetDeviceFlags(unsigned) { return 0; }
EXPORTED int cudaDeviceReset() { return 0; }
EXPORTED int cudaDeviceSetLimit(int, std::size_t) { return 0; }
EXPORTED int cudaDeviceGetLimit(std::size_t* bytes, int) {
  *bytes = 8 << 20;
  return 0;
}
EXPORTED int cudaDeviceSetCacheConfig(int) { return 0; }
EXPORTED int cudaProfilerStart() { return 0; }
EXPORTED int cudaProfilerStop() { return 0; }

EXPORTED int cudaDriverGetVersion(int* version) {
  *version = settings().runtime;
  return 0;
}
EXPORTED int cudaRuntimeGetVersion(int* version) {
  *version = settings().runtime;
  return 0;
}

EXPORTED int cudaGetLastError() {
  const int code = last_error();
  last_error() = 0;
  return code;
}
EXPORTED int cudaPeekAtLastError() { return last_error(); }

EXPORTED const char* cudaGetErrorName(int code) {
  switch (code) {
    case fake::kSuccess: return "cudaSuccess";
    case fake::kInvalidValue: return "cudaErrorInvalidValue";
    case fake::kOutOfMemory: return "cudaErrorMemoryAllocation";
    case fake::kNoDevice: return "cudaErrorNoDevice";
    case fake::kInvalidDevice: return "cudaErrorInvalidDevice";
    case fake::kInvalidHandle: return "cudaErrorInvalidResourceHandle";
    case fake::kNotReady: return "cudaErrorNotReady";
    case 209: return "cudaErrorNoKernelImageForDevice";
    case kNotSupported: return "cudaErrorNotSupported";
    case fake::kCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case fake::kCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case fake::kCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case fake::kCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "cudaErrorUnknown";
  }
}
EXPORTED const char* cudaGetErrorString(int code) {
  switch (code) {
    case fake::kSuccess: return "no error";
    case fake::kInvalidValue: return "invalid argument";
    case fake::kOutOfMemory: return "out of memory";
    case fake::kNoDevice: return "no CUDA-capable device is detected";
    case fake::kInvalidDevice: return "invalid device ordinal";
    case fake::kInvalidHandle: return "invalid resource handle";
    case fake::kNotReady: return "device not ready";
    case 209: return "no kernel image is available for execution on the device";
    case kNotSupported: return "operation not supported";
    case fake::kCaptureUnsupported: return "operation not permitted when stream is capturing";
    case fake::kCaptureInvalidated: return "operation failed due to a previous error during capture";
    case fake::kCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case fake::kCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "unknown error";
  }
}

// The layout differs between CUDA 12, where the symbol ends in _v2, and CUDA 13.
EXPORTED int cudaGetDeviceProperties_v2(void* into, int device) {
  QUERY("cudaGetDeviceProperties");
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return noted(fake::kInvalidDevice);
  write_properties(into, settings(), device, false);
  return 0;
}
EXPORTED int cudaGetDeviceProperties(void* into, int device) {
  QUERY("cudaGetDeviceProperties");
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return noted(fake::kInvalidDevice);
  write_properties(into, settings(), device, true);
  return 0;
}

EXPORTED int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  QUERY("cudaDeviceGetAttribute");
  if (device < 0 || device >= static_cast<int>(gpu->devices.size())) return noted(fake::kInvalidDevice);
  *value = gpu->devices[static_cast<std::size_t>(device)].attributes[attribute];
  return 0;
}

EXPORTED int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return 0;
}
EXPORTED int cudaDeviceEnablePeerAccess(int, unsigned) { return 0; }
EXPORTED int cudaDeviceDisablePeerAccess(int) { return 0; }

EXPORTED int cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02X:00.0", device + 1);
  return 0;
}
EXPORTED int cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned domain = 0, bus = 0;
  if (std::sscanf(text, "%x:%x", &domain, &bus) != 2 || bus == 0 || bus > gpu->devices.size()) {
    return noted(fake::kInvalidValue);
  }
  *device = static_cast<int>(bus) - 1;
  return 0;
}
EXPORTED int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
