// Stack bound: the least height of a stack of buffers that all meet each other. The bound exceeds the load if
// alignments differ, if fixed offsets leave holes, and if sets meet in pairs without a common instant, as
// three arcs round a circle do.
//
// Buffers that meet stand in one stack. The least height of the top of a set S, its jobs in any order, is
// h(S) = min over the topmost job j of place(h(S - j), j) + size of j. place() is the lowest offset from a
// height on that alignment and fixed offsets allow: a lower stack below never makes a higher stack (after
// Held and Karp, 1962).
#pragma once

#include <limits>

#include "packing/meets.hpp"

namespace packing {

class Stacks {
 public:
  // Weakens the bound rather than taking more than about `steps` steps.
  Stacks(const Jobs& jobs, int64_t steps) : jobs_(jobs), steps_(steps) {}

  int64_t bound() {
    at_instants();
    if (jobs_.count() <= most_pairs && static_cast<size_t>(jobs_.count()) != jobs_.pieces.size()) pairs();
    return best_;
  }

 private:
  static constexpr int32_t most_free = 18;   // largest number of jobs in a stack whose orders are tried
  // largest number of jobs among which all sets that meet in pairs are listed
  static constexpr int32_t most_pairs = 64;

  // Considers the largest sets of jobs that are alive at one instant.
  void at_instants() {
    struct Begun {
      Piece piece;
      int32_t job;
    };
    std::vector<Begun> pieces, alive;
    for (int32_t j = 0; j < jobs_.count(); ++j)
      for (int32_t k = jobs_.first[j]; k < jobs_.first[j + 1]; ++k) pieces.push_back({jobs_.pieces[k], j});
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Begun& a, const Begun& b) { return a.piece.start < b.piece.start; });
    const auto look = [&] {
      std::vector<int32_t> set;
      for (const Begun& b : alive) set.push_back(b.job);
      steps_ -= 16 * static_cast<int64_t>(set.size());
      raise(set);
    };
    for (const Begun& next : pieces) {
      if (steps_ <= 0) return;
      const auto ended = [&](const Begun& b) { return b.piece.end <= next.piece.start; };
      const auto gone = std::find_if(alive.begin(), alive.end(), ended);
      steps_ -= static_cast<int64_t>(alive.size()) + 1;
      if (gone != alive.end()) {
        look();
        alive.erase(std::remove_if(gone, alive.end(), ended), alive.end());
      }
      alive.push_back(next);
    }
    look();
  }

  void pairs() {
    Meets(jobs_).largest([&](const std::vector<int32_t>& set) { raise(set); }, [&] { return (steps_ -= 64) >= 0; });
  }

  // Raises the bound to the least height of a set, if that is larger.
  void raise(const std::vector<int32_t>& set) {
    std::vector<int32_t> free;
    taken_.clear();
    int64_t top = 0;
    for (const int32_t j : set) {
      if (jobs_.fixed[j] < 0) free.push_back(j);
      else taken_.push_back({jobs_.fixed[j], jobs_.fixed[j] + jobs_.size[j]}), top = std::max(top, taken_.back().second);
    }
    std::sort(taken_.begin(), taken_.end());
    best_ = std::max(best_, top);
    std::stable_sort(free.begin(), free.end(), [&](int32_t a, int32_t b) { return jobs_.mask[a] > jobs_.mask[b]; });
    // height of the stack in one order: an upper bound on the set's least height, which may already show that
    // the set cannot raise the bound
    int64_t height = 0;
    for (const int32_t j : free) height = place(height, j) + jobs_.size[j];
    if (height <= best_) return;
    if (free.size() > most_free) return;
    const int64_t steps = static_cast<int64_t>(free.size()) << free.size();
    if (steps > steps_) return;
    steps_ -= steps;
    best_ = std::max(best_, least(free));
  }

  int64_t least(const std::vector<int32_t>& free) {
    const size_t all = (size_t{1} << free.size()) - 1;
    height_.assign(all + 1, std::numeric_limits<int64_t>::max());
    height_[0] = 0;
    for (size_t set = 0; set < all; ++set)
      for (size_t k = 0; k < free.size(); ++k) {
        if (set >> k & 1) continue;
        int64_t& height = height_[set | size_t{1} << k];
        height = std::min(height, place(height_[set], free[k]) + jobs_.size[free[k]]);
      }
    return height_[all];
  }

  int64_t place(int64_t height, int32_t job) const {
    int64_t at = jobs_.aligned(job, height);
    for (const auto& [low, high] : taken_)
      if (high > at && low < at + jobs_.size[job]) at = jobs_.aligned(job, high);
    return at;
  }

  const Jobs& jobs_;
  int64_t steps_, best_ = 0;
  std::vector<std::pair<int64_t, int64_t>> taken_;  // fixed ranges of the set, lowest first
  std::vector<int64_t> height_;
};

}  // namespace packing
