// Buffers used by streams other than their own, including freed buffers on which such a stream may still
// work. Host order is not device order: the memory is not reused before those streams have completed.
//
// Events on the using streams tell when a freed buffer is unused. During a graph capture no event is recorded
// or queried, because the event would become part of the graph; buffers freed during the capture wait for
// resume().
#pragma once

#include <map>
#include <vector>

#include "devices/device.hpp"

namespace mempool {

class ForeignUses {
 public:
  struct Freed {
    Address address;
    Stream stream;  // on which the program freed the buffer
  };

  explicit ForeignUses(Device& device) : device_(device) {}
  ~ForeignUses();
  ForeignUses(const ForeignUses&) = delete;
  ForeignUses& operator=(const ForeignUses&) = delete;

  // Return true if no live or deferred buffer has a foreign use.
  bool empty() const noexcept { return uses_.empty(); }
  // Record the use of a live buffer by another stream than the buffer's own. May throw std::bad_alloc.
  void add(Address address, Stream stream);
  bool has(Address address) const noexcept { return uses_.count(address) != 0; }
  bool waits(Address address) const noexcept;
  std::size_t waiting() const noexcept { return waiting_; }  // number of deferred buffers
  // Free a buffer with foreign uses. Allocates no memory.
  void free(Address address, Stream stream) noexcept;

  // Return and forget the oldest freed buffer whose using streams have completed, or an address of 0. Call repeatedly
  // until the result is 0. A call with `begin` queries busy streams again.
  Freed next(bool begin) noexcept;
  // Mark all freed buffers as completed, after a device synchronization.
  void synchronized() noexcept;

  void pause() noexcept { ++paused_; }
  void resume() noexcept;

 private:
  struct By {
    Stream stream;
    Event event;  // 0: nothing to wait for, or not recorded yet
  };
  struct Use {
    std::vector<By> by;
    Address address = 0;
    Stream stream = 0;
    bool freed = false;
    bool recorded = false;
    Use* next = nullptr;  // the next freed buffer
  };
  struct Known {
    Stream stream;
    std::size_t uses;     // buffers that the stream uses, live and freed
    std::size_t waiting;  // freed buffers among `uses`
  };
  void record(Use& use) noexcept;
  bool record_again(By& by) noexcept;
  bool through(Use& use) noexcept;
  void forget(Stream stream) noexcept;

  Device& device_;
  std::map<Address, Use> uses_;
  Use* first_ = nullptr;  // freed buffers, oldest first
  Use* last_ = nullptr;
  std::vector<Stream> busy_;  // busy streams since next(true); has capacity for all of streams_
  std::vector<Known> streams_;  // streams with foreign uses
  std::size_t awaited_ = 0;    // number of streams that some freed buffer waits for
  std::size_t waiting_ = 0;
  unsigned paused_ = 0;
};

}  // namespace mempool
