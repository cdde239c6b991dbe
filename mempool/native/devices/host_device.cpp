#include "devices/host_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace mempool {
namespace {

const std::size_t kHostPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t kOwnMapping = std::size_t{4} << 20;
// Bounds for huge pages: NumPy uses them from the same size on; larger memory is often touched only sparsely.
constexpr std::size_t kLeastHuge = std::size_t{4} << 20, kMostHuge = std::size_t{1} << 30;
// Inaccessible pages are not charged as committed memory, accessible ones are: commit() refuses memory that
// malloc would refuse.
constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

DeviceTraits HostDevice::traits() const noexcept {
  return {64, kHostPage, std::size_t{64} << 20, std::size_t{16} << 20, true};
}

// Reserve inaccessible pages, so that address space costs nothing even if the kernel does not overcommit.
Address HostDevice::reserve(std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t slack = alignment > kHostPage ? alignment : 0;
  if (bytes + slack < bytes) return 0;
  void* mapped = mmap(nullptr, bytes + slack, PROT_NONE, kAnonymous, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  const Address base = reinterpret_cast<Address>(mapped);
  if (slack == 0) return base;
  const Address aligned = (base + alignment - 1) / alignment * alignment;
  if (aligned > base) munmap(mapped, aligned - base);
  const Address end = base + bytes + slack;
  if (end > aligned + bytes) munmap(at(aligned + bytes), end - aligned - bytes);
  return aligned;
}

bool HostDevice::commit(Address address, std::size_t bytes) noexcept {
  if (mprotect(at(address), bytes, PROT_READ | PROT_WRITE) != 0) return false;
  // One page fault per 2 MiB if the kernel has free huge pages.
  if (bytes >= kLeastHuge && bytes <= kMostHuge) madvise(at(address), bytes, MADV_HUGEPAGE);
  return true;
}

void HostDevice::decommit(Address address, std::size_t bytes) noexcept {
  // Mapping anew returns the pages and their commit charge, but each hole is a separate mapping, and a
  // process has only some 65,000. Small holes therefore stay accessible: their pages are returned, and the
  // kernel merges the mapping.
  if (bytes >= kOwnMapping && mmap(at(address), bytes, PROT_NONE, kAnonymous | MAP_FIXED, -1, 0) != MAP_FAILED) return;
  madvise(at(address), bytes, MADV_DONTNEED);
}

Address HostDevice::resize(Address address, std::size_t from, std::size_t to) noexcept {
  void* const moved = mremap(at(address), from, to, MREMAP_MAYMOVE);
  return moved == MAP_FAILED ? 0 : reinterpret_cast<Address>(moved);
}

void HostDevice::release(Address address, std::size_t bytes) noexcept { munmap(at(address), bytes); }

void HostDevice::copy(Address to, Address from, std::size_t bytes, Stream) noexcept {
  std::memcpy(at(to), at(from), bytes);
}

void HostDevice::zero(Address address, std::size_t bytes, Stream) noexcept {
  // From this size on fresh pages are cheaper than writing, and stay untouched where the program never reads.
  constexpr std::size_t kFreshPages = std::size_t{64} << 20;
  const Address first = (address + kHostPage - 1) / kHostPage * kHostPage;
  const Address last = (address + bytes) / kHostPage * kHostPage;
  if (bytes < kFreshPages || madvise(at(first), last - first, MADV_DONTNEED) != 0) {
    std::memset(at(address), 0, bytes);
    return;
  }
  std::memset(at(address), 0, first - address);
  std::memset(at(last), 0, address + bytes - last);
}

}  // namespace mempool
