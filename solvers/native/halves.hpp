// Packs what is alive at the peak first, without a gap, then what is left on either side of it.
//
// At the peak nothing may be lost. What reaches far to the right stands on top there, the lower the further it reaches to
// the left; what reaches far to the left stands below, the higher the further it reaches to the right. So to the left of
// the peak the upper ones are a clean staircase with nothing above it, to the right the lower ones one with nothing below
// it; and the others reach far on that side. The sides have nothing to do with each other any more. Each is filled as a
// stretch is (see refill.hpp) in which the jobs of the peak stay, the right one upside down.
//
// Where the load falls soon and far from its peak, the rest fits into what is left on either side, mostly at once. Where
// one side cannot be filled, more of the stack is ordered for that side, a few times.
#pragma once

#include <cmath>
#include <memory>

#include "refill.hpp"
#include "staircase.hpp"

namespace packing {

class Halves {
 public:
  // Of jobs of one piece each, without fixed offsets, which stay where they are in memory; their sizes are multiples of the
  // coarsest alignment. Only those that are alive in `part`, which has the peak in it, are placed. `goal` is an arena; after
  // so many tries it is given up.
  Halves(const Jobs& jobs, Piece part, int32_t peak, int64_t goal, uint64_t seed, int32_t tries)
      : jobs_(jobs), part_(part), tries_(tries), goal_(goal & ~coarsest_alignment(jobs, jobs.count())), random_(seed), peak_(peak),
        offset_(jobs.count(), -1) {
    stack();
  }

  // Goes on until all is placed within the goal, it is given up or about so many looks are spent; whether all is placed.
  bool advance(int64_t budget) {
    for (const int64_t until = looks_ + budget;;) {
      const bool right = harder_is_right_ != is_filled(harder_is_right_);
      if (is_filled(right)) return settle(), true;
      if (given_up() || looks_ >= until) return false;
      fill(right, until - looks_);
    }
  }

  // Where too many tries have failed, or more is alive at the peak than the goal.
  bool given_up() const { return load_ > goal_ || tries_ <= 0; }

  int64_t looks() const { return looks_; }
  // When all is placed; -1 for the others.
  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  static constexpr int64_t most_failures = 500, looks_a_glance = 300'000;  // of a try; measured
  static constexpr int64_t looks_to_stack = 5, looks_to_begin = 50;  // a job
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

  // Instants up to the peak, or those after it with all upside down.
  void begin(bool right) {
    const Piece side = right ? Piece{peak_ + 1, part_.end} : Piece{part_.start, peak_};
    Excerpt excerpt(jobs_, side, [&](int32_t job) -> int64_t {
      return !alive(job) ? -1 : right ? turned(job, offset_[job]) : offset_[job];
    });
    looks_ += looks_to_begin * excerpt.stretch.jobs.count();
    half(right) = std::make_unique<Half>(std::move(excerpt), goal_, random_.next());
  }

  // All anew, with a stack that is better for the side that has failed, halfway to one that was not for the other.
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
  int32_t tries_;  // that are left
  const int64_t goal_;
  Random random_;
  const int32_t peak_;
  std::vector<int64_t> offset_;
  std::unique_ptr<Half> left_, right_;
  int64_t load_ = 0;  // at the peak
  // How many times as far as to the left what stands above reaches to the right, at least.
  double tilt_ = 1, least_tilt_ = 0x1p-4, most_tilt_ = 0x1p4;
  bool harder_is_right_ = false;  // that side is filled first
  int64_t looks_ = 0;
};

}  // namespace packing
