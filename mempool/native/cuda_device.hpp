// A CUDA device's memory of one kind (see cuda_memory.hpp), streams and events, through the driver.
//
// Any thread may call, whatever context is current there and whatever graph is being captured: each call makes the
// device's primary context current and the thread relaxed towards captures, and leaves both as it found them.
// A stream below zero is the per-thread default stream of some thread (see thread_stream.hpp): another thread's cannot be
// recorded and cannot be made to wait, so who must come after it waits for the device.
// Calls that the driver refuses are counted (errors()), and what could not be ordered on the device is waited for. When
// the driver has shut down because the process ends, or in a forked child, where there is none, calls do nothing.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cuda_memory.hpp"
#include "device.hpp"
#include "sync.hpp"

namespace mempool {

class CudaDevice final : public Device {
 public:
  static constexpr int kUnbound = -1;

  // `index` as the driver numbers the visible devices, or kUnbound: told by bind(). Neither starts the driver nor makes a
  // context: the first call that needs them does, and where there is no such device is refused. Throws std::runtime_error
  // where the driver is too old for this kind of memory.
  CudaDevice(int index, const CudaDriver& driver, CudaKind kind = CudaKind::plain);
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
  // The same on every device: a stream of any may become part of the capture.
  static void begin_capture() noexcept;
  static void end_capture() noexcept;
  int index() const noexcept { return index_.load(); }
  CudaKind kind() const noexcept { return kind_; }
  std::uint64_t errors() const noexcept { return calls_.errors(); }  // calls refused, except for lack of memory
  std::string last_error_text() const { return calls_.last_text(); }
  std::uint64_t refusals() const noexcept override;
  std::string last_refusal_text() const override;
  // Throws std::runtime_error where there is no such device, or none with this kind of memory. Starts the driver, and makes
  // no context.
  void check() const;
  // What is written rarely may be in several places at once, and no longer. Managed memory only; false: refused.
  bool read_mostly(Address address, std::size_t bytes, bool on) noexcept;

  // Of pinned memory, which every context uses. The other context that the calling thread means by this stream, or null: it
  // is of this device's own.
  CuContext context_of(Stream stream) const noexcept;
  // Waits for a stream of another context. False: refused, or a graph is captured there.
  bool wait_elsewhere(CuContext context, Stream stream) noexcept;

  DeviceTraits traits() const noexcept override;
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  Address resize(Address, std::size_t, std::size_t) noexcept override { return 0; }
  void release(Address address, std::size_t bytes) noexcept override;
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override;
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override;
  std::size_t foresight() const noexcept override { return backing_->memory->foresight(); }
  void prefetch(Address address, std::size_t bytes) noexcept override;
  // 0 also where no event could be recorded, after waiting for the stream. An event of a capture is never done: what
  // it stands for is not queued until the graph is launched.
  Event record(Stream stream) noexcept override;
  bool query(Event event) noexcept override;
  bool tells(Event event) const noexcept override;
  bool may_record(Stream stream) noexcept override;
  // Within a capture: an edge of the graph. A stream of a capture waits for earlier work by blocking the caller. A stream
  // outside would become part of the capture: that is refused and counted as an error.
  bool wait(Stream stream, Event event) noexcept override;
  void forget(Event event) noexcept override;
  bool synchronize() noexcept override;
  bool capturing(Stream stream) noexcept override;
  std::uint64_t capture(Stream stream) noexcept override;
  DeviceMemory memory() const noexcept override;
  bool serves(int index) noexcept override { return index_.load(std::memory_order_relaxed) == index || bind(index); }
  bool bound() const noexcept override { return index_.load() != kUnbound; }
  bool is(int index) const noexcept override { return index_.load(std::memory_order_relaxed) == index; }

 private:
  class Scope;
  struct Refusals;
  template <class Ask>
  auto ask_for_memory(Ask ask) noexcept;
  enum class Capture { none, active, elsewhere };  // elsewhere: of a stream that the legacy default stream waits for
  struct Marker {
    CuEvent event = nullptr;  // none: nothing could be recorded, and nothing is known to be done
    bool captured = false;    // last recorded in a capture
    Marker* next = nullptr;   // in the list of free ones
  };

  struct Backing {  // outlives the device where something could not be given back
    explicit Backing(const CudaDriver& driver) : calls(driver) {}
    void release_waiting() noexcept;
    CudaCalls calls;
    std::unique_ptr<CudaMemory> memory;
    std::vector<std::pair<Address, std::size_t>> waiting;  // given back while unfinished_: freed after the next wait that succeeds
  };

  bool absent() const noexcept { return calls_.gone() || index_.load() == kUnbound; }
  CuContext context() const noexcept;
  void release_waiting() noexcept;
  Marker* take_marker() noexcept;
  void put_back(Marker* marker) noexcept;
  Capture capture_of(Stream stream) const noexcept;
  bool wait_for_all() noexcept;
  struct Shared;
  Shared& shared() const noexcept;
  static Shared& shared(int index) noexcept;
  static constexpr int kShared = 64;  // indices beyond share with others: wasteful and right

  const CudaDriver& driver_;
  const CudaKind kind_;
  std::unique_ptr<Backing> backing_;
  const CudaCalls& calls_;               // the backing's
  Atomic<int> index_{kUnbound};
  mutable Atomic<CuContext> context_{nullptr};
  Atomic<bool> unfinished_{false};       // the last wait for everything failed
  mutable Lock lock_;                    // of what follows and what waits, and of the making of the context
  Marker* markers_ = nullptr;            // free, each with an event of its own
  Marker unrecorded_;
};

}  // namespace mempool
