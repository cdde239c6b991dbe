// Orders in which jobs fill valleys.
#pragma once

#include <limits>

#include "packing/skyline.hpp"

namespace packing {

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
  ValleyPacker packer(jobs);
  const int64_t arena = packer.pack(order, std::numeric_limits<int64_t>::max(), cancel);
  return arena < 0 ? std::vector<int64_t>() : std::move(packer).offsets();
}

}  // namespace packing
