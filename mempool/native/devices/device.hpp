// The device interface: owner of memory and streams. All code above this interface is the same on every
// device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mempool {

using Address = std::uintptr_t;
using Stream = std::int64_t;  // a framework's stream handle; 0 is the default stream
using Event = std::uint64_t;  // 0: nothing to wait for

struct DeviceTraits {
  std::size_t alignment;       // bytes, a power of two; every address handed out is a multiple
  std::size_t page;  // bytes committed and returned at a time; 0: a reservation is memory, all or nothing
  std::size_t shared_segment;  // bytes of a segment that several blocks share
  std::size_t large;           // requests of at least this many bytes get their own segment
  bool fresh_is_zero;          // newly committed memory reads as zeros
  // releasing memory waits for all queued work, so release only when a wait is needed anyway
  bool slow_return = false;
  std::size_t granule = 0;     // bytes; every reservation is rounded up to a multiple
  bool prefetches = false;  // more may be reserved than the device holds; prefetch() fetches upcoming buffers
};

class HostedMemory;

struct DeviceMemory {
  std::size_t free, total;  // bytes of the whole device, for all users; zeros: unknown
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceTraits traits() const noexcept = 0;

  // Reserve address space of `bytes`, aligned to `alignment`. If traits().page is 0 this allocates the memory
  // too. Returns 0 when refused.
  virtual Address reserve(std::size_t bytes, std::size_t alignment) noexcept = 0;
  // Make pages of a reservation usable; false: out of memory, nothing changed.
  virtual bool commit(Address address, std::size_t bytes) noexcept = 0;
  // Return the memory of pages and keep their address space; pages committed again are fresh.
  virtual void decommit(Address address, std::size_t bytes) noexcept = 0;
  // Resize a whole, fully committed reservation to `to` bytes and keep the contents without a copy, possibly
  // at another address, by mapping the pages anew. No queued work may still use the memory. 0: impossible,
  // nothing changed.
  virtual Address resize(Address address, std::size_t from, std::size_t to) noexcept = 0;
  // Release a whole reservation.
  virtual void release(Address address, std::size_t bytes) noexcept = 0;

  // Copy and fill in stream order; no-ops where addresses are only simulated.
  virtual void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept = 0;
  virtual void zero(Address address, std::size_t bytes, Stream stream) noexcept = 0;

  // Return the bytes worth prefetching before their use; 0 while all reserved memory fits on the device.
  virtual std::size_t foresight() const noexcept { return 0; }
  // Prefetch bytes that are used soon and may be elsewhere. No work waits for the prefetch.
  virtual void prefetch(Address, std::size_t) noexcept {}

  // Events order streams; a device without streams answers at once.
  virtual Event record(Stream stream) noexcept = 0;
  virtual bool query(Event event) noexcept = 0;
  // Return true if a later query of the event can have another result; false if the event could not be recorded or
  // became part of a graph.
  virtual bool tells(Event) const noexcept { return true; }
  virtual bool may_record(Stream) noexcept { return true; }  // true: an event recorded now would be queryable
  // Let the stream's later work wait for the event. False: that work may begin before the event has occurred.
  [[nodiscard]] virtual bool wait(Stream stream, Event event) noexcept = 0;
  virtual void forget(Event event) noexcept = 0;
  // Wait for all queued work. False: the wait failed, and no work may be considered finished.
  virtual bool synchronize() noexcept = 0;
  // Return true if work queued on the stream becomes part of a graph instead of being executed: then neither
  // wait for the stream nor let other streams wait.
  virtual bool capturing(Stream) noexcept { return false; }
  // Return the number of the stream's capture, which the driver assigns once per process; 0: no capture, or
  // one that can no longer become a graph.
  virtual std::uint64_t capture(Stream) noexcept { return 0; }

  // Count of this thread's memory requests that failed for a reason other than lack of memory, and the
  // message of the last one.
  virtual std::uint64_t refusals() const noexcept { return 0; }
  virtual std::string last_refusal_text() const { return {}; }
  virtual DeviceMemory memory() const noexcept { return {0, 0}; }
  // Return true if a request for the device with this framework index belongs to this device; a device not
  // yet bound binds itself.
  virtual bool serves(int) noexcept { return true; }
  virtual bool is(int) const noexcept { return true; }  // the same for a bound device
  // false: the device is not known yet and has no memory
  virtual bool bound() const noexcept { return true; }
  // Return the exchange of blocks with the allocator that the memory comes from; null: the memory comes from the
  // device itself.
  virtual HostedMemory* hosted() noexcept { return nullptr; }
};

// Properties of CUDA memory, of a real driver and of a replay with addresses only.
inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// The driver allocates in pieces of 2 MiB, so that a separate segment wastes 1 MiB on average, and a release
// waits for the device. Both costs are small for 10 MiB and more; smaller requests share segments of 20 MiB.
inline constexpr DeviceTraits kWholeTraits{512, 0, 20 * kMiB, 10 * kMiB, false, true, 2 * kMiB};
// The host rounds by its own rules.
inline constexpr DeviceTraits kHostedTraits{512, 0, 20 * kMiB, 10 * kMiB, false, true, 512};

// Pages are 2 MiB, as on every device so far; a device with larger ones is refused. Address space is cheap,
// and free memory in one segment coalesces regardless of former use. Unmapping waits for the device, so that
// no memory is released automatically.
inline constexpr std::size_t kGrowingShared = std::size_t{1} << 40;  // larger than the memory of any device
inline constexpr DeviceTraits kGrowingTraits{512, 2 * kMiB, kGrowingShared, kGrowingShared, false, true, 2 * kMiB};

}  // namespace mempool
