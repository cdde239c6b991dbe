#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <stdexcept>

namespace mempool {
namespace {

struct Library {
  const std::string& name;
  void* handle;

  template <class Function>
  void find(Function& function, const char* symbol) const {
    void* const found = dlsym(handle, symbol);
    if (found == nullptr) throw std::runtime_error(name + " has no " + symbol + ": not a CUDA driver, or one too old");
    function = reinterpret_cast<Function>(found);
  }
};

void* opened(const std::string& name) {
  // Nobody else should find these symbols through us.
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const char* const why = dlerror();
  throw std::runtime_error("no CUDA driver: " + std::string(why != nullptr ? why : name.c_str()));
}

}  // namespace

CudaDriver::CudaDriver(const std::string& name) {
  const Library library{name, opened(name)};
  library.find(init, "cuInit");
  library.find(error_name, "cuGetErrorName");
  library.find(error_string, "cuGetErrorString");
  library.find(device_count, "cuDeviceGetCount");
  library.find(device_get, "cuDeviceGet");
  library.find(device_name, "cuDeviceGetName");
  library.find(primary_context_retain, "cuDevicePrimaryCtxRetain");
  library.find(context_current, "cuCtxGetCurrent");
  library.find(context_push, "cuCtxPushCurrent_v2");
  library.find(context_pop, "cuCtxPopCurrent_v2");
  library.find(context_synchronize, "cuCtxSynchronize");
  library.find(mem_alloc, "cuMemAlloc_v2");
  library.find(mem_free, "cuMemFree_v2");
  library.find(mem_info, "cuMemGetInfo_v2");
  library.find(copy, "cuMemcpyDtoDAsync_v2");
  library.find(fill, "cuMemsetD8Async");
  library.find(event_create, "cuEventCreate");
  library.find(event_record, "cuEventRecord");
  library.find(event_query, "cuEventQuery");
  library.find(event_synchronize, "cuEventSynchronize");
  library.find(event_destroy, "cuEventDestroy_v2");
  library.find(stream_wait, "cuStreamWaitEvent");
  library.find(stream_synchronize, "cuStreamSynchronize");
  library.find(stream_capturing, "cuStreamIsCapturing");
  library.find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
}

CuCode CudaDriver::start() const noexcept {
  if (started_.load(std::memory_order_acquire)) return cu::kSuccess;
  const CuCode code = init(0);  // for whoever comes first, and nothing for who comes after
  if (code == cu::kSuccess) started_.store(true, std::memory_order_release);
  return code;
}

const CudaDriver& CudaDriver::open(const std::string& library) {
  // Never destroyed: devices outlive whatever ends a process destroys.
  static auto& lock = *new Lock;
  static auto& drivers = *new std::map<std::string, std::unique_ptr<CudaDriver>>;
  const Guarded guard(lock);
  const auto found = drivers.find(library);
  if (found != drivers.end()) return *found->second;
  std::unique_ptr<CudaDriver> driver(new CudaDriver(library));
  return *(drivers[library] = std::move(driver));
}

std::string CudaDriver::text(CuCode code) const {
  const char *name = nullptr, *what = nullptr;
  error_name(code, &name);
  error_string(code, &what);
  const std::string number = std::to_string(code);
  if (name == nullptr) return "CUDA error " + number;
  return name + (" (" + number + ")") + (what != nullptr ? std::string(": ") + what : "");
}

int CudaDriver::count() const noexcept {
  int devices = 0;
  return start() == cu::kSuccess && device_count(&devices) == cu::kSuccess ? devices : 0;
}

std::vector<std::string> CudaDriver::names() const {
  std::vector<std::string> names;
  for (int index = 0; index < count(); ++index) {
    char name[256] = "";
    CuDevice device = 0;
    if (device_get(&device, index) == cu::kSuccess) device_name(name, sizeof name - 1, device);
    names.emplace_back(name);
  }
  return names;
}

}  // namespace mempool
