// The kinds of CUDA memory that are allocated and freed as a whole: plain, managed and pinned.
#pragma once

#include <map>

#include "devices/cuda_memory.hpp"

namespace mempool {

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

// Memory whose pages are where they were last used; pages that do not fit on the device move to the host and
// return when used. The preferred location is the device, and prefetch() moves pages there before they are
// needed.
class CudaManaged final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;
  DeviceTraits traits() const noexcept override;
  std::size_t foresight() const noexcept override;
  void prefetch(Address address, std::size_t bytes) noexcept override;
  bool read_mostly(Address address, std::size_t bytes, bool on) noexcept override;
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

}  // namespace mempool
