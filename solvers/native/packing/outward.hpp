// Peak outward: packs the jobs near the peak in time within the goal (see halves.hpp), and the others as low
// as is quickly possible.
//
// Far from the peak, failures are often unrelated to the peak: in a stack of some hundred jobs a few percent
// of the arena are lost in many slits, though the load is that much lower there. Starting over at the peak
// would not help. So only the jobs alive within some mean lifetimes of the peak must fit the goal. The jobs
// before and after use a goal that grows with each failure; if the plan is then too high, window repair
// repacks these times (see stretches.hpp), mostly at the first attempt.
#pragma once

#include "packing/halves.hpp"

namespace packing {

class Outward {
 public:
  // Requirements as for Halves. The fewer jobs are near the peak, the more tries are made, as each try costs
  // less.
  Outward(const Jobs& jobs, int64_t goal, uint64_t seed, int32_t tries) : Outward(jobs, load_of(jobs), goal, seed, tries) {}

  // Continues until all jobs are placed, the search gives up or about `budget` looks are spent; returns
  // whether all jobs are placed.
  bool advance(int64_t budget) {
    for (const int64_t until = looks() + budget; !found();) {
      if (given_up() || looks() >= until) return false;
      if (!near_is_placed_) place_near(until - looks());
      else place_far(until - looks());
    }
    return true;
  }

  // Time near the peak; the jobs alive then must fit the goal.
  Piece near() const { return near_; }

  // True if the jobs near the peak did not fit the goal in any try.
  bool given_up() const { return halves_.given_up(); }

  int64_t looks() const { return halves_.looks() + looks_; }
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
  // looks_to_begin: per job; measured
  static constexpr int64_t most_failures = 30, looks_a_glance = 300'000, looks_to_begin = 50;

  struct Far {
    Far(const Jobs& jobs, Piece part, const std::vector<int64_t>& offset, int64_t goal, uint64_t seed)
        : excerpt(jobs, part, [&](int32_t job) { return offset[job]; }), refill(excerpt.stretch, goal, seed), step(1 + goal / 1024) {}
    const Excerpt excerpt;
    Refill refill;
    int64_t step;         // increase of the goal after the next failures
    int64_t allowed = 0;  // failures allowed with this goal
  };

  Outward(const Jobs& jobs, const std::vector<int64_t>& load, int64_t goal, uint64_t seed, int32_t tries)
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
      looks_ += looks_to_begin * now_->excerpt.stretch.jobs.count();
    }
    Refill& refill = now_->refill;
    const int64_t before = refill.looks();
    const bool placed = refill.advance(std::min(budget, looks_a_glance));
    looks_ += refill.looks() - before;
    if (refill.failures() > now_->allowed + most_failures) {
      now_->allowed = refill.failures();
      refill.relax(refill.goal() + now_->step);
      now_->step += now_->step / 4;
    }
    if (!placed) return;
    for (int32_t k = 0; k < now_->excerpt.stretch.free; ++k) offset_[now_->excerpt.whose[k]] = refill.offsets()[k];
    now_.reset();
    far_.pop_back();
  }

  const Jobs& jobs_;
  const int64_t goal_;
  Random random_;
  const int32_t peak_;
  const Piece near_;
  Halves halves_;
  bool near_is_placed_ = false;
  std::vector<Piece> far_;  // parts still to be filled, the last one next
  std::unique_ptr<Far> now_;
  std::vector<int64_t> offset_;
  int64_t looks_ = 0;  // far from the peak
};

}  // namespace packing
