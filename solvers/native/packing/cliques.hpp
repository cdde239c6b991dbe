// Overlap graph of the jobs, and the stack bound: the least height of a stack of buffers that all meet each other. The bound exceeds the load if
// alignments differ, if fixed offsets leave holes, and if sets meet in pairs without a common instant, as
// three arcs round a circle do.
//
// Buffers that meet form one stack. The least height of the top of a set S, over all orders of its jobs, is
// h(S) = min over the topmost job j of place(h(S - j), j) + size of j. place() is the lowest offset from a
// height on that alignment and fixed offsets allow: a lower stack below never makes a higher stack (after
// Held and Karp, 1962).
#pragma once

#include <limits>

#include "packing/jobs.hpp"

namespace packing {

// The relation "meets": which jobs overlap in time, and the maximal sets (cliques) in which any two jobs do.
class OverlapGraph {
 public:
  using Set = std::vector<uint64_t>;  // a bit for each job

  explicit OverlapGraph(const Jobs& jobs) : words_((static_cast<size_t>(jobs.count()) + 63) / 64) {
    const int32_t n = jobs.count();
    with_.assign(n, Set(words_, 0));
    for (int32_t a = 0; a < n; ++a)
      for (int32_t b = 0; b < a; ++b)
        if (meet(jobs, a, b)) put(with_[a], b), put(with_[b], a);
  }

  bool operator()(int32_t a, int32_t b) const { return has(with_[a], b); }

  // Calls take(set) for each maximal set of jobs that meet in pairs (Bron and Kerbosch, 1973, with the pivot
  // of Tomita and others, 2006), as long as spend() allows one more step.
  template <class Take, class Spend>
  void largest(Take take, Spend spend) const {
    Set all(words_, 0);
    for (int32_t j = 0; j < static_cast<int32_t>(with_.size()); ++j) put(all, j);
    std::vector<int32_t> chosen;
    extend(chosen, all, Set(words_, 0), take, spend);
  }

 private:
  static bool has(const Set& set, int32_t job) { return set[job / 64] >> (job % 64) & 1; }
  static void put(Set& set, int32_t job) { set[job / 64] |= uint64_t{1} << (job % 64); }
  static void drop(Set& set, int32_t job) { set[job / 64] &= ~(uint64_t{1} << (job % 64)); }
  static bool none(const Set& set) {
    return std::all_of(set.begin(), set.end(), [](uint64_t word) { return word == 0; });
  }

  static bool meet(const Jobs& jobs, int32_t a, int32_t b) {
    int32_t k = jobs.first[a], l = jobs.first[b];
    while (k < jobs.first[a + 1] && l < jobs.first[b + 1]) {
      const Piece &x = jobs.pieces[k], &y = jobs.pieces[l];
      if (x.start < y.end && y.start < x.end) return true;
      ++(x.end < y.end ? k : l);
    }
    return false;
  }

  Set both(const Set& a, const Set& b) const {
    Set result(words_);
    for (size_t w = 0; w < words_; ++w) result[w] = a[w] & b[w];
    return result;
  }

  static int64_t size_of(uint64_t word) {
    int64_t count = 0;
    for (; word != 0; word &= word - 1) ++count;
    return count;
  }

  template <class Take, class Spend>
  void extend(std::vector<int32_t>& chosen, Set open, Set closed, Take& take, Spend& spend) const {
    if (!spend()) return;
    if (none(open) && none(closed)) return take(chosen);
    const auto n = static_cast<int32_t>(with_.size());
    int32_t pivot = -1;
    int64_t fewest = n + 1;
    for (int32_t v = 0; v < n; ++v) {
      if (!has(open, v) && !has(closed, v)) continue;
      int64_t left = 0;
      for (size_t w = 0; w < words_; ++w) left += size_of(open[w] & ~with_[v][w]);
      if (left < fewest) fewest = left, pivot = v;
    }
    for (int32_t v = 0; v < n; ++v) {
      if (!has(open, v) || has(with_[pivot], v)) continue;
      chosen.push_back(v);
      extend(chosen, both(open, with_[v]), both(closed, with_[v]), take, spend);
      chosen.pop_back();
      drop(open, v), put(closed, v);
    }
  }

  size_t words_;
  std::vector<Set> with_;
};

class StackBound {
 public:
  // Weakens the bound rather than taking more than about `steps` steps.
  StackBound(const Jobs& jobs, int64_t steps) : jobs_(jobs), steps_(steps) {}

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
    OverlapGraph(jobs_).largest([&](const std::vector<int32_t>& set) { raise(set); }, [&] { return (steps_ -= 64) >= 0; });
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
