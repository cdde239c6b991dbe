// Local repair (large neighbourhood search, Shaw, 1998): removes the highest job and all jobs next to or above it down
// to some depth, and repacks the removed jobs within a smaller arena on top of the remaining jobs, by maximum load
// first or by the complete search.
//
// The removed jobs form a cone: above the depth, each job that overlaps in time with a removed job. So the remaining
// jobs are below all freed space, and the small problem has a ground of varying height, with only immovable jobs above
// it.
#pragma once

#include <memory>
#include <numeric>

#include "packing/max_load_first.hpp"
#include "packing/skyline_search.hpp"

namespace packing {

class LocalRepair {
 public:
  // `offsets` is a plan of these jobs. Jobs with a fixed offset or several pieces are never moved.
  LocalRepair(const Jobs& jobs, const std::vector<int64_t>& offsets, uint64_t seed) : random_(seed) {
    for (int32_t j = 0; j < jobs.count(); ++j) {
      first_.push_back(jobs_.count());
      for (int32_t k = jobs.first[j]; k < jobs.first[j + 1]; ++k) {
        jobs_.add(jobs.pieces[k], jobs.size[j], jobs.mask[j], jobs.single(j) ? jobs.fixed[j] : offsets[j]);
        offset_.push_back(offsets[j]);
      }
    }
    jobs_.instants = jobs.instants;
    by_offset_.resize(jobs_.count());
    std::iota(by_offset_.begin(), by_offset_.end(), 0);
    sort(by_offset_.begin());
    taken_.assign(jobs_.count(), false);
    settle();
  }

  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result;
    for (const int32_t k : first_) result.push_back(offset_[k]);
    return result;
  }
  int64_t arena() const { return arena_; }
  int64_t work() const { return work_; }

  // Continues until the arena is at most `target` or about `budget` more work units are spent. Returns true, at
  // once, when the arena has become smaller.
  bool advance(int64_t budget, int64_t target) {
    const int64_t until = work_ + budget, before = arena_;
    while (work_ < until && arena_ > target && arena_ == before) step(target, until - work_);
    return arena_ < before;
  }

 private:
  static constexpr int64_t work_a_job = 8;   // work units per job of choosing the jobs to remove; measured
  static constexpr int64_t work_of_a_pass = 500;  // work units per job of a maximum-load-first pass; measured
  static constexpr int most_packs = 4;
  static constexpr double most_noise = 0.03;
  static constexpr double least_depth = 0.004;
  static constexpr int64_t first_budget = 1'000'000, most_budget = int64_t{1} << 40;

  enum class Phase { choosing, packing, searching };

  // Runs a small part of an attempt, so that limits can be checked often.
  void step(int64_t target, int64_t left) {
    if (phase_ == Phase::choosing) choose(target);
    else if (phase_ == Phase::packing) pack();
    else search(left);
  }

  void choose(int64_t target) {
    work_ += work_a_job * jobs_.count();
    const auto part = static_cast<int64_t>(static_cast<double>(arena_ - target) * part_);
    const auto depth = static_cast<int64_t>(depth_ * static_cast<double>(arena_) * (0.8 + 0.4 * random_.unit()));
    goal_ = std::max(target, arena_ - std::max<int64_t>(part, 1));
    cone_ = cone_of(highest_, offset_[highest_] + jobs_.size[highest_] - depth);
    const bool too_many = static_cast<int64_t>(cone_.size()) > most_;
    whole_ = too_many || static_cast<int32_t>(cone_.size()) == free_;
    small_ = too_many ? Jobs() : on_ground(cone_, goal_);
    if (small_.count() == 0) return deeper(1.5);
    packs_ = 0;
    phase_ = Phase::packing;
  }

  // Packs by maximum load first, a few times with random overestimates of the load.
  void pack() {
    std::vector<int32_t> order(small_.count());
    std::iota(order.begin(), order.end(), 0);
    work_ += work_of_a_pass * small_.count();
    const double noise = packs_ == 0 ? 0 : most_noise * random_.unit();
    if (put(pack_max_load_first(small_, order, goal_, goal_, noise, random_)) || ++packs_ < most_packs) return;
    if (small_.count() > most_searched_) return deeper(1.3);
    search_ = std::make_unique<SkylineSearch>(small_, goal_, random_.next());
    work_ += search_->work();
    patience_ = budget_;
    phase_ = Phase::searching;
  }

  void search(int64_t left) {
    const int64_t before = search_->work();
    search_->advance(std::min(left, patience_));
    const int64_t spent = search_->work() - before;
    work_ += spent, patience_ -= spent;
    if (search_->found()) put(search_->offsets());
    else if (search_->infeasible() || patience_ <= 0) deeper(1.3);
  }

  // Accepts the offsets of the removed jobs, if there are any.
  bool put(const std::vector<int64_t>& found) {
    if (found.empty()) return false;
    for (size_t k = 0; k < cone_.size(); ++k) offset_[cone_[k]] = found[k];
    sort_in();
    part_ = std::min(1.0, part_ * 2);
    depth_ = std::max(least_depth, depth_ * 0.5);
    phase_ = Phase::choosing;
    settle();
    return true;
  }

  // After a failed attempt: removes more jobs next time; once all jobs have been removed, asks for a smaller
  // improvement, with more patience.
  void deeper(double by) {
    phase_ = Phase::choosing;
    depth_ *= by;
    if (!whole_ && depth_ < 2) return;
    depth_ = least_depth;
    part_ /= 2;
    if (part_ > 0.005) return;
    part_ = 0.25;
    if (budget_ >= most_budget) return;
    most_ *= 2;
    most_searched_ *= 2;
    budget_ *= 2;
  }

  // Returns the jobs from the height on that stand beside or above the highest job, lowest first. Records
  // which of them must stay.
  std::vector<int32_t> cone_of(int32_t highest, int64_t height) {
    std::vector<int32_t> cone;
    staying_.clear();
    Piece hull = span(highest);
    const auto from = std::lower_bound(by_offset_.begin(), by_offset_.end(), height,
                                       [&](int32_t job, int64_t at) { return offset_[job] < at; });
    bool there = false;
    for (auto it = from; it != by_offset_.end(); ++it) {
      const Piece piece = span(*it);
      if (piece.start >= hull.end || hull.start >= piece.end) continue;
      if (jobs_.fixed[*it] >= 0) {
        staying_.push_back(*it);
        continue;
      }
      hull = {std::min(hull.start, piece.start), std::max(hull.end, piece.end)};
      cone.push_back(*it);
      there = there || *it == highest;
    }
    return there ? cone : std::vector<int32_t>();
  }

  // Returns the jobs of a cone, followed by the ground under them; no jobs if they cannot fit.
  Jobs on_ground(const std::vector<int32_t>& cone, int64_t goal) {
    if (cone.empty()) return {};
    Jobs small;
    Piece hull = span(cone[0]);
    for (const int32_t job : cone) {
      const Piece piece = span(job);
      hull = {std::min(hull.start, piece.start), std::max(hull.end, piece.end)};
      taken_[job] = true;
    }
    const int32_t width = hull.end - hull.start;
    std::vector<int64_t> load(width + 1, 0), ground(width + 1, 0);
    const auto put_in = [&](int32_t job, int64_t fixed) {
      const int32_t from = std::max(span(job).start, hull.start) - hull.start;
      const int32_t to = std::min(span(job).end, hull.end) - hull.start;
      small.add({from, to}, jobs_.size[job], jobs_.mask[job], fixed);
      load[from] += jobs_.size[job], load[to] -= jobs_.size[job];
    };
    for (const int32_t job : cone) put_in(job, -1);
    for (const int32_t job : staying_) put_in(job, offset_[job]), taken_[job] = true;
    for (int32_t t = 1; t < width; ++t) load[t] += load[t - 1];
    // the next instant whose ground is not known, or an instant on the way there
    std::vector<int32_t> next(width + 1);
    std::iota(next.begin(), next.end(), 0);
    const auto open_from = [&](int32_t t) {
      while (next[t] != t) t = next[t] = next[next[t]];
      return t;
    };
    for (auto it = by_offset_.rbegin(); it != by_offset_.rend() && open_from(0) < width; ++it) {  // from top
      if (taken_[*it] || span(*it).start >= hull.end || span(*it).end <= hull.start) continue;
      const int32_t to = std::min(span(*it).end, hull.end) - hull.start;
      for (int32_t t = open_from(std::max(span(*it).start - hull.start, 0)); t < to; t = open_from(t))
        ground[t] = offset_[*it] + jobs_.size[*it], next[t] = t + 1;
    }
    for (const int32_t job : cone) taken_[job] = false;
    for (const int32_t job : staying_) taken_[job] = false;
    work_ += width;
    bool fits = true;
    for (int32_t t = 0; t < width; ++t) {
      if (load[t] == 0) ground[t] = 0;
      fits = fits && ground[t] + load[t] <= goal;
    }
    if (!fits) return {};
    for (int32_t from = 0, t = 0; t < width; ++t) {
      if (t + 1 < width && ground[t + 1] == ground[t]) continue;
      if (ground[t] > 0) small.add({from, t + 1}, ground[t], 0, 0);
      from = t + 1;
    }
    small.instants = width + 1;
    // The ground under each interval counts as a job: its bytes may add up to more than the search takes.
    double bytes = 0;
    for (int32_t j = 0; j < small.count(); ++j)
      bytes += static_cast<double>(small.size[j]) + static_cast<double>(small.mask[j]);
    return bytes < 0x1p61 ? small : Jobs();
  }

  Piece span(int32_t job) const { return jobs_.pieces[jobs_.first[job]]; }

  // Sorts a part of `by_offset_`, ties by job number.
  bool lower(int32_t a, int32_t b) const { return std::pair(offset_[a], a) < std::pair(offset_[b], b); }
  void sort(std::vector<int32_t>::iterator from) {
    std::sort(from, by_offset_.end(), [this](int32_t a, int32_t b) { return lower(a, b); });
  }

  // Merges the jobs of the cone into the other jobs, whose order has not changed.
  void sort_in() {
    for (const int32_t job : cone_) taken_[job] = true;
    const auto stay = std::remove_if(by_offset_.begin(), by_offset_.end(), [&](int32_t job) { return taken_[job]; });
    std::copy(cone_.begin(), cone_.end(), stay);
    sort(stay);
    std::inplace_merge(by_offset_.begin(), stay, by_offset_.end(), [this](int32_t a, int32_t b) { return lower(a, b); });
    for (const int32_t job : cone_) taken_[job] = false;
  }

  // Updates the arena and the order after offsets have changed.
  void settle() {
    arena_ = free_ = 0;
    for (int32_t j = 0; j < jobs_.count(); ++j) {
      if (jobs_.fixed[j] < 0) ++free_;
      if (offset_[j] + jobs_.size[j] > arena_) arena_ = offset_[j] + jobs_.size[j], highest_ = j;
    }
  }

  Jobs jobs_;                        // one job per piece
  std::vector<int32_t> first_;       // first piece of each given job
  std::vector<int64_t> offset_;
  Random random_;
  std::vector<int32_t> by_offset_;  // jobs, lowest first
  std::vector<bool> taken_;
  // State of the current attempt.
  Phase phase_ = Phase::choosing;
  std::vector<int32_t> cone_;           // jobs removed
  std::vector<int32_t> staying_;        // jobs that must stay beside and above the cone
  Jobs small_;                          // the cone as a problem, with the ground under it
  int64_t goal_ = 0, patience_ = 0;     // goal arena in bytes; work units left for the search
  bool whole_ = false;                  // no more jobs can be removed
  int packs_ = 0;
  std::unique_ptr<SkylineSearch> search_;
  int32_t highest_ = 0, free_ = 0;
  int64_t arena_ = 0, work_ = 0, budget_ = first_budget;
  // largest number of jobs in a cone, and for the complete search
  int64_t most_ = 8000, most_searched_ = 400;
  double depth_ = least_depth;   // depth of the cone, as a fraction of the arena
  double part_ = 0.25;    // fraction of the excess over the target to remove
};

}  // namespace packing
