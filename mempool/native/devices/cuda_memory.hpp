// Sources of a CUDA device's memory, selected by one word:
//
//   plain    device memory, all or nothing (cuMemAlloc)
//   growing  address space with mapped pages (cuMemAddressReserve, cuMemMap): arenas resize in place
//   managed  unified memory (cuMemAllocManaged), possibly more than the device holds
//   pinned   host memory, locked in place (cuMemHostAlloc), for asynchronous copies
//
// Every call requires that the device's context is current.
#pragma once

#include <memory>

#include "devices/cuda_calls.hpp"
#include "devices/cuda_traits.hpp"
#include "devices/device.hpp"

namespace mempool {

enum class CudaKind : unsigned char { plain, growing, managed, pinned };
inline constexpr const char* kCudaKindNames[] = {"plain", "growing", "managed", "pinned"};
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
  virtual bool read_mostly(Address, std::size_t, bool) noexcept { return false; }
  virtual void close() noexcept {}  // releases resources other than memory

 protected:
  const CudaCalls& calls_;
};

}  // namespace mempool
