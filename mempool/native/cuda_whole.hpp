// The kinds of CUDA memory that come and go as a whole: plain, managed and pinned.
#pragma once

#include <map>

#include "cuda_memory.hpp"

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
  std::map<Address, Address> bases_;  // address handed out -> allocation, where they differ
};

class CudaPlain final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;

 private:
  Address allocate(CuDevice device, std::size_t bytes) noexcept override;
  void free(Address base) noexcept override;
};

// Every device knows host memory by the same address. Nothing of it is the device's own.
class CudaPinned final : public CudaWhole {
 public:
  using CudaWhole::CudaWhole;

 private:
  Address allocate(CuDevice device, std::size_t bytes) noexcept override;
  void free(Address base) noexcept override;
};

// Pages are where they were used last; what is too much for the device goes to the host and comes back when it is used.
// They are to be on the device if they can, and prefetch() brings them before they are missed.
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

  Lock making_;                        // of the stream, and of what is known of the device
  Atomic<bool> known_{false};
  Atomic<CuStream> stream_{nullptr};   // for prefetching: nobody waits for it
  Atomic<CuDevice> device_{0};
  Atomic<bool> moves_{false};          // the device and the host may use the memory at the same time
  Atomic<std::size_t> held_{0};        // bytes reserved
  Atomic<std::size_t> room_{0};        // bytes of the device's memory that were free when first asked
};

}  // namespace mempool
