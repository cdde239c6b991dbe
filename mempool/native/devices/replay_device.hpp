// Addresses without memory, handed out like a GPU's plain or growing memory, and a log of the memory held
// over time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "devices/cuda_traits.hpp"

namespace mempool {

// All queued work completes at once.
class ReplayDevice final : public Device {
 public:
  struct Held {  // held from event `start` to `end`; kStill: to the end of the trace
    static constexpr std::int64_t kStill = -1;
    std::int64_t address, size, region, start, end;
  };

  ReplayDevice(std::size_t capacity, bool growing) : traits_(growing ? kGrowingTraits : kWholeTraits), capacity_(capacity) {}

  void at(std::int64_t event) noexcept { now_ = event; }
  std::uint64_t calls() const noexcept { return calls_; }
  const std::vector<Held>& held() const noexcept { return held_; }

  DeviceTraits traits() const noexcept override { return traits_; }
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;
  DeviceMemory memory() const noexcept override;
  Address resize(Address, std::size_t, std::size_t) noexcept override { return 0; }
  void copy(Address, Address, std::size_t, Stream) noexcept override {}
  void zero(Address, std::size_t, Stream) noexcept override {}
  Event record(Stream) noexcept override { return 1; }
  bool query(Event) noexcept override { return true; }
  bool wait(Stream, Event) noexcept override { return true; }
  void forget(Event) noexcept override {}
  bool synchronize() noexcept override { return true; }

 private:
  bool take(Address address, std::size_t bytes) noexcept;  // false: the capacity is exceeded
  void give_back(Address from, Address to) noexcept;
  std::int64_t region_of(Address address) const noexcept;

  DeviceTraits traits_;
  std::size_t capacity_, committed_ = 0;
  std::uint64_t calls_ = 0;
  std::int64_t now_ = 0;
  Address next_ = 2 * kMiB;
  std::vector<Held> held_;                // in order of allocation
  std::map<Address, std::size_t> alive_;  // index into held_ of a segment or a page
  std::vector<Address> regions_;          // bases of the reservations, in ascending order
};

}  // namespace mempool
