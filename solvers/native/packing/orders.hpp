// Orders in which jobs fill valleys, with a fast path for the order by start time.
//
// The order by start is the quickest. The first job in a valley is found by its place in the order, and
// time is counted in sections: a valley in which no job begins holds no job.
#pragma once

#include <cstring>
#include <limits>

#include "packing/sections.hpp"
#include "packing/skyline.hpp"

namespace packing {

// Jobs in order of start, with a fast query for the first job that lies within a run.
class StartIndex {
 public:
  // `in_order` points to `count` jobs without gaps in ascending order of their starts, and must outlive this.
  StartIndex(const Jobs& jobs, const Times& times, const int32_t* in_order, size_t count) : jobs_(in_order) {
    levels_.emplace_back();
    reserve(levels_[0], count + width);
    reserve(first_from_, times.length + 1);
    for (size_t k = 0; k < count; ++k) {
      const Piece piece = arc_of(jobs, times, jobs_[k]);
      first_from_.resize(piece.start + 1, static_cast<int32_t>(k));
      levels_[0].push_back(piece.end);
    }
    first_from_.resize(times.length + 1, static_cast<int32_t>(count));
    do {
      levels_.back().resize((levels_.back().size() + width - 1) / width * width, none);
      std::vector<int32_t> above(levels_.back().size() / width);
      for (size_t k = 0; k < above.size(); ++k) above[k] = least(levels_.back(), k);
      levels_.push_back(std::move(above));
    } while (levels_.back().size() > 1);
    levels_.back().resize(width, none);
  }

  // Takes and returns the first job with its start in [from, start_by) that ends by `to`, or -1.
  int32_t take(int32_t from, int32_t start_by, int32_t to) {
    const size_t found = find(first_from_[from], first_from_[start_by], to);
    if (found == nowhere) return -1;
    const int32_t gone = levels_[0][found];
    levels_[0][found] = none;
    for (size_t level = 1, k = found / width; level < levels_.size() && levels_[level][k] == gone; ++level, k /= width)
      levels_[level][k] = least(levels_[level - 1], k);
    return jobs_[found];
  }

 private:
  static constexpr size_t width = 16, nowhere = std::numeric_limits<size_t>::max();
  static constexpr int32_t none = std::numeric_limits<int32_t>::max();

  static int32_t least(const std::vector<int32_t>& level, size_t block) {
    const int32_t* values = level.data() + block * width;
    int32_t result = values[0];
    for (size_t k = 1; k < width; ++k) result = std::min(result, values[k]);
    return result;
  }

  // Returns a bit mask over the 16 entries of a block: which end by `by`. Branch-free, since the first such
  // entry is unpredictable.
  static uint32_t ending(const std::vector<int32_t>& level, size_t block, int32_t by) {
    using Four = int32_t __attribute__((vector_size(16)));
    Four bits = {};
    for (int32_t k = 0; k < static_cast<int32_t>(width); k += 4) {
      Four ends;
      std::memcpy(&ends, level.data() + block * width + k, sizeof ends);
      bits |= (ends <= by) & (Four{1, 2, 4, 8} << k);
    }
    return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
  }

  // The first of the leaves [low, high) that ends by `by`.
  size_t find(size_t low, size_t high, int32_t by) const {
    size_t level = 0, reach = 1;  // number of leaves under a node of the level
    for (size_t k = low; k * reach < high;) {
      const uint32_t rest = ending(levels_[level], k / width, by) >> k % width;
      if (rest == 0) {
        if (++level == levels_.size()) return nowhere;
        reach *= width, k = k / width + 1;
        continue;
      }
      k += __builtin_ctz(rest);
      if (level == 0) return k < high ? k : nowhere;
      --level, reach /= width, k *= width;
    }
    return nowhere;
  }

  const int32_t* jobs_;
  std::vector<int32_t> first_from_;  // by moment: the first job that starts at this moment or later
  // ends of the jobs left; each level above holds the minimum of 16 entries
  std::vector<std::vector<int32_t>> levels_;
};

// Chooses as JobTree does for the order by start, with the jobs across the cut of the circle first.
class StartOrder {
 public:
  // is_order() must hold for the candidates, and the candidates must outlive this.
  StartOrder(const Jobs& jobs, const Times& times, const std::vector<int32_t>& candidates)
      : StartOrder(jobs, times, candidates, first_within(jobs, times, candidates)) {}

  // Returns whether the candidates are in the order by start.
  static bool is_order(const Jobs& jobs, const Times& times, const std::vector<int32_t>& candidates) {
    const auto key = [&](int32_t job) { return std::pair(!across(jobs, times, job), arc_of(jobs, times, job).start); };
    return std::is_sorted(candidates.begin(), candidates.end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
  }

  // Takes and returns the job for the run [from, to), or -1. `to` may lie beyond the circle's length.
  int32_t take(int32_t from, int32_t to) {
    if (to - from == length_) from = 0, to = 2 * length_;
    const bool round = to > length_;
    int32_t job = round ? across_.take(from, length_, to) : -1;
    if (job < 0 && round) job = others_.take(0, to - length_, to - length_);
    return job < 0 ? others_.take(from, std::min(to, length_), to) : job;
  }

 private:
  StartOrder(const Jobs& jobs, const Times& times, const std::vector<int32_t>& candidates, size_t within)
      : across_(jobs, times, candidates.data(), within),
        others_(jobs, times, candidates.data() + within, candidates.size() - within), length_(times.length) {}

  static bool across(const Jobs& jobs, const Times& times, int32_t job) {
    return arc_of(jobs, times, job).end > times.length;
  }
  static size_t first_within(const Jobs& jobs, const Times& times, const std::vector<int32_t>& candidates) {
    const auto is_across = [&](int32_t job) { return across(jobs, times, job); };
    return std::partition_point(candidates.begin(), candidates.end(), is_across) - candidates.begin();
  }

  StartIndex across_, others_;
  int32_t length_;
};

// All jobs by start, jobs across the cut of the circle first; ties the longest first, then the largest.
inline std::vector<int32_t> start_order(const Jobs& jobs) {
  std::vector<int32_t> next = filled(jobs.instants + 1, 0), order = filled(jobs.count(), 0);
  const auto across = [&](int32_t job) { return arc(jobs, job).end >= jobs.instants; };
  const auto first = [&](int32_t job) { return jobs.pieces[jobs.first[job]].start; };  // 0 if across the cut
  for (int32_t j = 0; j < jobs.count(); ++j) ++next[first(j) + 1];
  for (int32_t t = 1; t <= jobs.instants; ++t) next[t] += next[t - 1];
  for (int32_t j = 0; j < jobs.count(); ++j) order[next[first(j)]++] = j;
  const auto key = [&](int32_t job) {
    const Piece piece = arc(jobs, job);
    return std::tuple(!across(job), piece.start, -piece.end, -jobs.size[job]);
  };
  const auto before = [&](int32_t a, int32_t b) { return key(a) < key(b); };
  for (int32_t t = 0, from = 0; t < jobs.instants; from = next[t++])
    if (next[t] - from > 1) std::stable_sort(order.begin() + from, order.begin() + next[t], before);
  return order;
}

// Packs lowest valley first in this order. Returns no offsets when cancelled.
inline std::vector<int64_t> pack_in_order(const Jobs& jobs, const std::vector<int32_t>& order,
                                          const Cancel& cancel = Cancel()) {
  if (jobs.count() == 0) return {};  // without jobs there is no time for a skyline
  constexpr int64_t no_limit = std::numeric_limits<int64_t>::max();
  ValleyPacker packer(jobs);
  const Sections sections = sections_of(jobs, true);
  const Times times{sections.span, sections.count};
  const std::vector<int32_t> candidates = packer.candidates_in(order);
  int64_t arena;
  if (StartOrder::is_order(jobs, times, candidates)) {
    StartOrder chooser(jobs, times, candidates);
    const auto take = [&](const Valley& valley) { return chooser.take(valley.from, valley.to); };
    arena = packer.pack(order, no_limit, cancel, take, times);
  } else {
    arena = packer.pack(order, no_limit, cancel);
  }
  return arena < 0 ? std::vector<int64_t>() : std::move(packer).offsets();
}

}  // namespace packing
