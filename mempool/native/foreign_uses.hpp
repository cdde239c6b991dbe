// Buffers that other streams than their own use, and those of them that the program has freed while such a stream may
// still be at work on them. Host order is not device order: nobody gets their memory before those streams are through.
//
// Freed buffers are told by events. None is recorded or asked for while a graph is captured, since that would become part
// of the graph; what is freed then waits for resume().
#pragma once

#include <map>
#include <vector>

#include "device.hpp"

namespace mempool {

class ForeignUses {
 public:
  struct Freed {
    Address address;
    Stream stream;  // on which the program freed it
  };

  explicit ForeignUses(Device& device) : device_(device) {}
  ~ForeignUses();
  ForeignUses(const ForeignUses&) = delete;
  ForeignUses& operator=(const ForeignUses&) = delete;

  // Neither a live buffer with such a use nor one that waits.
  bool empty() const noexcept { return uses_.empty(); }
  // A live buffer is used by a stream that is not its own. May throw std::bad_alloc.
  void add(Address address, Stream stream);
  bool has(Address address) const noexcept { return uses_.count(address) != 0; }
  bool waits(Address address) const noexcept;
  std::size_t waiting() const noexcept { return waiting_; }  // how many
  // The program has freed a buffer of these. Needs no memory.
  void free(Address address, Stream stream) noexcept;

  // The oldest of those with which the streams are through, or an address of 0; it is forgotten. To be called until there
  // is none: what a call learns of a busy stream holds for the calls that follow it, until `begin`.
  Freed next(bool begin) noexcept;
  // The device has been waited for: all that is freed is through.
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
    Use* next = nullptr;  // freed after this one
  };
  struct Known {
    Stream stream;
    std::size_t uses;     // buffers that it uses, live and freed
    std::size_t waiting;  // of these, freed
  };
  void record(Use& use) noexcept;
  bool record_again(By& by) noexcept;
  bool through(Use& use) noexcept;
  void forget(Stream stream) noexcept;

  Device& device_;
  std::map<Address, Use> uses_;
  Use* first_ = nullptr;  // freed, oldest first
  Use* last_ = nullptr;
  std::vector<Stream> busy_;  // since next(true); has room for all of streams_
  std::vector<Known> streams_;  // that use any
  std::size_t awaited_ = 0;    // of these, how many something waits for
  std::size_t waiting_ = 0;
  unsigned paused_ = 0;
};

}  // namespace mempool
