// Where the memory of a CUDA device comes from, chosen by one word:
//
//   plain    device memory, all or nothing (cuMemAlloc)
//   growing  address space whose pages come and go (cuMemAddressReserve, cuMemMap): an arena grows and shrinks in place
//   managed  unified memory (cuMemAllocManaged), of which there may be more than the device has
//   pinned   the host's memory, locked in place (cuMemHostAlloc), for copies that nobody waits for
//
// The device's context is current in every call.
#pragma once

#include <memory>

#include "cuda_calls.hpp"
#include "cuda_traits.hpp"
#include "device.hpp"

namespace mempool {

enum class CudaKind : unsigned char { plain, growing, managed, pinned };
inline constexpr const char* kCudaKindNames[] = {"plain", "growing", "managed", "pinned"};
CuPart part_of(CudaKind kind) noexcept;  // what the driver needs for it

class CudaMemory {
 public:
  explicit CudaMemory(const CudaCalls& calls) : calls_(calls) {}
  virtual ~CudaMemory() = default;  // gives nothing back: the driver may be gone
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  // May throw std::bad_alloc.
  static std::unique_ptr<CudaMemory> make(CudaKind kind, const CudaCalls& calls);

  // As of Device.
  virtual DeviceTraits traits() const noexcept = 0;
  virtual Address reserve(CuDevice device, std::size_t bytes, std::size_t alignment) noexcept = 0;
  virtual bool commit(Address, std::size_t) noexcept { return true; }
  virtual void decommit(Address, std::size_t) noexcept {}
  virtual void release(Address address, std::size_t bytes) noexcept = 0;
  virtual std::size_t foresight() const noexcept { return 0; }
  virtual void prefetch(Address, std::size_t) noexcept {}
  virtual bool read_mostly(Address, std::size_t, bool) noexcept { return false; }
  virtual void close() noexcept {}  // what it has beside memory

 protected:
  const CudaCalls& calls_;
};

}  // namespace mempool
