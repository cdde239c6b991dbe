// Hosted memory: the blocks come from another allocator, the *host*, such as PyTorch's own one.
//
// A call of the host may run any code, for example observers that wait for the interpreter's lock or that free buffers
// of the pool. The host is therefore never called while a pool's lock is held: a pool *requests* a block; after the
// release of the lock, the adapter gets the block from the host and *offers* it; the pool's next attempt takes the
// block. Released blocks wait in a list until the adapter returns them.
#pragma once

#include <utility>
#include <vector>

#include "core/sync.hpp"
#include "devices/device.hpp"

namespace mempool {

class HostedMemory {
 public:
  // Request a block of at least `bytes`, and return true; false: an offered block exists, or the host has just refused
  // this size.
  bool request(std::size_t bytes) noexcept {
    const Guarded guard(lock_);
    if (offered_bytes_ >= bytes || bytes >= refused_) return false;
    requested_ = bytes;
    any_request().store(true);
    return true;
  }
  // Return and forget the bytes of the request; 0: none.
  std::size_t take_request() noexcept {
    const Guarded guard(lock_);
    return std::exchange(requested_, 0);
  }
  // Offer a block of the host; 0: the host has refused that many bytes.
  void offer(Address block, std::size_t bytes) noexcept {
    const Guarded guard(lock_);
    offered_ = block;
    offered_bytes_ = block == 0 ? 0 : bytes;
    refused_ = block == 0 ? bytes : kNoRefusal;
  }
  // Return and forget an offered block that the pool has not taken, or 0; forget a refusal, too.
  Address end_offer() noexcept {
    const Guarded guard(lock_);
    refused_ = kNoRefusal;
    offered_bytes_ = 0;
    return std::exchange(offered_, 0);
  }
  // In the iterations after an arena was taken, let the adapter look for requests, of which there is none, so that it
  // releases the host's cache: buffers from before have ended, whose place in the arena now serves.
  void begin_iteration() noexcept {
    const Guarded guard(lock_);
    if (settles_ == 0) return;
    --settles_;
    any_request().store(true);
  }
  // Take the offered block; 0: none of at least `bytes`.
  Address take(std::size_t bytes) noexcept {
    const Guarded guard(lock_);
    if (offered_bytes_ < bytes) return 0;
    settles_ = offered_ != 0 ? kSettles : 0;
    offered_bytes_ = 0;
    return std::exchange(offered_, 0);
  }

  // --- for all devices
  static void give_back(Address block) noexcept {
    const Guarded guard(returned().lock);
    try {
      returned().blocks.push_back(block);
      any_returned().store(true);
    } catch (...) {  // never handed back: wasteful but correct
    }
  }
  // Return and forget a released block; 0: none.
  static Address take_returned() noexcept {
    if (!any_returned().load(std::memory_order_relaxed)) return 0;
    const Guarded guard(returned().lock);
    std::vector<Address>& blocks = returned().blocks;
    const Address block = blocks.empty() ? 0 : blocks.back();
    if (!blocks.empty()) blocks.pop_back();
    any_returned().store(!blocks.empty());
    return block;
  }
  static Atomic<bool>& any_returned() noexcept {  // a block is to be handed back
    static Atomic<bool> any{false};
    return any;
  }
  // Set by each request; the adapter clears the flag before it looks at all devices.
  static Atomic<bool>& any_request() noexcept {
    static Atomic<bool> any{false};
    return any;
  }

 private:
  struct Returned {
    Lock lock;
    std::vector<Address> blocks;
  };
  static Returned& returned() noexcept {
    static auto* const all = new Returned;  // never destroyed: pools end at the end of the process
    return *all;
  }
  // The arena may be taken in the middle of an iteration, whose gradients live until the middle of the next.
  static constexpr unsigned kSettles = 2;
  static constexpr std::size_t kNoRefusal = ~std::size_t{0};

  Lock lock_;
  std::size_t requested_ = 0;
  unsigned settles_ = 0;  // iterations until no buffer of the time before the arena is alive
  Address offered_ = 0;
  std::size_t offered_bytes_ = 0;
  std::size_t refused_ = kNoRefusal;  // this many bytes and more
};

}  // namespace mempool
