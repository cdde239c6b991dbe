// Packs the jobs alive at the peak first, without a gap, then the remaining jobs on both sides of the peak.
//
// No bytes may be lost at the peak. Jobs that reach far to the right stand on top there, lower the further
// they reach to the left; jobs that reach far to the left stand below, higher the further they reach to the
// right. So to the left of the peak the upper jobs form a clean staircase with nothing above, to the right
// the lower jobs form a staircase with nothing below; the other jobs reach far on that side. The two sides
// are then independent. Each side is filled as a time window (see refill.hpp) in which the jobs of the peak
// stay, the right side upside down.
//
// If the load falls soon and far from its peak, the other jobs mostly fit into the space on both sides at
// once. If one side cannot be filled, more of the stack is ordered in favour of that side, a few times.
#pragma once

#include <cmath>
#include <memory>

#include "packing/refill.hpp"
#include "packing/staircase.hpp"

namespace packing {

class Halves {
 public:
  // The jobs must have one piece each, no fixed offsets, and sizes that are multiples of the coarsest
  // alignment; `jobs` must outlive this. Only jobs alive in `part`, which must contain the peak, are placed.
  // `goal` is an arena in bytes; the search gives up after `tries` tries.
  Halves(const Jobs& jobs, Piece part, int32_t peak, int64_t goal, uint64_t seed, int32_t tries)
      : jobs_(jobs), part_(part), tries_(tries), goal_(goal & ~coarsest_alignment(jobs, jobs.count())), random_(seed), peak_(peak),
        offset_(jobs.count(), -1) {
    stack();
  }

  // Continues until all jobs are placed within the goal, the search gives up or about `budget` looks are
  // spent; returns whether all jobs are placed.
  bool advance(int64_t budget) {
    for (const int64_t until = looks_ + budget;;) {
      const bool right = harder_is_right_ != is_filled(harder_is_right_);
      if (is_filled(right)) return settle(), true;
      if (given_up() || looks_ >= until) return false;
      fill(right, until - looks_);
    }
  }

  // True if too many tries have failed, or the load at the peak exceeds the goal.
  bool given_up() const { return load_ > goal_ || tries_ <= 0; }

  int64_t looks() const { return looks_; }
  // Valid when all jobs are placed; -1 for jobs outside `part`.
  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  static constexpr int64_t most_failures = 500, looks_a_glance = 300'000;  // of a try; measured
  static constexpr int64_t looks_to_stack = 5, looks_to_begin = 50;  // per job
  struct Half {
    Half(Excerpt side, int64_t goal, uint64_t seed) : excerpt(std::move(side)), refill(excerpt.stretch, goal, seed) {}
    const Excerpt excerpt;
    Refill refill;
  };

  const Piece& piece(int32_t job) const { return jobs_.pieces[job]; }
  bool alive(int32_t job) const { return piece(job).covers(peak_); }

  void stack() {
    load_ = 0;
    for (const int32_t job : staircase(jobs_, peak_, tilt_)) offset_[job] = load_, load_ += jobs_.size[job];
    looks_ += looks_to_stack * jobs_.count();
  }

  std::unique_ptr<Half>& half(bool right) { return right ? right_ : left_; }
  bool is_filled(bool right) const {
    const auto& half = right ? right_ : left_;
    return half && half->refill.found();
  }

  void fill(bool right, int64_t budget) {
    if (!half(right)) begin(right);
    Refill& refill = half(right)->refill;
    const int64_t before = refill.looks();
    refill.advance(std::min(budget, looks_a_glance));
    looks_ += refill.looks() - before;
    if (!refill.found() && refill.failures() > most_failures) tilt(right);
  }

  // Creates the left side, instants up to the peak, or the right side, upside down.
  void begin(bool right) {
    const Piece side = right ? Piece{peak_ + 1, part_.end} : Piece{part_.start, peak_};
    Excerpt excerpt(jobs_, side, [&](int32_t job) -> int64_t {
      return !alive(job) ? -1 : right ? turned(job, offset_[job]) : offset_[job];
    });
    looks_ += looks_to_begin * excerpt.stretch.jobs.count();
    half(right) = std::make_unique<Half>(std::move(excerpt), goal_, random_.next());
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
      const Half& side = *half(right);
      for (int32_t k = 0; k < side.excerpt.stretch.free; ++k) {
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
  std::unique_ptr<Half> left_, right_;
  int64_t load_ = 0;  // load at the peak
  // Least ratio of the reach to the right to the reach to the left for a job in the upper part of the stack.
  double tilt_ = 1, least_tilt_ = 0x1p-4, most_tilt_ = 0x1p4;
  bool harder_is_right_ = false;  // side that is filled first
  int64_t looks_ = 0;
};

}  // namespace packing
