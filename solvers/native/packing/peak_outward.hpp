// Peak outward: packs the jobs near the peak in time within the goal, and the others as low as is quickly
// possible.
//
// Far from the peak, failures are often unrelated to the peak: in a stack of some hundred jobs a few percent
// of the arena are lost in many slits, though the load is that much lower there. Starting over at the peak
// would not help. So only the jobs alive within some mean lifetimes of the peak must fit the goal. The jobs
// before and after use a goal that grows with each failure; if the plan is then too high, window repair
// repacks these times (see window_repair.hpp), mostly at the first attempt.
#pragma once

#include <cmath>
#include <memory>
#include <tuple>

#include "packing/orders.hpp"
#include "packing/window_refill.hpp"

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
    const std::vector<int64_t> packed = pack_in_order(jobs_, start_order(jobs_), cancel);
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

// Packs the jobs alive at the peak first, without a gap, then the remaining jobs on both sides of the peak.
//
// No bytes may be lost at the peak. Jobs that reach far to the right stand on top there, lower the further
// they reach to the left; jobs that reach far to the left stand below, higher the further they reach to the
// right. So to the left of the peak the upper jobs form a clean staircase with nothing above, to the right
// the lower jobs form a staircase with nothing below; the other jobs reach far on that side. The two sides
// are then independent. Each side is filled as a time window (see window_refill.hpp) in which the jobs of the
// peak stay, the right side upside down.
//
// If the load falls soon and far from its peak, the other jobs mostly fit into the space on both sides at
// once. If one side cannot be filled, more of the stack is ordered in favour of that side, a few times.
class PeakHalves {
 public:
  // The jobs must have one piece each, no fixed offsets, and sizes that are multiples of the coarsest
  // alignment; `jobs` must outlive this. Only jobs alive in `part`, which must contain the peak, are placed.
  // `goal` is an arena in bytes; the search gives up after `tries` tries.
  PeakHalves(const Jobs& jobs, Piece part, int32_t peak, int64_t goal, uint64_t seed, int32_t tries)
      : jobs_(jobs), part_(part), tries_(tries), goal_(goal & ~coarsest_alignment(jobs, jobs.count())), random_(seed), peak_(peak),
        offset_(jobs.count(), -1) {
    stack();
  }

  // Continues until all jobs are placed within the goal, the search gives up or about `budget` work units are
  // spent; returns whether all jobs are placed.
  bool advance(int64_t budget) {
    for (const int64_t until = work_ + budget;;) {
      const bool right = harder_is_right_ != is_filled(harder_is_right_);
      if (is_filled(right)) return settle(), true;
      if (given_up() || work_ >= until) return false;
      fill(right, until - work_);
    }
  }

  // True if too many tries have failed, or the load at the peak exceeds the goal.
  bool given_up() const { return load_ > goal_ || tries_ <= 0; }

  int64_t work() const { return work_; }
  // Valid when all jobs are placed; -1 for jobs outside `part`.
  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  static constexpr int64_t most_failures = 500, work_a_turn = 300'000;  // of a try; measured
  static constexpr int64_t work_to_stack = 5, work_to_begin = 50;  // per job
  struct Side {
    Side(WindowExcerpt side, int64_t goal, uint64_t seed) : excerpt(std::move(side)), refill(excerpt.window, goal, seed) {}
    const WindowExcerpt excerpt;
    WindowRefill refill;
  };

  const Piece& piece(int32_t job) const { return jobs_.pieces[job]; }
  bool alive(int32_t job) const { return piece(job).covers(peak_); }

  void stack() {
    load_ = 0;
    for (const int32_t job : staircase(jobs_, peak_, tilt_)) offset_[job] = load_, load_ += jobs_.size[job];
    work_ += work_to_stack * jobs_.count();
  }

  std::unique_ptr<Side>& side_of(bool right) { return right ? right_ : left_; }
  bool is_filled(bool right) const {
    const auto& side = right ? right_ : left_;
    return side && side->refill.found();
  }

  void fill(bool right, int64_t budget) {
    if (!side_of(right)) begin(right);
    WindowRefill& refill = side_of(right)->refill;
    const int64_t before = refill.work();
    refill.advance(std::min(budget, work_a_turn));
    work_ += refill.work() - before;
    if (!refill.found() && refill.failures() > most_failures) tilt(right);
  }

  // Creates the left side, instants up to the peak, or the right side, upside down.
  void begin(bool right) {
    const Piece times = right ? Piece{peak_ + 1, part_.end} : Piece{part_.start, peak_};
    WindowExcerpt excerpt(jobs_, times, [&](int32_t job) -> int64_t {
      return !alive(job) ? -1 : right ? turned(job, offset_[job]) : offset_[job];
    });
    work_ += work_to_begin * excerpt.window.jobs.count();
    side_of(right) = std::make_unique<Side>(std::move(excerpt), goal_, random_.next());
  }

  // Starts over with a stack that favours the side that has failed, halfway (geometrically) to the last stack
  // that failed on the other side.
  void tilt(bool right) {
    (right ? least_tilt_ : most_tilt_) = tilt_;
    tilt_ = std::sqrt(least_tilt_ * most_tilt_);
    harder_is_right_ = right;
    left_.reset(), right_.reset();
    if (--tries_ > 0) stack();
  }

  int64_t turned(int32_t job, int64_t offset) const { return goal_ - offset - jobs_.size[job]; }

  void settle() {
    for (const bool right : {false, true}) {
      const Side& side = *side_of(right);
      for (int32_t k = 0; k < side.excerpt.window.free; ++k) {
        const int32_t job = side.excerpt.whose[k];
        const int64_t offset = side.refill.offsets()[k];
        offset_[job] = right ? turned(job, offset) : offset;
      }
    }
  }

  const Jobs& jobs_;
  const Piece part_;
  int32_t tries_;  // tries left
  const int64_t goal_;
  Random random_;
  const int32_t peak_;
  std::vector<int64_t> offset_;
  std::unique_ptr<Side> left_, right_;
  int64_t load_ = 0;  // load at the peak
  // Least ratio of the reach to the right to the reach to the left for a job in the upper part of the stack.
  double tilt_ = 1, least_tilt_ = 0x1p-4, most_tilt_ = 0x1p4;
  bool harder_is_right_ = false;  // side that is filled first
  int64_t work_ = 0;
};

// The heuristic: the halves near the peak, then the times before and after.
class PeakOutward {
 public:
  // Requirements as for PeakHalves. The fewer jobs are near the peak, the more tries are made, as each try costs
  // less.
  PeakOutward(const Jobs& jobs, int64_t goal, uint64_t seed, int32_t tries) : PeakOutward(jobs, load_of(jobs), goal, seed, tries) {}

  // Continues until all jobs are placed, the search gives up or about `budget` work units are spent; returns
  // whether all jobs are placed.
  bool advance(int64_t budget) {
    for (const int64_t until = work() + budget; !found();) {
      if (given_up() || work() >= until) return false;
      if (!near_is_placed_) place_near(until - work());
      else place_far(until - work());
    }
    return true;
  }

  // Time near the peak; the jobs alive then must fit the goal.
  Piece near() const { return near_; }

  // True if the jobs near the peak did not fit the goal in any try.
  bool given_up() const { return halves_.given_up(); }

  int64_t work() const { return halves_.work() + work_; }
  // Valid when all jobs are placed; -1 for jobs not placed. The arena may be larger than the goal.
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t arena() const { return arena_of(jobs_, offset_); }

 private:
  // times within this many mean lifetimes (of the jobs alive at the peak) of the peak are near; up to twice
  // as many
  static constexpr int64_t lifetimes = 2;
  static constexpr int32_t most_times = 12;  // largest factor on the number of tries
  // the near part is less than 1 / least_part of all time; otherwise all time is near
  static constexpr int64_t least_part = 3;
  // work_to_begin: per job; measured
  static constexpr int64_t most_failures = 30, work_a_turn = 300'000, work_to_begin = 50;

  struct Far {
    Far(const Jobs& jobs, Piece part, const std::vector<int64_t>& offset, int64_t goal, uint64_t seed)
        : excerpt(jobs, part, [&](int32_t job) { return offset[job]; }), refill(excerpt.window, goal, seed), step(1 + goal / 1024) {}
    const WindowExcerpt excerpt;
    WindowRefill refill;
    int64_t step;         // increase of the goal after the next failures
    int64_t allowed = 0;  // failures allowed with this goal
  };

  PeakOutward(const Jobs& jobs, const std::vector<int64_t>& load, int64_t goal, uint64_t seed, int32_t tries)
      : jobs_(jobs), goal_(goal), random_(~seed),
        peak_(static_cast<int32_t>(std::max_element(load.begin(), load.end()) - load.begin())), near_(around_peak(load)),
        halves_(jobs, near_, peak_, goal, seed, tries * times()), offset_(jobs.count(), -1) {
    if (near_.start > 0) far_.push_back({0, near_.start});
    if (near_.end < length()) far_.push_back({near_.end, length()});
  }

  int32_t length() const { return jobs_.instants - 1; }
  bool found() const { return near_is_placed_ && far_.empty(); }

  // Extends to the instants of lowest load on both sides; all time if little would be far.
  Piece around_peak(const std::vector<int64_t>& load) const {
    int64_t sum = 0, count = 0;
    for (const Piece& piece : jobs_.pieces)
      if (piece.covers(peak_)) sum += piece.end - piece.start, ++count;
    const int64_t reach = lifetimes * sum / std::max<int64_t>(count, 1);
    const auto quietest = [&](int64_t from, int64_t to) {
      return static_cast<int32_t>(std::min_element(load.begin() + from, load.begin() + to) - load.begin());
    };
    const int32_t start = peak_ > 2 * reach ? quietest(peak_ - 2 * reach, peak_ - reach) : 0;
    const int32_t end = peak_ + 2 * reach < length() ? quietest(peak_ + reach + 1, peak_ + 2 * reach + 1) : length();
    return least_part * (end - start) < length() ? Piece{start, end} : Piece{0, length()};
  }

  int32_t times() const {
    int32_t count = 1;
    for (const Piece& piece : jobs_.pieces) count += piece.start < near_.end && piece.end > near_.start;
    return std::min(most_times, 1 + jobs_.count() / count);
  }

  void place_near(int64_t budget) {
    near_is_placed_ = halves_.advance(budget);
    if (near_is_placed_) offset_ = halves_.offsets();
  }

  void place_far(int64_t budget) {
    if (!now_) {
      now_ = std::make_unique<Far>(jobs_, far_.back(), offset_, goal_, random_.next());
      work_ += work_to_begin * now_->excerpt.window.jobs.count();
    }
    WindowRefill& refill = now_->refill;
    const int64_t before = refill.work();
    const bool placed = refill.advance(std::min(budget, work_a_turn));
    work_ += refill.work() - before;
    if (refill.failures() > now_->allowed + most_failures) {
      now_->allowed = refill.failures();
      refill.relax(refill.goal() + now_->step);
      now_->step += now_->step / 4;
    }
    if (!placed) return;
    for (int32_t k = 0; k < now_->excerpt.window.free; ++k) offset_[now_->excerpt.whose[k]] = refill.offsets()[k];
    now_.reset();
    far_.pop_back();
  }

  const Jobs& jobs_;
  const int64_t goal_;
  Random random_;
  const int32_t peak_;
  const Piece near_;
  PeakHalves halves_;
  bool near_is_placed_ = false;
  std::vector<Piece> far_;  // parts still to be filled, the last one next
  std::unique_ptr<Far> now_;
  std::vector<int64_t> offset_;
  int64_t work_ = 0;  // far from the peak
};

}  // namespace packing
