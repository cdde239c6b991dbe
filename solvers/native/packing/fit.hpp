// First fit and best fit: places jobs one at a time, in a given order, into the first or the best gap.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "packing/jobs.hpp"

namespace packing {

enum class Rule { first_fit, best_fit };

// The pieces placed so far, by offset. Stored as columns, since the scan below takes all the time.
class Placed {
 public:
  explicit Placed(const Jobs& jobs) : jobs_(jobs) {}
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  void clear() {
    low_.clear(); high_.clear(); piece_.clear(); job_.clear();
  }

  void insert(int32_t job, int64_t offset) {
    const auto at = std::upper_bound(low_.begin(), low_.end(), offset) - low_.begin();
    const auto many = jobs_.first[job + 1] - jobs_.first[job];
    low_.insert(low_.begin() + at, many, offset);
    high_.insert(high_.begin() + at, many, offset + jobs_.size[job]);
    job_.insert(job_.begin() + at, many, job);
    const auto* pieces = jobs_.pieces.data() + jobs_.first[job];
    piece_.insert(piece_.begin() + at, pieces, pieces + many);
  }

  // Removes every job for which gone(job) is true.
  template <class Gone>
  void remove_if(Gone gone) {
    size_t kept = 0;
    for (size_t k = 0; k < job_.size(); ++k) {
      if (gone(job_[k])) continue;
      low_[kept] = low_[k]; high_[kept] = high_[k]; piece_[kept] = piece_[k]; job_[kept] = job_[k];
      ++kept;
    }
    low_.resize(kept); high_.resize(kept); piece_.resize(kept); job_.resize(kept);
  }

  // Returns the offset for `job`; adds the number of placed pieces examined to `work`.
  int64_t find(int32_t job, Rule rule, int64_t& work) const {
    if (rule == Rule::best_fit) return best_gap(job, work);
    if (jobs_.single(job)) return first_gap(job, work, [&](Piece placed) { return meets<true>(placed, job); });
    if (!lay_out(job)) return first_gap(job, work, [&](Piece placed) { return meets<false>(placed, job); });
    return first_gap(job, work, [&](Piece placed) { return meets_laid_out(placed); });
  }

  // Returns a placed job that conflicts with `job` at `offset`, or -1.
  int32_t in_the_way(int32_t job, int64_t offset) const {
    const int64_t top = offset + jobs_.size[job];
    for (size_t k = 0; k < low_.size() && low_[k] < top; ++k)
      if (high_[k] > offset && meets<false>(piece_[k], job)) return job_[k];
    return -1;
  }

 private:
  template <bool Single>
  bool meets(Piece placed, int32_t job) const {
    const Piece* p = jobs_.pieces.data() + jobs_.first[job];
    if constexpr (Single) return (placed.start < p->end) & (p->start < placed.end);
    for (const Piece* last = jobs_.pieces.data() + jobs_.first[job + 1]; p != last; ++p)
      if (placed.start < p->end && p->start < placed.end) return true;
    return false;
  }

  // For a job of many pieces, tabulates the next time alive for each instant, so that a test against a piece
  // is one lookup. Done only if cheaper than comparing all pieces with all.
  bool lay_out(int32_t job) const {
    const auto first = static_cast<size_t>(jobs_.first[job]), last = static_cast<size_t>(jobs_.first[job + 1]) - 1;
    const Piece* const pieces = jobs_.pieces.data();
    const auto length = static_cast<size_t>(pieces[last].end - pieces[first].start);
    if (length > (last - first) * piece_.size()) return false;
    begun_ = pieces[first].start;
    next_.resize(length + 1);
    int32_t t = begun_;
    for (size_t k = first; k <= last; ++k) {
      for (; t < pieces[k].start; ++t) next_[t - begun_] = pieces[k].start;
      for (; t < pieces[k].end; ++t) next_[t - begun_] = t;
    }
    next_[length] = std::numeric_limits<int32_t>::max();
    return true;
  }

  bool meets_laid_out(Piece placed) const {
    const auto length = static_cast<int32_t>(next_.size()) - 1;
    return next_[std::clamp(placed.start - begun_, 0, length)] < placed.end;
  }

  template <class OverlapGraph>
  int64_t first_gap(int32_t job, int64_t& work, OverlapGraph meets) const {
    const int64_t size = jobs_.size[job];
    const size_t n = low_.size();
    int64_t at = 0;
    size_t k = 0;
    // No branches on `meets`: whether two lifetimes meet is unpredictable.
    for (; k < n && low_[k] < at + size; ++k) {
      const int64_t above = jobs_.aligned(job, high_[k]);
      at = meets(piece_[k]) ? std::max(at, above) : at;
    }
    work += static_cast<int64_t>(k) + 1;
    return at;
  }

  // Returns the smallest gap that fits.
  int64_t best_gap(int32_t job, int64_t& work) const {
    const int64_t size = jobs_.size[job];
    int64_t at = 0, best = -1, smallest = std::numeric_limits<int64_t>::max();
    for (size_t k = 0; k < low_.size(); ++k) {
      if (!meets<false>(piece_[k], job)) continue;
      const int64_t gap = low_[k] - at;
      if (gap >= size && gap < smallest) smallest = gap, best = at;
      at = std::max(at, jobs_.aligned(job, high_[k]));
    }
    work += static_cast<int64_t>(low_.size()) + 1;
    return best >= 0 ? best : at;
  }

  const Jobs& jobs_;
  std::vector<int64_t> low_, high_;  // addresses [low, high) of each placed piece; low ascends
  std::vector<Piece> piece_;
  std::vector<int32_t> job_;
  mutable std::vector<int32_t> next_;  // by instant since `begun_`: next time alive of the job tabulated last
  mutable int32_t begun_ = 0;
};

// Returns two jobs whose fixed offsets overlap, or {-1, -1}.
inline std::pair<int32_t, int32_t> fixed_conflict(const Jobs& jobs) {
  Placed placed(jobs);
  for (int32_t j = 0; j < jobs.count(); ++j) {
    if (jobs.fixed[j] < 0) continue;
    if (const int32_t other = placed.in_the_way(j, jobs.fixed[j]); other >= 0) return {other, j};
    placed.insert(j, jobs.fixed[j]);
  }
  return {-1, -1};
}

// Resumable placement in a given order: advance() stops after a number of work units and continues when called
// again, so that the caller can check the clock, the budget and Ctrl-C.
class FitPacker {
 public:
  explicit FitPacker(Jobs jobs)
      : jobs_(std::move(jobs)), placed_(jobs_), offset_(jobs_.count(), 0) {}

  const Jobs& jobs() const { return jobs_; }
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t arena() const { return arena_; }
  int64_t work() const { return work_; }

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
    const int64_t until = work_ + budget;
    for (; next_ < jobs_.count(); ++next_) {
      if (work_ >= until) return false;
      const int32_t job = order_[next_];
      const int64_t at = jobs_.fixed[job] >= 0 ? jobs_.fixed[job] : placed_.find(job, rule_, work_);
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
  int64_t work_ = 0;  // placed pieces examined since construction
};

}  // namespace packing
