// Resumable placement in a given order: advance() stops after a number of looks and continues when called
// again, so that the caller can check the clock, the budget and Ctrl-C.
#pragma once

#include "packing/fit.hpp"

namespace packing {

class Packer {
 public:
  explicit Packer(Jobs jobs)
      : jobs_(std::move(jobs)), placed_(jobs_), offset_(jobs_.count(), 0) {}

  const Jobs& jobs() const { return jobs_; }
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t arena() const { return arena_; }
  int64_t looks() const { return looks_; }

  // Starts over with `order`, a permutation of the jobs. Jobs with a fixed offset are always placed first.
  void begin(std::vector<int32_t> order, Rule rule) {
    std::stable_partition(order.begin(), order.end(), [&](int32_t j) { return jobs_.fixed[j] >= 0; });
    order_ = std::move(order);
    rule_ = rule;
    placed_.clear();
    next_ = 0;
    arena_ = 0;
  }

  // Places jobs until all are placed (returns true) or `budget` more placed pieces have been examined
  // (false).
  bool advance(int64_t budget) {
    const int64_t until = looks_ + budget;
    for (; next_ < jobs_.count(); ++next_) {
      if (looks_ >= until) return false;
      const int32_t job = order_[next_];
      const int64_t at = jobs_.fixed[job] >= 0 ? jobs_.fixed[job] : placed_.find(job, rule_, looks_);
      offset_[job] = at;
      arena_ = std::max(arena_, at + jobs_.size[job]);
      placed_.insert(job, at);
    }
    return true;
  }

 private:
  const Jobs jobs_;
  Placed placed_;
  std::vector<int32_t> order_;
  std::vector<int64_t> offset_;
  Rule rule_ = Rule::first_fit;
  int32_t next_ = 0;   // jobs order_[0, next_) are placed
  int64_t arena_ = 0;  // highest end of a placed job
  int64_t looks_ = 0;  // placed pieces examined since construction
};

}  // namespace packing
