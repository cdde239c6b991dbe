// Memory of one kind (see cuda_memory.hpp), streams and events of a CUDA device, through the driver.
//
// Any thread may call, with any current context and during any capture: each call makes the device's primary context
// current and relaxes the thread's capture mode, and restores both. A stream below
// zero is the per-thread default stream of some thread (see threads.hpp). From other threads no event
// can be recorded on such a stream and no wait queued there, so that work that must come after the stream's
// work waits for the device. Calls that the driver refuses are counted (errors()), and an order that cannot
// be established on the device is replaced by a wait. After the driver has shut down at the end of the
// process, and in a forked child, where no driver exists, calls do nothing.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "devices/cuda_memory.hpp"
#include "devices/device.hpp"
#include "core/sync.hpp"

namespace mempool {

class CudaDevice final : public Device {
 public:
  static constexpr int kUnbound = -1;

  // `index`: the driver's number of the visible device, or kUnbound: set later by bind(). The constructor neither
  // starts the driver nor creates a context. The first call that needs them does, and fails if the device does not
  // exist. Throws std::runtime_error if the driver is too old for this kind of memory.
  // `else_plain`: use plain memory on a device without growing memory. The device is then unbound until
  // bind() starts the driver and looks; with an index, bind() accepts that index only.
  CudaDevice(int index, const CudaDriver& driver, CudaKind kind = CudaKind::plain, bool else_plain = false);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Bind the device to an index; true: the device now has this index. The first call that names a device
  // decides. While unbound, requests for memory are refused.
  bool bind(int index) noexcept;
  // Between these calls a graph is captured on the device with this index. Waiting for the whole device would
  // break the capture, so that pools do not wait and defer the release of memory. Calls nest.
  static void begin_capture(int index) noexcept;
  static void end_capture(int index) noexcept;
  // The same for every device: a stream of any device may join the capture.
  static void begin_capture() noexcept;
  static void end_capture() noexcept;
  int index() const noexcept { return index_.load() != kUnbound ? index_.load() : wanted_; }
  CudaKind kind() const noexcept { return kind_.load(); }
  // refused calls, except for lack of memory
  std::uint64_t errors() const noexcept { return calls_.errors(); }
  std::string last_error_text() const { return calls_.last_text(); }
  std::uint64_t refusals() const noexcept override;
  std::string last_refusal_text() const override;
  // Throws std::runtime_error if the device does not exist or lacks this kind of memory. Starts the driver,
  // creates no context.
  void check() const;

  // For pinned memory, which every context uses: return the other context that the calling thread means by
  // this stream, or null: the stream belongs to this device's own context.
  CuContext context_of(Stream stream) const noexcept;
  // Wait for a stream of another context. False: refused, or the stream is part of a graph capture.
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
  // Record an event. Also 0 if no event could be recorded, after waiting for the stream. An event of a
  // capture never completes: the captured work is not queued until the graph is launched.
  Event record(Stream stream) noexcept override;
  bool query(Event event) noexcept override;
  bool tells(Event event) const noexcept override;
  bool may_record(Stream stream) noexcept override;
  // Within a capture the wait becomes an edge of the graph. A captured stream waits for earlier work by
  // blocking the caller. A wait of a stream outside for a captured event would add the stream to the capture;
  // the wait is refused and counted as an error.
  bool wait(Stream stream, Event event) noexcept override;
  void forget(Event event) noexcept override;
  bool synchronize() noexcept override;
  bool capturing(Stream stream) noexcept override;
  std::uint64_t capture(Stream stream) noexcept override;
  DeviceMemory memory() const noexcept override;
  bool serves(int index) noexcept override { return index_.load(std::memory_order_relaxed) == index || bind(index); }
  bool bound() const noexcept override { return index_.load() != kUnbound; }
  HostedMemory* hosted() noexcept override { return backing_->memory->hosted(); }
  bool is(int index) const noexcept override { return index_.load(std::memory_order_relaxed) == index; }

 private:
  class Scope;
  struct Refusals;
  template <class Ask>
  auto ask_for_memory(Ask ask) noexcept;
  // elsewhere: the capture of a stream that the legacy default stream waits for
  enum class Capture { none, active, elsewhere };
  struct Marker {
    CuEvent event = nullptr;  // null: no event could be recorded, and completion is unknown
    bool captured = false;    // last recorded in a capture
    Marker* next = nullptr;   // in the free list
  };

  struct Backing {  // memory and driver calls; outlives the device if memory could not be released
    explicit Backing(const CudaDriver& driver) : calls(driver) {}
    void release_waiting() noexcept;
    CudaCalls calls;
    std::unique_ptr<CudaMemory> memory;
    // released while unfinished_: freed after the next successful wait
    std::vector<std::pair<Address, std::size_t>> waiting;
  };

  void choose_kind(int index) noexcept;
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
  static constexpr int kShared = 64;  // higher indices share entries: wasteful but correct

  const CudaDriver& driver_;
  Atomic<CudaKind> kind_;
  Atomic<bool> undecided_;               // the kind of memory is not chosen yet: see bind()
  const int wanted_;                     // the only index that bind() accepts, or kUnbound: any
  std::unique_ptr<Backing> backing_;
  const CudaCalls& calls_;               // of the backing
  Atomic<int> index_{kUnbound};
  mutable Atomic<CuContext> context_{nullptr};
  Atomic<bool> unfinished_{false};       // the last wait for the whole device failed
  mutable Lock lock_;  // protects the members below, the waiting list, and the creation of the context
  Marker* markers_ = nullptr;            // free list; each marker has an event
  Marker unrecorded_;
};

}  // namespace mempool
