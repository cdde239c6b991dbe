#include "devices/cuda_whole.hpp"

#include <algorithm>

namespace mempool {

DeviceTraits CudaWhole::traits() const noexcept { return kWholeTraits; }

Address CudaWhole::reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept {
  if (bytes == 0) return 0;
  Address base = allocate(device, bytes);
  if (base == 0 || base % alignment == 0) return base;
  // The driver guarantees only 256 bytes; the extra bytes allow moving the address up to the alignment.
  free(base);
  if (bytes + alignment < bytes) return 0;
  base = allocate(device, bytes + alignment);
  if (base == 0) return 0;
  const Address address = (base + alignment - 1) / alignment * alignment;
  try {
    const Guarded guard(lock_);
    if (address != base) bases_[address] = base;
  } catch (...) {
    free(base);
    return 0;
  }
  return address;
}

void CudaWhole::release(Address address, std::size_t) noexcept { free(take_base(address)); }

Address CudaWhole::take_base(Address address) noexcept {
  const Guarded guard(lock_);
  const auto found = bases_.find(address);
  if (found == bases_.end()) return address;
  const Address base = found->second;
  bases_.erase(found);
  return base;
}

// --- plain

Address CudaPlain::allocate(CuDevice, std::size_t bytes) noexcept {
  const auto& function = calls_.driver.mem_alloc;
  CuAddress address = 0;
  return calls_.had(function(&address, bytes), function.symbol, bytes) ? static_cast<Address>(address) : 0;
}

void CudaPlain::free(Address base) noexcept { calls_.ok(calls_.driver.mem_free, CuAddress{base}); }

// --- pinned

Address CudaPinned::allocate(CuDevice, std::size_t bytes) noexcept {
  const auto& function = calls_.driver.host_alloc;
  void* address = nullptr;
  const bool had = calls_.had(function(&address, bytes, cu::kPortable), function.symbol, bytes);
  return had ? reinterpret_cast<Address>(address) : 0;
}

void CudaPinned::free(Address base) noexcept { calls_.ok(calls_.driver.host_free, reinterpret_cast<void*>(base)); }

// --- managed

DeviceTraits CudaManaged::traits() const noexcept {
  DeviceTraits traits = CudaWhole::traits();
  traits.prefetches = true;
  return traits;
}

// Query the device's capabilities and free memory. False: the device has no managed memory.
bool CudaManaged::look_at(CuDevice device) noexcept {
  if (known_.load()) return true;
  const Guarded guard(making_);
  if (known_.load()) return true;
  const CudaDriver& driver = calls_.driver;
  int managed = 0, concurrent = 0;
  std::size_t free = 0, total = 0;
  if (!calls_.ok(driver.device_attribute, &managed, cu::kHasManaged, device) ||
      !calls_.ok(driver.device_attribute, &concurrent, cu::kHasConcurrentManaged, device) ||
      !calls_.ok(driver.mem_info, &free, &total)) {
    return false;
  }
  if (managed == 0) return calls_.judge(cu::kNotSupported, driver.managed_alloc.symbol);
  device_.store(device);
  moves_.store(concurrent != 0);
  room_.store(free);
  known_.store(true);
  return true;
}

Address CudaManaged::allocate(CuDevice device, std::size_t bytes) noexcept {
  if (!look_at(device)) return 0;
  const auto& function = calls_.driver.managed_alloc;
  CuAddress address = 0;
  if (!calls_.had(function(&address, bytes, cu::kGlobal), function.symbol, bytes)) return 0;
  // Only advice: the memory works the same without the advice.
  if (moves_.load()) calls_.ok(calls_.driver.advise, address, bytes, cu::kSetPreferredLocation, device);
  return static_cast<Address>(address);
}

void CudaManaged::free(Address base) noexcept { calls_.ok(calls_.driver.mem_free, CuAddress{base}); }

Address CudaManaged::reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept {
  const Address address = CudaWhole::reserve(device, bytes, alignment);
  if (address != 0) held_.fetch_add(bytes);
  return address;
}

void CudaManaged::release(Address address, std::size_t bytes) noexcept {
  CudaWhole::release(address, bytes);
  held_.fetch_sub(bytes);
}

// A few milliseconds of bus time, and far less than the device holds, because prefetched data would otherwise
// displace data in use.
std::size_t CudaManaged::foresight() const noexcept {
  return held_.load() > room_.load() ? std::min(256 * kMiB, room_.load() / 8) : 0;
}

void CudaManaged::prefetch(Address address, std::size_t bytes) noexcept {
  if (!moves_.load()) return;
  if (stream_.load() == nullptr) {
    const Guarded guard(making_);
    CuStream made = nullptr;
    if (stream_.load() == nullptr && calls_.ok(calls_.driver.stream_create, &made, cu::kNonBlocking)) stream_.store(made);
    if (stream_.load() == nullptr) return;
  }
  calls_.ok(calls_.driver.prefetch, CuAddress{address}, bytes, device_.load(), stream_.load());
}

bool CudaManaged::read_mostly(Address address, std::size_t bytes, bool on) noexcept {
  const int advice = on ? cu::kSetReadMostly : cu::kUnsetReadMostly;
  return moves_.load() && calls_.ok(calls_.driver.advise, CuAddress{address}, bytes, advice, device_.load());
}

void CudaManaged::close() noexcept {
  if (CuStream const stream = stream_.exchange(nullptr)) calls_.ok(calls_.driver.stream_destroy, stream);
}

}  // namespace mempool
