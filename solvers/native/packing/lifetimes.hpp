// Lifetimes as columns of time intervals: the load over time, and the line on which the kernels pack. Times in
// a dense range are counted, which is quicker than sorting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "packing/large_pages.hpp"

namespace packing {

// Columns of `count` half-open, non-empty time intervals [start, end), each of the buffer `owner`.
struct Lifetimes {
  const int64_t* owner;
  const int64_t* start;
  const int64_t* end;
  size_t count;
};

// loads[k] bytes are alive from times[k] until the next time; times ascend.
struct Curve {
  std::vector<int64_t> times, loads;
};

// Changes of the load by moment: an array over all moments from the first to the last if these are not too
// many, otherwise a list.
class Changes {
 public:
  Changes(int64_t first, int64_t last, size_t most) : first_(first) {
    const auto span = static_cast<uint64_t>(last) - static_cast<uint64_t>(first);
    if (span < dense * most) bytes_ = filled(span + 1, nothing);
  }

  void add(int64_t moment, int64_t bytes) {
    if (bytes_.empty()) {
      sparse_.emplace_back(moment, bytes);
      return;
    }
    int64_t& there = bytes_[moment - first_];
    there = there == nothing ? bytes : there + bytes;
  }

  // Calls see(moment, load) for each moment of a change, in order, with the bytes alive from then on.
  template <class See>
  void walk(See see) {
    int64_t load = 0;
    std::sort(sparse_.begin(), sparse_.end());
    for (size_t k = 0; k < sparse_.size(); ++k) {
      load += sparse_[k].second;
      if (k + 1 == sparse_.size() || sparse_[k + 1].first != sparse_[k].first) see(sparse_[k].first, load);
    }
    for (size_t k = 0; k < bytes_.size(); ++k)
      if (bytes_[k] != nothing) see(first_ + static_cast<int64_t>(k), load += bytes_[k]);
  }

 private:
  static constexpr uint64_t dense = 8;  // largest number of moments per interval for the array
  static constexpr int64_t nothing = std::numeric_limits<int64_t>::min();
  const int64_t first_;
  std::vector<int64_t> bytes_;
  std::vector<std::pair<int64_t, int64_t>> sparse_;  // moment, bytes; used instead of bytes_
};

// Returns the changes of buffers with these sizes. The sum of all bytes alive at one time must be below 2^63.
// With a period, time is a circle of this length, covered once from 0. Without a period there must be at
// least one interval.
inline Changes changes_of(const Lifetimes& lifetimes, const int64_t* size, int64_t period) {
  if (period == 0) {
    Changes changes(*std::min_element(lifetimes.start, lifetimes.start + lifetimes.count),
                    *std::max_element(lifetimes.end, lifetimes.end + lifetimes.count), 2 * lifetimes.count);
    for (size_t k = 0; k < lifetimes.count; ++k) {
      changes.add(lifetimes.start[k], size[lifetimes.owner[k]]);
      changes.add(lifetimes.end[k], -size[lifetimes.owner[k]]);
    }
    return changes;
  }
  Changes changes(0, period - 1, 2 * lifetimes.count + 1);
  const auto round = [&](int64_t time) { return time < period ? time : time % period; };
  int64_t always = 0;
  for (size_t k = 0; k < lifetimes.count; ++k) {
    const int64_t bytes = size[lifetimes.owner[k]], length = lifetimes.end[k] - lifetimes.start[k];
    if (length >= period) always += length / period * bytes;
    if (length % period == 0) continue;
    const int64_t start = round(lifetimes.start[k]), end = round(lifetimes.end[k]);
    changes.add(start, bytes);
    changes.add(end, -bytes);
    if (end < start) always += bytes;
  }
  changes.add(0, always);
  return changes;
}

inline Curve load_curve(const Lifetimes& lifetimes, const int64_t* size, int64_t period) {
  Curve curve;
  if (lifetimes.count == 0 && period == 0) return curve;
  Changes changes = changes_of(lifetimes, size, period);
  size_t moments = 0;
  changes.walk([&](int64_t, int64_t) { ++moments; });
  reserve(curve.times, moments), reserve(curve.loads, moments);
  changes.walk([&](int64_t time, int64_t load) { curve.times.push_back(time), curve.loads.push_back(load); });
  return curve;
}

// Extremes of the load curve: the peak load, and the first time of the lowest load. Zeros for an empty curve.
struct Extremes {
  int64_t peak = 0, quietest = 0;
};

inline Extremes load_extremes(const Lifetimes& lifetimes, const int64_t* size, int64_t period) {
  Extremes found;
  if (lifetimes.count == 0 && period == 0) return found;
  int64_t least = std::numeric_limits<int64_t>::max();
  changes_of(lifetimes, size, period).walk([&](int64_t time, int64_t load) {
    found.peak = std::max(found.peak, load);
    if (load < least) least = load, found.quietest = time;
  });
  return found;
}

// Returns the indices of the times time(0), time(1), ... in ascending order; the sort is stable.
template <class Time>
std::vector<int32_t> order_of_times(size_t count, Time time) {
  std::vector<int32_t> order = filled(count, 0);
  int64_t first = std::numeric_limits<int64_t>::max(), last = std::numeric_limits<int64_t>::min();
  for (size_t k = 0; k < count; ++k) first = std::min(first, time(k)), last = std::max(last, time(k));
  const auto span = static_cast<uint64_t>(last) - static_cast<uint64_t>(first);
  if (count == 0 || span > 16 * count) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return time(a) < time(b); });
    return order;
  }
  std::vector<int32_t> next = filled(span + 2, 0);
  for (size_t k = 0; k < count; ++k) ++next[time(k) - first + 1];
  for (size_t t = 1; t < next.size(); ++t) next[t] += next[t - 1];
  for (size_t k = 0; k < count; ++k) order[next[time(k) - first]++] = static_cast<int32_t>(k);
  return order;
}

struct Line {
  std::vector<int64_t> row, pieces;  // per job: the buffer, and the number of pieces
  std::vector<int64_t> start, end;   // per piece; the pieces of a job are consecutive and in order of time
};

// Cuts a circle: each buffer becomes one job, in the order of the buffers, on the line [0, period) that begins at `cut`; without a period, time is
// already a line.
class CircleCut {
 public:
  // Takes lifetimes sorted by (owner, start), on a circle from 0 and none longer than the period; the cut must
  // lie within the period.
  CircleCut(const Lifetimes& lifetimes, int64_t period, int64_t cut) {
    reserve(jobs_, lifetimes.count + 1), reserve(pieces_, lifetimes.count);
    for (size_t k = 0; k < lifetimes.count;) {
      const int64_t row = lifetimes.owner[k];
      const size_t first = pieces_.size();
      jobs_.push_back({row, static_cast<int32_t>(first)});
      for (; k < lifetimes.count && lifetimes.owner[k] == row; ++k) add(lifetimes.start[k], lifetimes.end[k], period, cut);
      if (pieces_.size() - first > 1) std::sort(pieces_.begin() + first, pieces_.end());
    }
    jobs_.push_back({-1, static_cast<int32_t>(pieces_.size())});
  }

  // Returns the jobs in their order, or sorted by their first pieces.
  Line line(bool by_start) const {
    const size_t count = jobs_.size() - 1;
    const auto start = [&](size_t job) { return pieces_[jobs_[job].first].first; };
    const std::vector<int32_t> order = by_start ? order_of_times(count, start) : std::vector<int32_t>();
    Line line;
    for (auto* column : {&line.row, &line.pieces}) *column = filled(count, int64_t{0});
    for (auto* column : {&line.start, &line.end}) *column = filled(pieces_.size(), int64_t{0});
    for (size_t j = 0, piece = 0; j < count; ++j) {
      if (by_start && j + 2 * ahead < count) {
        __builtin_prefetch(&jobs_[order[j + 2 * ahead]]);
        __builtin_prefetch(&pieces_[jobs_[order[j + ahead]].first]);
      }
      const Job* job = &jobs_[by_start ? order[j] : j];
      line.row[j] = job[0].row, line.pieces[j] = job[1].first - job[0].first;
      for (int32_t k = job[0].first; k < job[1].first; ++k, ++piece)
        line.start[piece] = pieces_[k].first, line.end[piece] = pieces_[k].second;
    }
    return line;
  }

 private:
  static constexpr size_t ahead = 16;  // prefetch distance, in jobs
  struct Job {
    int64_t row;
    int32_t first;  // index of the first piece; the pieces end where those of the next job begin
  };

  void add(int64_t start, int64_t end, int64_t period, int64_t cut) {
    const int64_t length = end - start;
    if (period > 0) {
      start -= cut;
      if (start < 0 || start >= period) start = (start % period + period) % period;
      if (length > period - start) {
        pieces_.emplace_back(0, length - (period - start));
        pieces_.emplace_back(start, period);
        return;
      }
    }
    pieces_.emplace_back(start, start + length);
  }

  std::vector<Job> jobs_;  // plus a sentinel at the end
  std::vector<std::pair<int64_t, int64_t>> pieces_;  // start, end
};

}  // namespace packing
