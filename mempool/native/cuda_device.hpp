// A CUDA device's memory by plain allocation (no pages), streams and events, through the driver.
//
// Any thread may call, whatever context is current there and whatever graph is being captured: each call makes the
// device's primary context current and the thread relaxed towards captures, and leaves both as it found them.
// Calls that the driver refuses are counted (errors()), and what could not be ordered on the device is waited for. When
// the driver has shut down because the process ends, or in a forked child, where there is none, calls do nothing.
#pragma once

#include <map>
#include <vector>

#include "cuda_driver.hpp"
#include "device.hpp"
#include "sync.hpp"

namespace mempool {

class CudaDevice final : public Device {
 public:
  static constexpr int kUnbound = -1;

  // `index` as the driver numbers the visible devices, or kUnbound: told by bind(). Neither starts the driver nor makes a
  // context: the first call that needs them does, and where there is no such device is refused.
  CudaDevice(int index, const CudaDriver& driver);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Whether the device is now the one of this index; the first call that names a device decides. While unbound, memory
  // is refused.
  bool bind(int index) noexcept;
  // Between these calls a graph is captured on the device of this index: to wait for all of it would break the capture, so
  // every pool that would do so does not, and keeps what it gives back for later. Calls nest.
  static void begin_capture(int index) noexcept;
  static void end_capture(int index) noexcept;
  int index() const noexcept { return index_.load(); }
  const CudaDriver& driver() const noexcept { return driver_; }
  std::uint64_t errors() const noexcept override { return errors_.load(); }  // calls refused, except for lack of memory
  std::string last_error_text() const override { return driver_.text(last_error()); }
  CuCode last_error() const noexcept { return last_error_.load(); }

  DeviceTraits traits() const noexcept override;
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address, std::size_t) noexcept override { return true; }
  void decommit(Address, std::size_t) noexcept override {}
  Address resize(Address, std::size_t, std::size_t) noexcept override { return 0; }
  void release(Address address, std::size_t bytes) noexcept override;
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override;
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override;
  // 0 also where no event could be recorded, after waiting for the stream. An event of a capture is never done: what
  // it stands for is not queued until the graph is launched.
  Event record(Stream stream) noexcept override;
  bool query(Event event) noexcept override;
  // Within a capture: an edge of the graph. A stream of a capture waits for earlier work by blocking the caller. A stream
  // outside would become part of the capture: that is refused and counted as an error.
  void wait(Stream stream, Event event) noexcept override;
  void forget(Event event) noexcept override;
  bool synchronize() noexcept override;
  bool capturing(Stream stream) noexcept override;
  DeviceMemory memory() const noexcept override;
  bool serves(int index) noexcept override { return index_.load(std::memory_order_relaxed) == index || bind(index); }
  bool bound() const noexcept override { return index_.load() != kUnbound; }
  bool is(int index) const noexcept override { return index_.load(std::memory_order_relaxed) == index; }

 private:
  class Scope;
  enum class Capture { none, active, elsewhere };  // elsewhere: of a stream that the legacy default stream waits for
  struct Marker {
    CuEvent event = nullptr;  // none: nothing could be recorded, and nothing is known to be done
    bool captured = false;    // last recorded in a capture
    Marker* next = nullptr;   // in the list of free ones
  };

  bool ok(CuCode code) const noexcept;
  bool absent() const noexcept { return gone_.load() || index_.load() == kUnbound; }
  CuContext context() const noexcept;
  Address allocate(std::size_t bytes) noexcept;
  void free(Address base) noexcept;
  Address take_base(Address address) noexcept;
  void free_waiting() noexcept;
  Marker* take_marker() noexcept;
  void put_back(Marker* marker) noexcept;
  Capture capture_of(Stream stream) const noexcept;
  bool wait_for_all() noexcept;
  struct Shared;
  Shared& shared() const noexcept;
  static Shared& shared(int index) noexcept;

  const CudaDriver& driver_;
  Atomic<int> index_{kUnbound};
  mutable Atomic<CuContext> context_{nullptr};
  mutable Atomic<std::uint64_t> errors_{0};
  mutable Atomic<CuCode> last_error_{cu::kSuccess};
  mutable Atomic<bool> gone_{false};     // the driver has shut down, for this process
  Atomic<bool> unfinished_{false};       // the last wait for everything failed
  mutable Lock lock_;                    // of what follows, and of the making of the context
  Marker* markers_ = nullptr;            // free, each with an event of its own
  std::map<Address, Address> bases_;     // address handed out -> allocation, where they differ
  std::vector<Address> waiting_;         // given back while unfinished_: freed after the next wait that succeeds
  Marker unrecorded_;
};

}  // namespace mempool
