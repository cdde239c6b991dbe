// Arena drain: places kept empty because a larger arena is to replace the present one, which requires a
// moment without live ranges. Buffers live at the end of one iteration, such as gradients, are live at the
// end of the next: until then, no buffer is placed where they were, and the fallback serves the buffers
// planned there.
//
// The drain may never empty the arena, for example if a buffer is long-lived: it is tried for a few
// boundaries in a row, with exponential backoff.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "core/pattern.hpp"
#include "core/backoff.hpp"

namespace mempool {

class ArenaDrain {
 public:
  bool any() const noexcept { return !begins_.empty(); }
  bool has(Offset begin) const noexcept { return std::binary_search(begins_.begin(), begins_.end(), begin); }
  // Add the ranges live at boundary number `now`, unless the backoff forbids a drain.
  void add(const std::vector<std::pair<Offset, Offset>>& alive, std::uint64_t now) {
    if (now == last_) return;  // a second request at the same boundary, for another plan
    last_ = now;
    if (rounds_ == kMostRounds) cancel(now);
    if (!tries_.is_due(now)) return;
    ++rounds_;
    for (const auto& [begin, end] : alive) begins_.push_back(begin);
    std::sort(begins_.begin(), begins_.end());
    begins_.erase(std::unique(begins_.begin(), begins_.end()), begins_.end());
  }
  // End the drain: no larger arena can be allocated now, or none is wanted.
  void cancel(std::uint64_t now) noexcept {
    if (!any()) return;
    begins_.clear();
    rounds_ = 0;
    tries_.done(now);
  }
  // Reset the drain: the arena was replaced or released.
  void done() noexcept {
    begins_.clear();
    rounds_ = 0;
    tries_.start_over();
  }

 private:
  static constexpr unsigned kMostRounds = 4;

  std::vector<Offset> begins_;  // sorted
  unsigned rounds_ = 0;
  std::uint64_t last_ = ~std::uint64_t{0};
  ExponentialBackoff tries_{64, 1024};  // boundaries
};

}  // namespace mempool
