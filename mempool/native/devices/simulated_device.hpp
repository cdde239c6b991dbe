// A device with addresses but no memory: a capacity, an optional page size, counted calls, failures on
// demand.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "core/sync.hpp"
#include "devices/device.hpp"

namespace mempool {

struct SimulatedOptions {
  std::size_t capacity = std::size_t{1} << 40;  // bytes that may be committed at one time
  std::size_t page = 0;                         // bytes; 0: all or nothing, like plain device memory
  std::size_t alignment = 512;                  // bytes
  std::size_t shared_segment = std::size_t{2} << 20;
  std::size_t large = std::size_t{1} << 20;
};

struct SimulatedCounts {
  std::size_t committed = 0;       // bytes held now
  std::size_t peak_committed = 0;  // bytes
  std::uint64_t reserves = 0, releases = 0;
  std::uint64_t resizes = 0;       // reservations that were resized
  std::uint64_t refusals = 0;      // requests answered with "out of memory"
  std::uint64_t live_reservations = 0;
  std::uint64_t events_alive = 0;
  std::uint64_t synchronizes = 0;
  // calls that no correct pool makes (unknown address, pages outside a reservation)
  std::uint64_t errors = 0;
};

// Streams are queues whose work finishes on the test's command: `record` returns an event that is pending
// until `finish(stream)` or `synchronize()`.
class SimulatedDevice final : public Device {
 public:
  explicit SimulatedDevice(const SimulatedOptions& options) : options_(options) {}
  DeviceTraits traits() const noexcept override;
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  Address resize(Address address, std::size_t from, std::size_t to) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;
  void copy(Address, Address, std::size_t, Stream) noexcept override {}
  void zero(Address, std::size_t, Stream) noexcept override {}
  Event record(Stream stream) noexcept override;
  bool query(Event event) noexcept override;
  bool wait(Stream stream, Event event) noexcept override;
  void forget(Event event) noexcept override;
  bool synchronize() noexcept override;

  void finish(Stream stream) noexcept;
  // Begin a graph capture on these streams; an empty list ends the capture. Calls that would spoil the
  // capture count as errors: waiting for the device, releasing memory, querying an event, and events of these
  // streams.
  void capture(std::vector<Stream> streams);
  void set_capacity(std::size_t bytes) noexcept;
  // refuse every request for memory after this many more calls
  void fail_after(std::uint64_t calls) noexcept;
  SimulatedCounts counts() const noexcept;

 private:
  struct Reservation {
    std::size_t bytes;
    std::set<std::size_t> pages;  // committed page numbers (page > 0)
  };
  bool refuse(std::size_t bytes) noexcept;
  void spoils_capture() noexcept { counts_.errors += captured_.empty() ? 0 : 1; }
  void spoils_capture(Stream stream) noexcept;
  void add(std::size_t bytes) noexcept;
  Address new_address(std::size_t bytes, std::size_t alignment) noexcept;
  std::map<Address, Reservation>::iterator find(Address address, std::size_t bytes) noexcept;

  mutable Lock lock_;
  SimulatedOptions options_;
  SimulatedCounts counts_;
  std::map<Address, Reservation> reservations_;
  std::vector<Stream> captured_;
  std::map<Event, Stream> pending_;  // events recorded and not finished
  std::set<Event> events_;           // events alive
  Address next_ = Address{1} << 44;  // addresses are never reused, so that a stale one is always recognised
  Event next_event_ = 1;
  std::uint64_t calls_left_ = ~std::uint64_t{0};
};

// Addresses without memory, handed out like a GPU's plain or growing memory, and a log of the memory held
// over time.
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
