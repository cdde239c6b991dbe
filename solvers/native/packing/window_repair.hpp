// Window repair: packs a time window around the highest job again, around the jobs that reach into the window
// from before and after. If the load varies, only few windows are hard, and the rest of the plan is good
// enough.
#pragma once

#include <memory>

#include "packing/window_refill.hpp"

namespace packing {

class WindowRepair {
 public:
  // `offsets` is a plan of `jobs`, which must outlive this. Jobs with a fixed offset or several pieces are
  // never moved.
  WindowRepair(const Jobs& jobs, std::vector<int64_t> offsets, uint64_t seed)
      : jobs_(jobs), offset_(std::move(offsets)), random_(seed) {
    settle();
  }

  const std::vector<int64_t>& offsets() const { return offset_; }
  int64_t arena() const { return arena_; }
  int64_t work() const { return work_; }

  // Continues until the arena is at most `target` or about `budget` more work units are spent; returns whether the
  // arena has become smaller.
  bool advance(int64_t budget, int64_t target) {
    const int64_t until = work_ + budget, before = arena_;
    while (work_ < until && arena_ > target) {
      if (refill_) refill(target, until - work_);
      else if (!choose(target)) failed(target);
    }
    return arena_ < before;
  }

 private:
  static constexpr double first_slack = 0x1p-11, least_slack = 0x1p-18;
  static constexpr int64_t first_patience = 10'000'000, most_patience = int64_t{1} << 40;
  static constexpr int64_t work_a_job = 600;  // per job of a pass without backtracking; measured
  // per job; and least work units of a choice; measured
  static constexpr int64_t work_to_begin = 50, work_to_choose = 1000;
  static constexpr int64_t work_a_piece = 5;  // per piece around the highest job; measured
  static constexpr int32_t most_jobs = 20'000;
  static constexpr int32_t first_span = 1500;

  // Chooses a window around the highest job, and a goal for the window; returns false when there is none.
  bool choose(int64_t target) {
    while (arena_ <= goal_for(target)) slack_ = slack_ > least_slack ? slack_ / 4 : 0;
    goal_ = goal_for(target);
    work_ += work_to_choose;
    if (!jobs_.single(highest_) || jobs_.fixed[highest_] >= 0) return false;
    for (;;) {
      const int32_t half = 1 + static_cast<int32_t>(span_ * (0.5 + random_.unit()));
      const bool chosen = window_around(jobs_.pieces[jobs_.first[highest_]], half);
      const bool whole = half >= jobs_.instants, few = window_.free < 2 * (window_.jobs.count() - window_.free);
      if (window_.jobs.count() > most_jobs) {
        span_ = std::max(1.0, span_ / 2);
        return false;
      }
      if (chosen && (whole || !few)) break;
      if (whole) return false;
      widen(1.5);
    }
    work_ += work_to_begin * window_.jobs.count();
    patience_ = work_patience_ + work_a_job * window_.jobs.count();
    refill_ = std::make_unique<WindowRefill>(window_, goal_, random_.next());
    return true;
  }

  void refill(int64_t target, int64_t left) {
    const int64_t before = refill_->work();
    const bool found = refill_->advance(std::min(left, patience_));
    const int64_t spent = refill_->work() - before;
    work_ += spent, patience_ -= spent;
    if (found) {
      for (int32_t j = 0; j < window_.free; ++j) offset_[whose_[j]] = refill_->offsets()[j];
      settle();
    } else if (patience_ <= 0) {
      failed(target);
    } else {
      return;
    }
    refill_.reset();
  }

  // After a failure: asks for a smaller improvement next time; when the improvement would be negligible, asks
  // for more again, with more patience.
  void failed(int64_t target) {
    const double gap = static_cast<double>(arena_ - target) / static_cast<double>(arena_);
    slack_ = std::max(least_slack, slack_ * 2);
    if (slack_ < gap / 2) return;
    slack_ = gap / 8;
    work_patience_ = std::min(most_patience, work_patience_ + work_patience_ / 2);
    widen(1.2);
  }

  void widen(double by) { span_ = std::min({span_ * by, static_cast<double>(jobs_.instants), 0x1p28}); }

  int64_t goal_for(int64_t target) const {
    return target + static_cast<int64_t>(slack_ * static_cast<double>(arena_));
  }

  // Cuts the window at an instant before and one after the piece, about `half` instants away, at which the
  // load is lowest.
  bool window_around(Piece piece, int32_t half) {
    const int32_t last = jobs_.instants - 1;
    const Piece around{std::max(0, piece.start - 2 * half), std::min(last, piece.end + 2 * half)};
    std::vector<int64_t> load(around.end - around.start + 1, 0), over(load);
    inside_.clear();
    work_ += jobs_.count();
    for (int32_t j = 0; j < jobs_.count(); ++j)
      for (int32_t k = jobs_.first[j]; k < jobs_.first[j + 1]; ++k) {
        if (jobs_.pieces[k].end <= around.start || jobs_.pieces[k].start >= around.end) continue;
        const int32_t from = std::max(jobs_.pieces[k].start, around.start) - around.start;
        const int32_t to = std::min(jobs_.pieces[k].end, around.end) - around.start;
        const bool high = offset_[j] + jobs_.size[j] > goal_;
        load[from] += jobs_.size[j], load[to] -= jobs_.size[j];
        over[from] += high, over[to] -= high;
        inside_.emplace_back(j, k);
      }
    work_ += work_a_piece * static_cast<int64_t>(inside_.size());
    for (size_t t = 1; t < load.size(); ++t) load[t] += load[t - 1], over[t] += over[t - 1];
    // Searches the instants [from, to): jobs that stay at an end of the window must not be above the goal.
    const auto quietest = [&](int32_t from, int32_t to) {
      int32_t best = -1;
      for (int32_t t = from; t < to; ++t)
        if (over[t - around.start] == 0 && (best < 0 || load[t - around.start] < load[best - around.start])) best = t;
      return best;
    };
    const int32_t from = piece.start < half ? 0 : quietest(around.start, piece.start - half / 2);
    const int32_t to = piece.end > last - half ? last : quietest(piece.end + half / 2, around.end);
    return from >= 0 && to >= 0 && cut({from, to});
  }

  // Creates the window; returns false if a job that stays touches neither end, or is too high.
  bool cut(Piece part) {
    window_ = Window(part);
    whose_.clear();
    std::vector<std::pair<int32_t, int32_t>> staying;
    for (const auto& [job, k] : inside_) {
      const Piece piece = jobs_.pieces[k];
      if (piece.end <= part.start || piece.start >= part.end) continue;
      const bool within = piece.start >= part.start && piece.end <= part.end;
      if (within && jobs_.single(job) && jobs_.fixed[job] < 0) add(job, piece, -1);
      else staying.emplace_back(job, k);
    }
    window_.free = window_.jobs.count();
    for (const auto& [job, k] : staying) {
      const Piece piece = jobs_.pieces[k];
      if (piece.start > part.start && piece.end < part.end) return false;
      if (offset_[job] + jobs_.size[job] > goal_) return false;
      add(job, piece, offset_[job]);
    }
    return true;
  }

  void add(int32_t job, Piece piece, int64_t fixed) {
    window_.add(jobs_, job, piece, fixed);
    whose_.push_back(job);
  }

  // Updates the arena after offsets have changed.
  void settle() {
    arena_ = 0;
    for (int32_t j = 0; j < jobs_.count(); ++j)
      if (offset_[j] + jobs_.size[j] > arena_) arena_ = offset_[j] + jobs_.size[j], highest_ = j;
    work_ += jobs_.count();
  }

  const Jobs& jobs_;
  std::vector<int64_t> offset_;
  Random random_;
  int32_t highest_ = 0;
  int64_t arena_ = 0, work_ = 0, work_patience_ = first_patience;
  double slack_ = first_slack;  // excess of the goal over the target, as a fraction of the arena
  double span_ = first_span;    // approximate number of instants on either side of the highest job
  // State of the current attempt.
  std::vector<std::pair<int32_t, int32_t>> inside_;  // jobs and pieces around the highest job
  Window window_{{0, 0}};
  std::vector<int32_t> whose_;  // jobs of the window
  int64_t goal_ = 0, patience_ = 0;
  std::unique_ptr<WindowRefill> refill_;
};

}  // namespace packing
