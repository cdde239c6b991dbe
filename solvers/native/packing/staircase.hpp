// Stacks the jobs alive at the peak without a gap, in an order that leaves a staircase on both sides; and a
// quick heuristic to place the other jobs beside the stack.
#pragma once

#include <tuple>

#include "packing/earliest.hpp"

namespace packing {

// Returns the jobs of one piece that are alive at an instant, lowest first. Jobs that reach at least `tilt`
// times as far to the right as to the left stand on top, lower the further they reach to the left; the others
// stand below, higher the further they reach to the right.
inline std::vector<int32_t> staircase(const Jobs& jobs, int32_t peak, double tilt) {
  std::vector<std::tuple<bool, int32_t, int32_t>> order;
  for (int32_t j = 0; j < jobs.count(); ++j) {
    const Piece piece = jobs.pieces[j];
    if (!piece.covers(peak)) continue;
    const int32_t left = peak - piece.start, right = piece.end - 1 - peak;
    const bool above = right > tilt * left;
    order.emplace_back(above, above ? -left : right, j);
  }
  std::sort(order.begin(), order.end());
  std::vector<int32_t> result;
  for (const auto& [above, reach, job] : order) result.push_back(job);
  return result;
}

// One side of the peak, filled from the ground: the left side as is, the right side upside down and reversed
// in time.
class Flank {
 public:
  // `offset` holds the offsets of the jobs of the peak, `load` bytes in all; -1 for the other jobs.
  Flank(const Jobs& whole, const std::vector<int64_t>& offset, int32_t peak, int64_t load, bool right)
      : whole_(whole), load_(load), right_(right) {
    const int32_t from = right ? peak + 1 : 0, to = right ? whole.instants - 1 : peak;
    for (int32_t j = 0; j < whole.count(); ++j) {
      const int32_t start = std::max(whole.pieces[j].start, from) - from, end = std::min(whole.pieces[j].end, to) - from;
      if (start >= end) continue;
      const Piece piece = right ? Piece{to - from - end, to - from - start} : Piece{start, end};
      jobs_.add(piece, whole.size[j], 0, offset[j] < 0 ? -1 : turned(j, offset[j]));
      whose_.push_back(j);
      free_ += offset[j] < 0;
    }
    jobs_.instants = to - from + 1;
  }

  // Packs valley by valley, jobs with the earliest start (furthest from the peak) first; returns false when
  // cancelled.
  bool pack(std::vector<int64_t>& offset, const Cancel& cancel) {
    height_ = load_;
    if (free_ == 0) return true;
    const std::vector<int64_t> packed = pack_in_order(jobs_, earliest_first(jobs_), cancel);
    if (packed.empty()) return false;
    height_ = arena_of(jobs_, packed);
    for (int32_t k = 0; k < jobs_.count(); ++k)
      if (jobs_.fixed[k] < 0) offset[whose_[k]] = turned(whose_[k], packed[k]);
    return true;
  }

  int64_t height() const { return height_; }  // height of all packed jobs

 private:
  int64_t turned(int32_t job, int64_t offset) const { return right_ ? load_ - offset - whole_.size[job] : offset; }

  const Jobs& whole_;
  const int64_t load_;
  const bool right_;
  Jobs jobs_;
  std::vector<int32_t> whose_;
  int32_t free_ = 0;
  int64_t height_ = 0;
};

// Packs all jobs, which must have one piece, no fixed offset, and sizes divisible by the coarsest alignment.
// Gaps under the staircase of the peak are lost; if the load falls from one high peak to both sides, the load
// falls faster than the gaps grow. Returns no offsets when cancelled.
inline std::vector<int64_t> pack_peak_first(const Jobs& jobs, const Cancel& cancel) {
  const int32_t peak = peak_of(jobs);
  std::vector<int64_t> offset(jobs.count(), -1);
  int64_t load = 0, below = 0;
  for (const int32_t job : staircase(jobs, peak, 1)) offset[job] = load, load += jobs.size[job];
  const std::vector<int64_t> stacked = offset;
  for (const bool right : {false, true}) {
    Flank flank(jobs, stacked, peak, load, right);
    if (!flank.pack(offset, cancel)) return {};
    if (right) below = std::max<int64_t>(0, flank.height() - load);  // depth below the stack
  }
  for (int64_t& of_job : offset) of_job += below;
  return offset;
}

}  // namespace packing
