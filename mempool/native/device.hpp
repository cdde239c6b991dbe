// What memory and streams belong to. Everything above this interface is the same on every device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mempool {

using Address = std::uintptr_t;
using Stream = std::int64_t;  // a framework's stream handle; 0 is the default stream
using Event = std::uint64_t;  // 0 is "nothing to wait for"

struct DeviceTraits {
  std::size_t alignment;       // bytes, a power of two; every address handed out is a multiple of it
  std::size_t page;            // bytes committed and returned at a time; 0: a reservation is memory, all or nothing
  std::size_t shared_segment;  // bytes of a segment that several blocks share
  std::size_t large;           // requests of at least this many bytes get a segment of their own
  bool fresh_is_zero;          // newly committed memory reads as zeros
  bool slow_return = false;    // giving memory back waits for all queued work: only where somebody has to wait anyway
  std::size_t granule = 0;     // bytes; a reservation takes a multiple of it, whatever it asks for
  bool prefetches = false;     // more may be reserved than the device holds, and prefetch() brings what comes next
};

struct DeviceMemory {
  std::size_t free, total;  // bytes of the whole device, whoever uses it; zeros: not known
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceTraits traits() const noexcept = 0;

  // Address space of `bytes`, aligned to `alignment`. Where traits().page is 0 this takes the memory too.
  // Returns 0 when refused.
  virtual Address reserve(std::size_t bytes, std::size_t alignment) noexcept = 0;
  // Makes pages of a reservation usable; false: out of memory, nothing changed.
  virtual bool commit(Address address, std::size_t bytes) noexcept = 0;
  // Gives the memory of pages back and keeps their address space; committed again, they are fresh.
  virtual void decommit(Address address, std::size_t bytes) noexcept = 0;
  // A whole reservation, all of it committed, becomes one of `to` bytes that keeps its contents without a copy, perhaps at
  // another address: the pages are mapped anew. Nothing queued may still use it. 0: cannot be, and nothing changed.
  virtual Address resize(Address address, std::size_t from, std::size_t to) noexcept = 0;
  // Gives a whole reservation back.
  virtual void release(Address address, std::size_t bytes) noexcept = 0;

  // Copy and fill in stream order; no-ops where addresses are only simulated.
  virtual void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept = 0;
  virtual void zero(Address address, std::size_t bytes, Stream stream) noexcept = 0;

  // Bytes worth fetching before they are used; 0 while all that is reserved fits on the device.
  virtual std::size_t foresight() const noexcept { return 0; }
  // These bytes are used soon: to be brought to the device if they are elsewhere. Nothing waits for it.
  virtual void prefetch(Address, std::size_t) noexcept {}

  // Events order streams; a device without streams answers at once.
  virtual Event record(Stream stream) noexcept = 0;
  virtual bool query(Event event) noexcept = 0;
  // Whether asking for it will ever tell more than it does now: not where it could not be recorded, or became part of a graph.
  virtual bool tells(Event) const noexcept { return true; }
  virtual bool may_record(Stream) noexcept { return true; }  // an event that tells
  // False: what is queued on the stream from now on may begin before the event has come.
  [[nodiscard]] virtual bool wait(Stream stream, Event event) noexcept = 0;
  virtual void forget(Event event) noexcept = 0;
  // Waits for all that is queued anywhere. false: could not, and nothing may be taken for finished.
  virtual bool synchronize() noexcept = 0;
  // Whether what is queued there becomes part of a graph instead of being done: neither wait for it nor let others wait.
  virtual bool capturing(Stream) noexcept { return false; }
  // Which graph: a number that the driver gives once in a process; 0: none, or one that can no longer become a graph.
  virtual std::uint64_t capture(Stream) noexcept { return 0; }

  // Requests for memory of the calling thread that failed for another reason than lack of it, and what is to be said of the
  // last one.
  virtual std::uint64_t refusals() const noexcept { return 0; }
  virtual std::string last_refusal_text() const { return {}; }
  virtual DeviceMemory memory() const noexcept { return {0, 0}; }
  // Whether a request for the device that a framework knows by this index is its; one that is not bound yet binds itself.
  virtual bool serves(int) noexcept { return true; }
  virtual bool is(int) const noexcept { return true; }  // the same, of one that is bound
  virtual bool bound() const noexcept { return true; }  // false: it is not known yet which one it is, and has no memory
};

}  // namespace mempool
