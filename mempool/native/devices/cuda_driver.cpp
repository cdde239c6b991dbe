#include "devices/cuda_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

namespace mempool {
namespace {

std::string version_text(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* opened(const std::string& name) {
  // Keep the library's symbols local, so that no other library resolves them through this handle.
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const char* const why = dlerror();
  throw std::runtime_error("no CUDA driver: " + std::string(why != nullptr ? why : name.c_str()));
}

}  // namespace

CuEntry::CuEntry(CudaDriver& driver, CuPart part, const char* symbol, int since)
    : part(part), symbol(symbol), since(since), number(flight::number_of(symbol)) {
  driver.entries_.push_back(this);
}

CudaDriver::CudaDriver(std::string library) : library_(std::move(library)) {
  void* const handle = opened(library_);
  for (CuEntry* const entry : entries_) entry->address = dlsym(handle, entry->symbol);
  require(CuPart::always);
}

void CudaDriver::require(CuPart part) const {
  for (const CuEntry* const entry : entries_) {
    if (entry->part != part || entry->address != nullptr) continue;
    int mine = 0;
    const bool known = version.address != nullptr && version(&mine) == cu::kSuccess && mine != 0;
    throw std::runtime_error(library_ + " has no " + entry->symbol + ", which came with " + version_text(entry->since) +
                             (known ? ": this driver is of " + version_text(mine) : ": not a CUDA driver, or one too old"));
  }
}

CuCode CudaDriver::start() const noexcept {
  if (started_.load(std::memory_order_acquire)) return cu::kSuccess;
  const CuCode code = init(0);  // the first call initializes the driver, later calls have no effect
  if (code == cu::kSuccess) started_.store(true, std::memory_order_release);
  return code;
}

const CudaDriver& CudaDriver::open(const std::string& library) {
  // Never destroyed: devices outlive the objects destroyed at the end of the process.
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
