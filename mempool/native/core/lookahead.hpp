// The next uses of a follower's plan, each announced once and within a window, for a device that prefetches
// memory.
#pragma once

#include <algorithm>

#include "core/follower.hpp"

namespace mempool {

class Lookahead {
 public:
  // Call `tell(offset, bytes)` for upcoming buffers, after an allocation that was served at the planned
  // address.
  template <class Tell>
  void go_on(const Follower& follower, std::size_t window, Tell tell) {
    const Pattern& pattern = *follower.pattern();
    const Table& table = *follower.table();
    const std::uint64_t length = table.length(), now = follower.iteration() * length + follower.position();
    if (&table != table_ || now < at_ || now > told_) {  // the follower has moved elsewhere
      table_ = &table;
      at_ = told_ = now;
      ahead_ = 0;
    }
    for (; at_ < now; ++at_) ahead_ -= std::min(ahead_, table.sizes[at_ % length]);
    const bool repeats = pattern.cyclic && (pattern.next == nullptr || pattern.next == &pattern);
    const std::uint64_t end = repeats ? now + length : (follower.iteration() + 1) * length;
    for (; ahead_ < window && told_ < end; ++told_) {
      const std::uint64_t position = told_ % length, bytes = table.sizes[position];
      const Slot& slot = table.slots[position * pattern.unroll + told_ / length % pattern.unroll];
      if (slot.offset != kDynamic) tell(slot.offset, bytes);
      ahead_ += bytes;
    }
  }

 private:
  const Table* table_ = nullptr;  // only compared, because the table may no longer exist
  // Positions continue counting across the iterations of a table.
  std::uint64_t at_ = 0;    // the follower's position at the last call
  std::uint64_t told_ = 0;  // all positions before this one are announced
  std::uint64_t ahead_ = 0; // bytes of the positions from `at_` to `told_`
};

}  // namespace mempool
