// Host memory by mmap: real addresses, no streams.
#pragma once

#include "devices/device.hpp"

namespace mempool {

class HostDevice final : public Device {
 public:
  DeviceTraits traits() const noexcept override;
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  Address resize(Address address, std::size_t from, std::size_t to) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override;
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override;
  Event record(Stream) noexcept override { return 0; }
  bool query(Event) noexcept override { return true; }
  bool wait(Stream, Event) noexcept override { return true; }
  void forget(Event) noexcept override {}
  bool synchronize() noexcept override { return true; }
};

}  // namespace mempool
