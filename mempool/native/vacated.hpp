// Places of an arena that is to be replaced by a larger one, which it can only be while nothing in it is alive. What was alive
// at the end of one iteration, as gradients are, is so at the end of the next: meanwhile nothing is put where it was, and what
// the plan has there comes from the fallback.
//
// That may never empty the arena, as where something stays for good: it is tried for few boundaries in a row, ever more rarely.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "pattern.hpp"
#include "rarely.hpp"

namespace mempool {

class Vacated {
 public:
  bool any() const noexcept { return !begins_.empty(); }
  bool has(Offset begin) const noexcept { return std::binary_search(begins_.begin(), begins_.end(), begin); }
  // At boundary number `now`: also what is alive now, unless it is not the time.
  void add(const std::vector<std::pair<Offset, Offset>>& alive, std::uint64_t now) {
    if (now == last_) return;  // for another plan
    last_ = now;
    if (rounds_ == kMostRounds) stop(now);
    if (!tries_.is_due(now)) return;
    ++rounds_;
    for (const auto& [begin, end] : alive) begins_.push_back(begin);
    std::sort(begins_.begin(), begins_.end());
    begins_.erase(std::unique(begins_.begin(), begins_.end()), begins_.end());
  }
  // No larger arena can be had now, or nobody wants one.
  void stop(std::uint64_t now) noexcept {
    if (!any()) return;
    begins_.clear();
    rounds_ = 0;
    tries_.done(now);
  }
  // The arena is another one, or gone.
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
  Rarely tries_{64, 1024};  // boundaries
};

}  // namespace mempool
