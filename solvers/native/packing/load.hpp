// Load over time, and sorting of times. Times in a dense range are counted, which is quicker than sorting.
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
struct Spells {
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
inline Changes changes_of(const Spells& spells, const int64_t* size, int64_t period) {
  if (period == 0) {
    Changes changes(*std::min_element(spells.start, spells.start + spells.count),
                    *std::max_element(spells.end, spells.end + spells.count), 2 * spells.count);
    for (size_t k = 0; k < spells.count; ++k) {
      changes.add(spells.start[k], size[spells.owner[k]]);
      changes.add(spells.end[k], -size[spells.owner[k]]);
    }
    return changes;
  }
  Changes changes(0, period - 1, 2 * spells.count + 1);
  const auto round = [&](int64_t time) { return time < period ? time : time % period; };
  int64_t always = 0;
  for (size_t k = 0; k < spells.count; ++k) {
    const int64_t bytes = size[spells.owner[k]], length = spells.end[k] - spells.start[k];
    if (length >= period) always += length / period * bytes;
    if (length % period == 0) continue;
    const int64_t start = round(spells.start[k]), end = round(spells.end[k]);
    changes.add(start, bytes);
    changes.add(end, -bytes);
    if (end < start) always += bytes;
  }
  changes.add(0, always);
  return changes;
}

inline Curve load_curve(const Spells& spells, const int64_t* size, int64_t period) {
  Curve curve;
  if (spells.count == 0 && period == 0) return curve;
  Changes changes = changes_of(spells, size, period);
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

inline Extremes load_extremes(const Spells& spells, const int64_t* size, int64_t period) {
  Extremes found;
  if (spells.count == 0 && period == 0) return found;
  int64_t least = std::numeric_limits<int64_t>::max();
  changes_of(spells, size, period).walk([&](int64_t time, int64_t load) {
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

}  // namespace packing
