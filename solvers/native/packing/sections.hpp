// Sections of time, and the height bound of each section. There is one section for each maximal set of jobs
// that are alive at the same time.
//
// Jobs that meet share an instant. The jobs alive at any instant are all alive at some instant with a maximal
// set of jobs, one that no neighbouring instant extends (the maximal cliques of an interval graph: Fulkerson
// and Gross, 1965). All other instants are dropped.
#pragma once

#include <limits>

#include "packing/jobs.hpp"

namespace packing {

struct Sections {
  std::vector<Piece> span;  // per piece, in sections [start, end); never empty
  int32_t count = 0;
};

// Without `merge`, every instant at which a piece begins is a section (for tests).
inline Sections sections_of(const Jobs& jobs, bool merge) {
  std::vector<bool> begins(jobs.instants, false), ends(jobs.instants, false);
  for (const Piece& piece : jobs.pieces) begins[piece.start] = ends[piece.end] = true;
  // A section is a sequence of instants at which jobs begin, up to the first instant at which a job ends.
  std::vector<int32_t> of =  // per instant: the open section, or the last section opened before
       filled(jobs.instants, 0);
  int32_t current = -1;
  bool closed = true;
  for (int32_t t = 0; t < jobs.instants; ++t) {
    closed = closed || ends[t] || !merge;
    if (begins[t] && closed) ++current, closed = false;
    of[t] = current;
  }
  Sections result;
  result.count = current + 1;
  reserve(result.span, jobs.pieces.size());
  for (const Piece& piece : jobs.pieces) result.span.push_back({of[piece.start], of[piece.end - 1] + 1});
  return result;
}

// Height bound: the largest height of a section at which the jobs not yet placed there still fit between the
// section and the capacity.
//
// The jobs form a stack upside down (see cliques.hpp). For a set S of jobs not yet placed, c(S) is the maximum
// over the lowest job j of the highest offset below c(S - j) that alignment and a fixed offset allow for j: a
// higher stack above j never makes c(S) lower.
class HeightBounds {
 public:
  static constexpr size_t most_jobs = 16;                  // per section
  static constexpr int64_t most_steps = int64_t{1} << 21;  // some milliseconds

  // Adds the next section by the jobs that cover it, in ascending order, unless that would take too long;
  // item(job) has the job's bytes, mask and fixed offset.
  template <class Item>
  void add(const std::vector<int32_t>& jobs, int64_t capacity, Item item) {
    first_.push_back(jobs_.size());
    table_.push_back(-1);
    left_.push_back(0);
    if (jobs.size() > most_jobs) return;
    const int64_t steps = static_cast<int64_t>(jobs.size() + 1) << jobs.size();
    if (steps > most_steps - steps_) return;
    steps_ += steps;
    jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
    left_.back() = (uint32_t{1} << jobs.size()) - 1;
    table_.back() = static_cast<int64_t>(height_.size());
    height_.resize(height_.size() + (size_t{1} << jobs.size()), -1);
    int64_t* height = height_.data() + table_.back();
    height[0] = std::numeric_limits<int64_t>::max();
    for (uint32_t set = 1; set <= left_.back(); ++set)
      for (uint32_t rest = set, k = 0; rest != 0; rest >>= 1, ++k) {
        if (!(rest & 1)) continue;
        const uint32_t others = set ^ (uint32_t{1} << k);
        height[set] = std::max(height[set], below(others == 0 ? capacity : height[others], item(jobs[k])));
      }
  }

  int64_t steps() const { return steps_; }

  bool empty() const { return table_.empty(); }

  // Returns whether the section may stand at this height.
  bool holds(int32_t section, int64_t height) const {
    return empty() || table_[section] < 0 || height <= height_[table_[section] + left_[section]];
  }

  // Records that the job, which covers the sections, has been placed, or is to be placed again.
  void flip(int32_t begin, int32_t end, int32_t job) {
    if (empty()) return;
    for (int32_t s = begin; s < end; ++s) {
      if (table_[s] < 0) continue;
      const auto first = jobs_.begin() + static_cast<std::ptrdiff_t>(first_[s]);
      left_[s] ^= uint32_t{1} << (std::find(first, jobs_.end(), job) - first);
    }
  }

 private:
  template <class Item>
  static int64_t below(int64_t top, const Item& item) {
    if (top < item.bytes) return -1;
    if (item.fixed >= 0) return item.fixed <= top - item.bytes ? item.fixed : -1;
    return (top - item.bytes) & ~item.mask;
  }

  std::vector<size_t> first_;    // per section: its first entry in jobs_
  std::vector<int32_t> jobs_;
  std::vector<int64_t> table_;   // per section: start of its part of height_, or -1
  std::vector<int64_t> height_;  // by set of jobs; -1 if the set has no room
  std::vector<uint32_t> left_;   // per section: the set of jobs not yet placed
  int64_t steps_ = 0;
};

}  // namespace packing
