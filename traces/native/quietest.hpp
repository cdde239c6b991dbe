// Where in a period least of what comes and goes is alive: the best place to begin an iteration.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace traces {

// Of n allocations in order: `row` as counted by `freed_before`, which says how many came before each one's free, or -1: those go
// as soon as they come, so that they do not count, nor do those before `start`, where the periods begin. By the (lower) median over
// the periods, so that what one of them leaves behind does not count either.
inline std::int64_t quietest(const std::int64_t* row, const std::int64_t* size, const std::int64_t* freed_before, std::size_t n,
                             std::size_t start, std::size_t period) {
  std::vector<std::uint64_t> load(n + 1);  // before each, and at the end
  for (std::size_t i = start; i < n; ++i) {
    const auto gone = static_cast<std::size_t>(std::lower_bound(row, row + n, freed_before[i]) - row);
    load[i + 1] += static_cast<std::uint64_t>(size[i]);
    load[std::max(gone, i + 1)] -= static_cast<std::uint64_t>(size[i]);
  }
  for (std::size_t i = start; i < n; ++i) load[i + 1] += load[i];

  const std::size_t periods = (n + 1 - start) / period;
  std::vector<std::uint64_t> there(periods);
  std::size_t best = 0;
  std::uint64_t least = ~std::uint64_t{0};
  for (std::size_t place = 0; place < period; ++place) {
    for (std::size_t k = 0; k < periods; ++k) there[k] = load[start + k * period + place];
    const auto median = there.begin() + static_cast<std::ptrdiff_t>((periods - 1) / 2);
    std::nth_element(there.begin(), median, there.end());
    if (*median < least) best = place, least = *median;
  }
  return static_cast<std::int64_t>(best);
}

}  // namespace traces
