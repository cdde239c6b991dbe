// Sources of a CUDA device's memory, selected by one word:
//
//   plain    device memory, all or nothing (cuMemAlloc)
//   growing  address space with mapped pages (cuMemAddressReserve, cuMemMap): arenas resize in place
//   managed  unified memory (cuMemAllocManaged), possibly more than the device holds
//   pinned   host memory, locked in place (cuMemHostAlloc), for asynchronous copies
//   hosted   blocks of another allocator, such as PyTorch's own one (see hosted_memory.hpp)
//
// Every call requires that the device's context is current.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/address_tables.hpp"
#include "core/sync.hpp"
#include "devices/cuda_driver.hpp"
#include "devices/device.hpp"
#include "devices/hosted_memory.hpp"

namespace mempool {

enum class CudaKind : unsigned char { plain, growing, managed, pinned, hosted };
inline constexpr const char* kCudaKindNames[] = {"plain", "growing", "managed", "pinned", "hosted"};
CuPart part_of(CudaKind kind) noexcept;  // the driver functions that the kind needs

class CudaMemory {
 public:
  explicit CudaMemory(const CudaCalls& calls) : calls_(calls) {}
  virtual ~CudaMemory() = default;  // releases nothing: the driver may be gone
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  // May throw std::bad_alloc.
  static std::unique_ptr<CudaMemory> make(CudaKind kind, const CudaCalls& calls);

  // Same as the functions of Device.
  virtual DeviceTraits traits() const noexcept = 0;
  virtual Address reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept = 0;
  virtual bool commit(Address, std::size_t) noexcept { return true; }
  virtual void decommit(Address, std::size_t) noexcept {}
  virtual void release(Address address, std::size_t bytes) noexcept = 0;
  virtual std::size_t foresight() const noexcept { return 0; }
  virtual void prefetch(Address, std::size_t) noexcept {}
  virtual void close() noexcept {}  // releases resources other than memory
  virtual HostedMemory* hosted() noexcept { return nullptr; }

 protected:
  const CudaCalls& calls_;
};

// The kinds of CUDA memory that are allocated and freed as a whole: plain, managed and pinned.
class CudaWhole : public CudaMemory {
 public:
  using CudaMemory::CudaMemory;
  DeviceTraits traits() const noexcept override;
  Address reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;

 protected:
  virtual Address allocate(CuDevice device, std::size_t bytes) noexcept = 0;  // 0: refused
  virtual void free(Address base) noexcept = 0;

 private:
  Address take_base(Address address) noexcept;

  Lock lock_;
  std::map<Address, Address> bases_;  // address handed out -> allocation, if they differ
};

class CudaPlain final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;

 private:
  Address allocate(CuDevice device, std::size_t bytes) noexcept override;
  void free(Address base) noexcept override;
};

// Host memory with the same address on every device, belonging to no single device.
class CudaPinned final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;

 private:
  Address allocate(CuDevice device, std::size_t bytes) noexcept override;
  void free(Address base) noexcept override;
};

class CudaHosted final : public CudaMemory {
 public:
  using CudaMemory::CudaMemory;
  DeviceTraits traits() const noexcept override { return kHostedTraits; }
  Address reserve(CuDevice, std::size_t bytes, std::size_t) noexcept override { return hosted_.take(bytes); }
  void release(Address address, std::size_t) noexcept override { HostedMemory::give_back(address); }
  HostedMemory* hosted() noexcept override { return &hosted_; }

 private:
  HostedMemory hosted_;
};

// Memory whose pages are where they were last used; pages that do not fit on the device move to the host and
// return when used. The preferred location is the device, and prefetch() moves pages there before they are
// needed.
class CudaManaged final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;
  DeviceTraits traits() const noexcept override;
  std::size_t foresight() const noexcept override;
  void prefetch(Address address, std::size_t bytes) noexcept override;
  Address reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;
  void close() noexcept override;

 private:
  Address allocate(CuDevice device, std::size_t bytes) noexcept override;
  void free(Address base) noexcept override;
  bool look_at(CuDevice device) noexcept;

  Lock making_;  // protects the creation of the stream and the knowledge about the device
  Atomic<bool> known_{false};
  Atomic<CuStream> stream_{nullptr};   // for prefetching; no work waits for this stream
  Atomic<CuDevice> device_{0};
  Atomic<bool> moves_{false};          // device and host may use the memory at the same time
  Atomic<std::size_t> held_{0};        // bytes reserved
  Atomic<std::size_t> room_{0};        // free bytes of the device's memory at the first query
};

// Paged CUDA memory: address space is reserved first, and pages are mapped and unmapped there.
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
