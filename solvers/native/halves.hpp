// Packs what is alive at the peak first, without a gap, then what is left on either side of it.
//
// At the peak nothing may be lost. What reaches far to the right stands on top there, the lower the further it reaches to
// the left; what reaches far to the left stands below, the higher the further it reaches to the right. So to the left of
// the peak the upper ones are a clean staircase with nothing above it, to the right the lower ones one with nothing below
// it; and the others reach far on that side. The sides have nothing to do with each other any more. Each is filled as a
// stretch is (see refill.hpp) in which the jobs of the peak stay, the right one upside down.
//
// Where much of all is alive at the peak, the rest fits into what is left on either side, mostly at once.
#pragma once

#include <memory>
#include <tuple>

#include "refill.hpp"

namespace packing {

class Halves {
 public:
  // Of jobs of one piece each, without fixed offsets, which stay where they are in memory; their sizes are multiples of the
  // coarsest alignment. `goal` is an arena.
  Halves(const Jobs& jobs, int64_t goal, uint64_t seed)
      : jobs_(jobs), goal_(goal & ~coarsest_alignment(jobs, jobs.count())), random_(seed), offset_(jobs.count(), -1) {
    stack(peak());
  }

  // Goes on until all is placed within the goal, it is given up or about so many looks are spent; whether all is placed.
  bool advance(int64_t budget) {
    const int64_t until = looks_ + budget;
    if (given_up()) return false;
    for (const bool right : {false, true}) {
      Half& half = right ? right_ : left_;
      if (!half.refill) begin(half, right);
      while (!half.refill->found()) {
        if (given_up() || looks_ >= until) return false;
        const int64_t before = half.refill->looks();
        half.refill->advance(std::min(until - looks_, looks_a_glance));
        looks_ += half.refill->looks() - before;
      }
    }
    settle();
    return true;
  }

  // Where too many tries have failed, or more is alive at the peak than the goal.
  bool given_up() const {
    int64_t failures = 0;
    for (const Half* half : {&left_, &right_}) failures += half->refill ? half->refill->failures() : 0;
    return load_ > goal_ || failures > most_failures;
  }

  int64_t looks() const { return looks_; }
  // When all is placed.
  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t arena() const { return arena_of(jobs_, offset_); }
  int32_t at_peak() const { return at_peak_; }  // jobs alive there

 private:
  static constexpr int64_t most_failures = 3'000, looks_a_glance = 300'000;  // measured
  static constexpr int64_t looks_to_stack = 5, looks_to_begin = 50;  // a job
  struct Half {
    Stretch stretch{{0, 0}};
    std::vector<int32_t> whose;  // jobs of the stretch
    std::unique_ptr<Refill> refill;
  };

  const Piece& piece(int32_t job) const { return jobs_.pieces[job]; }
  bool alive(int32_t job) const { return piece(job).start <= peak_ && piece(job).end > peak_; }

  int32_t peak() const {
    const std::vector<int64_t> load = load_of(jobs_);
    return static_cast<int32_t>(std::max_element(load.begin(), load.end()) - load.begin());
  }

  void stack(int32_t peak) {
    peak_ = peak;
    std::vector<std::tuple<bool, int32_t, int32_t>> order;  // the lowest first
    for (int32_t j = 0; j < jobs_.count(); ++j) {
      if (!alive(j)) continue;
      const int32_t left = peak - piece(j).start, right = piece(j).end - 1 - peak;
      order.emplace_back(right > left, right > left ? -left : right, j);
    }
    std::sort(order.begin(), order.end());
    at_peak_ = static_cast<int32_t>(order.size());
    for (const auto& [above, reach, job] : order) offset_[job] = load_, load_ += jobs_.size[job];
    looks_ += looks_to_stack * jobs_.count();
  }

  void begin(Half& half, bool right) {
    fill_in(half, right);
    half.refill = std::make_unique<Refill>(half.stretch, goal_, random_.next());
    looks_ += looks_to_begin * half.stretch.jobs.count();
  }

  // Instants [0, peak), or those after the peak with all upside down.
  void fill_in(Half& half, bool right) const {
    const Piece part = right ? Piece{peak_ + 1, jobs_.instants - 1} : Piece{0, peak_};
    half.stretch = Stretch(part);
    for (const bool staying : {false, true}) {
      for (int32_t j = 0; j < jobs_.count(); ++j) {
        if (alive(j) != staying || piece(j).end <= part.start || piece(j).start >= part.end) continue;
        half.stretch.add(jobs_, j, piece(j), !staying ? -1 : right ? turned(j, offset_[j]) : offset_[j]);
        half.whose.push_back(j);
      }
      if (!staying) half.stretch.free = half.stretch.jobs.count();
    }
    std::fill(half.stretch.jobs.mask.begin(), half.stretch.jobs.mask.end(), 0);  // none lies elsewhere: no size is in between
  }

  int64_t turned(int32_t job, int64_t offset) const { return goal_ - offset - jobs_.size[job]; }

  void settle() {
    for (const Half* half : {&left_, &right_})
      for (int32_t k = 0; k < half->stretch.free; ++k) {
        const int32_t job = half->whose[k];
        const int64_t offset = half->refill->offsets()[k];
        offset_[job] = half == &right_ ? turned(job, offset) : offset;
      }
  }

  const Jobs& jobs_;
  const int64_t goal_;
  Random random_;
  int32_t peak_ = 0, at_peak_ = 0;
  std::vector<int64_t> offset_;
  Half left_, right_;
  int64_t load_ = 0;  // at the peak
  int64_t looks_ = 0;
};

}  // namespace packing
