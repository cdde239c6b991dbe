// NVML, by which PyTorch counts devices and programs look at memory in use. A handle is a device's index plus one.
#include <cstdio>
#include <cstring>

#include "driver/call.hpp"
#include "settings.hpp"

using fake::gpu;

namespace {

constexpr int kInvalidArgument = 2, kNvmlNotSupported = 3;

struct FabricInfo {
  unsigned version;
  unsigned char identity[16];
  int status;
  unsigned cluster;
  unsigned char state;
};
struct MemoryInfo {
  unsigned long long total, free, used;
};
struct MemoryInfoV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {
  unsigned device, memory;
};

int write(char* into, unsigned bytes, const std::string& text) {
  std::snprintf(into, bytes, "%s", text.c_str());
  return 0;
}
std::string identity(fake::Handle handle) { return "GPU-stand-in-" + std::to_string(handle - 1); }

}  // namespace

EXPORTED int nvmlInit() { return 0; }
EXPORTED int nvmlInit_v2() { return 0; }
EXPORTED int nvmlInitWithFlags(unsigned) { return 0; }
EXPORTED int nvmlShutdown() { return 0; }
EXPORTED const char* nvmlErrorString(int code) { return code == 0 ? "success" : "not supported by the stand-in"; }
EXPORTED int nvmlSystemGetDriverVersion(char* text, unsigned bytes) { return write(text, bytes, standin::settings().driver); }
EXPORTED int nvmlSystemGetNVMLVersion(char* text, unsigned bytes) { return write(text, bytes, "stand-in"); }
EXPORTED int nvmlSystemGetCudaDriverVersion(int* version) {
  *version = standin::settings().runtime;
  return 0;
}
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) { return nvmlSystemGetCudaDriverVersion(version); }
EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  *count = static_cast<unsigned>(gpu->devices.size());
  return 0;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, fake::Handle* handle) {
  *handle = index + 1;
  return index < gpu->devices.size() ? 0 : kInvalidArgument;
}
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char* text, fake::Handle* handle) {
  unsigned domain = 0, bus = 0;
  const bool known = std::sscanf(text, "%x:%x", &domain, &bus) == 2 && bus >= 1 && bus <= gpu->devices.size();
  *handle = bus;
  return known ? 0 : kInvalidArgument;
}
EXPORTED int nvmlDeviceGetHandleByUUID(const char* text, fake::Handle* handle) {
  for (*handle = 1; *handle <= gpu->devices.size(); ++*handle) {
    if (identity(*handle) == text) return 0;
  }
  return kInvalidArgument;
}
EXPORTED int nvmlDeviceGetIndex(fake::Handle handle, unsigned* index) {
  *index = static_cast<unsigned>(handle) - 1;
  return 0;
}
EXPORTED int nvmlDeviceGetName(fake::Handle, char* text, unsigned bytes) {
  return write(text, bytes, standin::settings().name);
}
EXPORTED int nvmlDeviceGetUUID(fake::Handle handle, char* text, unsigned bytes) { return write(text, bytes, identity(handle)); }
EXPORTED int nvmlDeviceGetMemoryInfo(fake::Handle handle, MemoryInfo* into) {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  const fake::Device& device = gpu->devices[handle - 1];
  *into = {device.capacity, device.capacity - std::min(device.capacity, device.live_bytes), device.live_bytes};
  return 0;
}
EXPORTED int nvmlDeviceGetMemoryInfo_v2(fake::Handle handle, MemoryInfoV2* into) {
  MemoryInfo info{};
  nvmlDeviceGetMemoryInfo(handle, &info);
  *into = {into->version, info.total, 0, info.free, info.used};
  return 0;
}
EXPORTED int nvmlDeviceGetUtilizationRates(fake::Handle, Utilization* into) {
  *into = {0, 0};
  return 0;
}
EXPORTED int nvmlDeviceGetCudaComputeCapability(fake::Handle, int* major, int* minor) {
  *major = standin::settings().major;
  *minor = standin::settings().minor;
  return 0;
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses(fake::Handle, unsigned* count, void*) {
  *count = 0;
  return 0;
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(fake::Handle, unsigned* count, void*) {
  *count = 0;
  return 0;
}
EXPORTED int nvmlDeviceGetP2PStatus(fake::Handle, fake::Handle, int, int* status) {
  *status = 0;
  return 0;
}
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType(...) { return kNvmlNotSupported; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2(...) { return kNvmlNotSupported; }
// PyTorch 2.14 warns if it gets no answer; a device without a fabric has the state 0.
EXPORTED int nvmlDeviceGetGpuFabricInfoV(fake::Handle, FabricInfo* into) {
  into->status = 0;
  into->cluster = 0;
  into->state = 0;
  return 0;
}
