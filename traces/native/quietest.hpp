// Search for the position in a period with the fewest temporary bytes alive: the best place to begin an
// iteration.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace traces {

// For n allocations in order. `row` numbers them as `freed_before` does, which holds the number of
// allocations before each one's free, or -1. Buffers that are never freed count as freed at once, so that
// they do not matter; neither do allocations before `start`, where the periods begin. The result uses the
// (lower) median over the periods, so that leftovers of a single period do not matter either.
inline std::int64_t quietest(const std::int64_t* row, const std::int64_t* size, const std::int64_t* freed_before, std::size_t n,
                             std::size_t start, std::size_t period) {
  std::vector<std::uint64_t> load(n + 1);  // before each allocation, and at the end
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
