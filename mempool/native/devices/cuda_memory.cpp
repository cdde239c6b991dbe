#include "devices/cuda_memory.hpp"

#include <algorithm>


namespace mempool {

CuPart part_of(CudaKind kind) noexcept {
  switch (kind) {
    case CudaKind::growing: return CuPart::pages;
    case CudaKind::managed: return CuPart::managed;
    case CudaKind::pinned: return CuPart::host;
    default: return CuPart::always;
  }
}

std::unique_ptr<CudaMemory> CudaMemory::make(CudaKind kind, const CudaCalls& calls) {
  switch (kind) {
    case CudaKind::growing: return std::make_unique<CudaGrowing>(calls);
    case CudaKind::managed: return std::make_unique<CudaManaged>(calls);
    case CudaKind::pinned: return std::make_unique<CudaPinned>(calls);
    case CudaKind::hosted: return std::make_unique<CudaHosted>(calls);
    default: return std::make_unique<CudaPlain>(calls);
  }
}

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

void CudaManaged::close() noexcept {
  if (CuStream const stream = stream_.exchange(nullptr)) calls_.ok(calls_.driver.stream_destroy, stream);
}

namespace {

constexpr std::size_t kPage = kGrowingTraits.page;

}  // namespace

DeviceTraits CudaGrowing::traits() const noexcept { return kGrowingTraits; }

// Call with `lock_` held, here and below.
bool CudaGrowing::look_at(CuDevice device) noexcept try {
  if (!access_.empty()) return true;
  const CudaDriver& driver = calls_.driver;
  int has_pages = 0, devices = 0;
  std::size_t page = 0;
  kind_.place.id = device;
  if (!calls_.ok(driver.device_attribute, &has_pages, cu::kHasPages, device)) return false;
  if (has_pages == 0) return calls_.judge(cu::kNotSupported, driver.mem_create.symbol);
  if (!calls_.ok(driver.granularity, &page, static_cast<const CuMemoryKind*>(&kind_), cu::kMinimum)) return false;
  if (page == 0 || kPage % page != 0) return calls_.judge(cu::kNotSupported, driver.granularity.symbol, page);
  if (!calls_.ok(driver.device_count, &devices)) return false;
  int direct = 0;  // for network adapters that access the memory without the host
  if (calls_.ok(driver.device_attribute, &direct, cu::kHasDirectPages, device) && direct != 0) kind_.flags[1] = 1;
  std::vector<CuAccess> access{{{1, device}, 3}};
  for (CuDevice peer = 0; peer < devices; ++peer) {
    int can = 0;
    if (peer != device && calls_.ok(driver.can_access_peer, &can, peer, device) && can != 0) access.push_back({{1, peer}, 3});
  }
  access_ = std::move(access);
  return true;
} catch (...) {  // no host memory
  return false;
}

Address CudaGrowing::reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  if (rounded < bytes || bytes == 0) return 0;
  const Guarded guard(lock_);
  if (!look_at(device)) return 0;
  const auto& function = calls_.driver.address_reserve;
  CuAddress address = 0;
  const CuCode code = function(&address, rounded, alignment > kPage ? alignment : 0, 0, 0);
  if (!calls_.had(code, function.symbol, rounded)) return 0;
  try {
    Space& space = spaces_[address];
    space.bytes = rounded;
    space.mapped.resize(rounded / kPage);
  } catch (...) {
    spaces_.erase(address);
    calls_.ok(calls_.driver.address_free, address, rounded);
    return 0;
  }
  return static_cast<Address>(address);
}

CudaGrowing::Space* CudaGrowing::space_of(Address address, Address& base) noexcept {
  auto found = spaces_.upper_bound(address);
  if (found == spaces_.begin()) return nullptr;
  --found;
  base = found->first;
  return address - base < found->second.bytes ? &found->second : nullptr;
}

// Map one page. The mapping keeps the memory, so that the handle is released at once.
bool CudaGrowing::map_page(Address address) const noexcept {
  const CudaDriver& driver = calls_.driver;
  CuMemory memory = 0;
  const CuCode code = driver.mem_create(&memory, kPage, &kind_, 0);
  if (!calls_.had(code, driver.mem_create.symbol, kPage)) return false;
  const bool mapped = calls_.had(driver.mem_map(address, kPage, 0, memory, 0), driver.mem_map.symbol, kPage);
  calls_.ok(driver.mem_release, memory);
  return mapped;
}

void CudaGrowing::unmap(Space& space, Address base, std::size_t first, std::size_t last) noexcept {
  for (std::size_t page = space.mapped.find(first, last, true); page < last;) {
    const bool unmapped = calls_.ok(calls_.driver.mem_unmap, CuAddress{base + page * kPage}, kPage);
    // otherwise the page is still mapped and is used again
    if (unmapped) space.mapped.assign(page, page + 1, false);
    page = space.mapped.find(page + 1, last, true);
  }
}

// Grant access to the device and all peers; if peers are refused, to the device alone.
bool CudaGrowing::make_usable(Address address, std::size_t bytes) noexcept {
  const auto& set_access = calls_.driver.set_access;
  CuCode code = set_access(address, bytes, access_.data(), access_.size());
  if (code != cu::kSuccess && code != cu::kOutOfMemory && access_.size() > 1) {
    access_.resize(1);
    code = set_access(address, bytes, access_.data(), access_.size());
  }
  return calls_.had(code, set_access.symbol, bytes);
}

bool CudaGrowing::commit(Address address, std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  Address base = 0;
  Space* const space = space_of(address, base);
  if (space == nullptr) return calls_.judge(cu::kInvalidValue, calls_.driver.mem_map.symbol, bytes);
  const std::size_t first = (address - base) / kPage, last = first + bytes / kPage;
  std::size_t page = first;
  for (; page < last; ++page) {
    // still mapped, because unmapping failed before
    if (space->mapped.find(page, page + 1, true) == page) continue;
    if (!map_page(base + page * kPage)) break;
    space->mapped.assign(page, page + 1, true);
  }
  if (page == last && make_usable(address, bytes)) return true;
  unmap(*space, base, first, page);
  return false;
}

void CudaGrowing::decommit(Address address, std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  Address base = 0;
  if (Space* const space = space_of(address, base)) {
    unmap(*space, base, (address - base) / kPage, (address - base + bytes) / kPage);
  }
}

void CudaGrowing::release(Address address, std::size_t) noexcept {
  const Guarded guard(lock_);
  const auto found = spaces_.find(address);
  if (found == spaces_.end()) return;
  const std::size_t pages = found->second.bytes / kPage;
  unmap(found->second, address, 0, pages);
  if (found->second.mapped.find(0, pages, true) != pages) return;  // never released: wasteful but correct
  calls_.ok(calls_.driver.address_free, CuAddress{address}, found->second.bytes);
  spaces_.erase(found);
}

}  // namespace mempool
