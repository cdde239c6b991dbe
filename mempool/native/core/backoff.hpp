// Exponential backoff for actions that are requested again and again, or in vain.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/occupancy.hpp"

namespace mempool {

// Counts in iterations or boundaries, as the user chooses.
class ExponentialBackoff {
 public:
  // The pause is `shortest` after the first time and doubles after each further time, up to `longest`.
  constexpr ExponentialBackoff(std::uint64_t shortest, std::uint64_t longest) noexcept
      : shortest_(shortest), longest_(longest), pause_(shortest) {}

  bool is_due(std::uint64_t now) const noexcept { return now >= at_; }
  void done(std::uint64_t now) noexcept { done(now, longest_); }
  // Start the pause; given the outcome, the action is worth trying again after `longest` at the latest.
  void done(std::uint64_t now, std::uint64_t longest) noexcept {
    pause_ = std::min(pause_, longest);
    wait(now);
    pause_ = std::min(2 * pause_, longest);
  }
  // Repeat a pause of the present length.
  void wait(std::uint64_t now) noexcept { at_ = now + pause_; }
  void make_due(std::uint64_t at = 0) noexcept { at_ = at; }
  // Reset, as if the action had never been done.
  void start_over() noexcept { pause_ = shortest_, at_ = 0; }

 private:
  std::uint64_t shortest_, longest_;
  std::uint64_t pause_;   // the pause after the next time
  std::uint64_t at_ = 0;  // not due before this time
};

// Arena drain: places kept empty because a larger arena is to replace the present one, which requires a
// moment without live ranges. Buffers live at the end of one iteration, such as gradients, are live at the
// end of the next: until then, no buffer is placed where they were, and the fallback serves the buffers
// planned there.
//
// The drain may never empty the arena, for example if a buffer is long-lived: it is tried for a few
// boundaries in a row, with exponential backoff.
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
