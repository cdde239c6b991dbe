// Seeded search over orders of placement: "squeaky wheel" (Joslin and Clements, 1999).
//
// Place in order by first fit under a limit one byte below the best arena; the first job that does not fit under it is
// moved to an earlier place, and the placement goes on from there. Reaching the end is a better plan.
#pragma once

#include <numeric>

#include "fit.hpp"

namespace packing {

// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine, unlike the standard library's.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int32_t below(int32_t n) { return static_cast<int32_t>((next() >> 32) * static_cast<uint64_t>(n) >> 32); }

 private:
  uint64_t state_;
};

class Search {
 public:
  // `offsets` is a valid placement with the given arena; the search looks for arenas below it.
  Search(Jobs jobs, std::vector<int64_t> offsets, int64_t arena, uint64_t seed)
      : jobs_(std::move(jobs)), placed_(jobs_), random_(seed), best_(std::move(offsets)), offset_(best_),
        arena_(arena), place_(jobs_.count()) {
    restart();
  }

  const std::vector<int64_t>& offsets() const { return best_; }
  int64_t arena() const { return arena_; }
  int64_t looks() const { return looks_; }

  // Goes on until the arena is at most `target` or about `budget` more placed pieces have been looked at.
  // Returns whether a better arena was found on the way; returns at once when one is.
  bool advance(int64_t budget, int64_t target) {
    const int64_t until = looks_ + budget;
    while (looks_ < until && arena_ > target) {
      if (next_ == jobs_.count()) return accept();
      if (!place_next() && !promote()) restart();
    }
    return false;
  }

 private:
  bool place_next() {
    const int32_t job = order_[next_];
    const int64_t at = jobs_.fixed[job] >= 0 ? jobs_.fixed[job] : placed_.find(job, Rule::first_fit, looks_);
    if (at + jobs_.size[job] >= arena_) return false;
    offset_[job] = at;
    placed_.insert(job, at);
    place_[job] = next_++;
    return true;
  }

  // Moves the job that did not fit to a random earlier place, not before the fixed ones.
  bool promote() {
    if (next_ <= fixed_ || ++failures_ > 64 + jobs_.count()) return false;
    const int32_t to = fixed_ + random_.below(next_ - fixed_);
    placed_.remove_if([&](int32_t job) { return place_[job] >= to; });
    looks_ += next_;
    std::rotate(order_.begin() + to, order_.begin() + next_, order_.begin() + next_ + 1);
    next_ = to;
    return true;
  }

  bool accept() {
    arena_ = 0;
    for (int32_t j = 0; j < jobs_.count(); ++j) arena_ = std::max(arena_, offset_[j] + jobs_.size[j]);
    best_ = offset_;
    restart();
    return true;
  }

  // The best plan's own order, by offset: first fit in that order gives a plan no worse, so it is where to look around.
  void restart() {
    order_.resize(jobs_.count());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return best_[a] < best_[b]; });
    const auto middle =
        std::stable_partition(order_.begin(), order_.end(), [&](int32_t j) { return jobs_.fixed[j] >= 0; });
    fixed_ = static_cast<int32_t>(middle - order_.begin());
    placed_.clear();
    next_ = 0;
    failures_ = 0;
    looks_ += jobs_.count();
  }

  const Jobs jobs_;
  Placed placed_;
  Random random_;
  std::vector<int64_t> best_, offset_;
  int64_t arena_;               // of best_
  std::vector<int32_t> order_;  // the order being tried; order_[0, next_) are placed, the first fixed_ have no choice
  std::vector<int32_t> place_;  // of a placed job: where it stands in order_
  int32_t next_ = 0, fixed_ = 0, failures_ = 0;
  int64_t looks_ = 0;
};

}  // namespace packing
