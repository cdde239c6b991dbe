// Paged CUDA memory: address space is reserved first, and pages are mapped and unmapped there.
#pragma once

#include <map>
#include <vector>

#include "devices/cuda_memory.hpp"
#include "core/page_set.hpp"
#include "core/sync.hpp"

namespace mempool {

// Each page is a separate piece of physical memory, because a mapping can only be undone as a whole. The
// pages of one device can be read and written by all peers, as plain memory can once a program has enabled
// peer access.
class CudaGrowing final : public CudaMemory {
 public:
  using CudaMemory::CudaMemory;
  DeviceTraits traits() const noexcept override;
  Address reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;

 private:
  struct Space {
    std::size_t bytes = 0;
    PageSet mapped;
  };
  bool look_at(CuDevice device) noexcept;
  bool map_page(Address address) const noexcept;
  bool make_usable(Address address, std::size_t bytes) noexcept;
  void unmap(Space& space, Address base, std::size_t first, std::size_t last) noexcept;
  Space* space_of(Address address, Address& base) noexcept;

  Lock lock_;
  std::map<Address, Space> spaces_;  // by base address
  CuMemoryKind kind_;
  std::vector<CuAccess> access_;     // empty: the device has not been queried
};

}  // namespace mempool
