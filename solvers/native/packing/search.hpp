// Seeded search over the orders that decide which job fills a valley.
//
// Late acceptance hill climbing (Burke and Bykov, 2017): a changed order is kept if its arena is no larger
// than the current arena, or than the current arena of some steps ago. A try is abandoned as soon as its
// arena exceeds both.
#pragma once

#include <limits>

#include "packing/random.hpp"
#include "packing/skyline.hpp"

namespace packing {

class Search {
 public:
  Search(Jobs jobs, std::vector<int32_t> order, uint64_t seed)
      : jobs_(std::move(jobs)), packer_(jobs_), random_(seed), order_(std::move(order)) {
    arena_ = current_ = packer_.pack(order_, std::numeric_limits<int64_t>::max());
    best_ = packer_.offsets();
    past_.assign(history, current_);
  }

  const Jobs& jobs() const { return jobs_; }
  const std::vector<int64_t>& offsets() const { return best_; }
  int64_t arena() const { return arena_; }
  int64_t looks() const { return looks_; }

  // Continues until the arena is at most `target` or about `budget` more looks are spent. Returns at once,
  // with true, when a smaller arena is found.
  bool advance(int64_t budget, int64_t target) {
    const int64_t until = looks_ + budget;
    while (looks_ < until && arena_ > target) {
      if (step()) return true;
    }
    return false;
  }

 private:
  static constexpr int32_t history = 50;   // steps ago
  static constexpr int64_t looks_a_job = 256;  // cost per job, in looks of first fit; measured

  bool step() {
    const auto before = order_;
    for (int32_t moves = 1 + random_.below(3); moves > 0; --moves) move();
    int64_t& past = past_[steps_++ % history];
    const int64_t arena = packer_.pack(order_, std::max(current_, past));
    looks_ += jobs_.count() * looks_a_job;
    if (arena < 0) order_ = before;
    else current_ = arena;
    past = current_;
    if (current_ >= arena_) return false;
    arena_ = current_;
    best_ = packer_.offsets();
    return true;
  }

  // Moves a random job to a random place.
  void move() {
    const int32_t from = random_.below(jobs_.count()), to = random_.below(jobs_.count());
    const auto at = order_.begin();
    if (from < to) std::rotate(at + from, at + from + 1, at + to + 1);
    else std::rotate(at + to, at + from, at + from + 1);
  }

  const Jobs jobs_;
  ValleyPacker packer_;
  Random random_;
  std::vector<int32_t> order_;
  // offsets of the best arena; ring buffer of the current arenas of the last steps
  std::vector<int64_t> best_, past_;
  int64_t arena_ = 0, current_ = 0, looks_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace packing
