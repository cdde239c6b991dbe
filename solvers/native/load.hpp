// The load over time, and times put in order. Times that are near to each other are counted, which is quicker than sorted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "large_pages.hpp"

namespace packing {

// Columns of `count` half-open times [start, end), none empty, each of the buffer `owner`.
struct Spells {
  const int64_t* owner;
  const int64_t* start;
  const int64_t* end;
  size_t count;
};

// loads[k] bytes are alive from times[k] until the next; times ascend.
struct Curve {
  std::vector<int64_t> times, loads;
};

// What changes when, added up by moment: the moments between the first and the last, where there are not too many.
class Changes {
 public:
  Changes(int64_t first, int64_t last, size_t most) : first_(first) {
    const auto span = static_cast<uint64_t>(last) - static_cast<uint64_t>(first);
    if (span >= dense * most) return;
    bytes_ = filled(span + 1, int64_t{0});
    there_ = filled(span + 1, uint8_t{0});
  }

  void add(int64_t moment, int64_t bytes) {
    if (bytes_.empty()) {
      sparse_.emplace_back(moment, bytes);
      return;
    }
    bytes_[moment - first_] += bytes;
    there_[moment - first_] = 1;
  }

  Curve curve() {
    Curve result;
    int64_t load = 0;
    std::sort(sparse_.begin(), sparse_.end());
    for (const auto& [moment, bytes] : sparse_) {
      load += bytes;
      if (result.times.empty() || result.times.back() != moment) result.times.push_back(moment), result.loads.push_back(0);
      result.loads.back() = load;
    }
    const auto moments = static_cast<size_t>(std::count(there_.begin(), there_.end(), 1));
    reserve(result.times, result.times.size() + moments);
    reserve(result.loads, result.loads.size() + moments);
    for (size_t k = 0; k < there_.size(); ++k) {
      load += bytes_[k];
      if (there_[k]) result.times.push_back(first_ + static_cast<int64_t>(k)), result.loads.push_back(load);
    }
    return result;
  }

 private:
  static constexpr uint64_t dense = 8;  // as many moments for each that matters
  const int64_t first_;
  std::vector<int64_t> bytes_;
  std::vector<uint8_t> there_;
  std::vector<std::pair<int64_t, int64_t>> sparse_;  // moment, bytes; instead of the others
};

// Of buffers of these sizes; all that is alive at a time, together, must be less than 2^63 bytes. With a period, time is
// a circle so long, and the curve goes round it once, from 0.
inline Curve load_curve(const Spells& spells, const int64_t* size, int64_t period) {
  if (spells.count == 0 && period == 0) return {};
  if (period == 0) {
    Changes changes(*std::min_element(spells.start, spells.start + spells.count),
                    *std::max_element(spells.end, spells.end + spells.count), 2 * spells.count);
    for (size_t k = 0; k < spells.count; ++k) {
      changes.add(spells.start[k], size[spells.owner[k]]);
      changes.add(spells.end[k], -size[spells.owner[k]]);
    }
    return changes.curve();
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
  return changes.curve();
}

// The indices of the times in ascending order; alike ones stay in theirs.
inline std::vector<int32_t> order_of_times(const int64_t* times, size_t count) {
  std::vector<int32_t> order = filled(count, 0);
  if (count == 0) return order;
  const int64_t first = *std::min_element(times, times + count);
  const auto span = static_cast<uint64_t>(*std::max_element(times, times + count)) - static_cast<uint64_t>(first);
  if (span > 16 * count) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return times[a] < times[b]; });
    return order;
  }
  std::vector<int32_t> next = filled(span + 2, 0);
  for (size_t k = 0; k < count; ++k) ++next[times[k] - first + 1];
  for (size_t t = 1; t < next.size(); ++t) next[t] += next[t - 1];
  for (size_t k = 0; k < count; ++k) order[next[times[k] - first]++] = static_cast<int32_t>(k);
  return order;
}

}  // namespace packing
