// The longest periodic tail of a sequence, and the start of the iterations of interleaved sequences, in
// linear time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace traces {

// A tail of `length` values, each equal to the value `period` places before within the tail. {0, 0} means no
// tail. length >= repeats * period, for the requested number of repeats.
struct Tail {
  std::int64_t period = 0;
  std::int64_t length = 0;
};

// Returns the longest tail that repeats a period at least `repeats` times, with the smallest period.
//
// Read backwards, a tail is a prefix, and the smallest period of the prefix of length l is l minus its
// longest border: the prefix function of Knuth, Morris and Pratt (1977) gives all of them in at most 2 n
// comparisons. `border` is scratch memory, kept by the caller so that repeated calls allocate nothing.
inline Tail tail_period(const std::int64_t* values, std::size_t n, std::int64_t repeats,
                        std::vector<std::int64_t>& border) {
  Tail best;
  if (n == 0) return best;
  if (border.size() < n) border.resize(n);
  const std::int64_t* last = values + (n - 1);
  border[0] = 0;
  std::int64_t k = 0;
  for (std::int64_t i = 1; i < static_cast<std::int64_t>(n); ++i) {
    const std::int64_t value = *(last - i);
    while (k > 0 && *(last - k) != value) k = border[k - 1];
    if (*(last - k) == value) ++k;
    border[i] = k;
    const std::int64_t length = i + 1, period = length - k;
    if (length / repeats >= period) best = {period, length};  // longer tails come later
  }
  return best;
}

// The least evidence for a tail to count as iterations.
struct Evidence {
  std::int64_t values;   // total length, whatever the period
  std::int64_t repeats;
  bool shown_by(const Tail& tail) const noexcept {
    return tail.period != 0 && tail.length >= values && tail.length >= repeats * tail.period;
  }
};

// Evidence for iterations.
constexpr Evidence kIterations{24, 3};

// Returns the sequence that allocates most bytes in n allocations, the lowest of several; n >= 1.
template <class Sequence, class Size>
Sequence sequence_with_most_bytes(const Sequence* sequence, const Size* size, std::size_t n) {
  std::map<Sequence, double> bytes;
  for (std::size_t i = 0; i < n; ++i) bytes[sequence[i]] += static_cast<double>(size[i]);
  return std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; })->first;
}

// Returns the earliest beginning of the iterations at the end of any of the interleaved sequences, as an
// index among the n allocations; -1 if the main sequence, which allocates most bytes in the second half, does
// not repeat.
inline std::int64_t iterations_start(const std::uint32_t* sequence, const std::uint64_t* size, std::size_t n,
                                     const Evidence& evidence) {
  struct Own {
    std::vector<std::int64_t> values, rows;
    bool late = false;
  };
  std::map<std::uint32_t, Own> owns;
  for (std::size_t i = 0; i < n; ++i) {
    Own& own = owns[sequence[i]];
    own.values.push_back(static_cast<std::int64_t>(size[i]));
    own.rows.push_back(static_cast<std::int64_t>(i));
    own.late = own.late || i >= n / 2;
  }
  std::int64_t begin = -1;
  std::vector<std::int64_t> border;
  const auto look = [&](const Own& own) {
    const Tail tail = tail_period(own.values.data(), own.values.size(), 2, border);
    if (!evidence.shown_by(tail)) return false;
    const std::int64_t first = own.rows[own.rows.size() - static_cast<std::size_t>(tail.length)];
    if (begin == -1 || first < begin) begin = first;
    return true;
  };
  if (n == 0) return -1;
  const std::uint32_t main = sequence_with_most_bytes(sequence + n / 2, size + n / 2, n - n / 2);
  if (!look(owns.at(main))) return -1;
  for (const auto& [name, own] : owns) {
    if (own.late && name != main) look(own);
  }
  return begin;
}

// Data-dependent sizes (a mask, the result of unique) hide the iteration around them, but occur rarely:
// without the sizes that occur less often than a threshold, the rest may repeat, if at least this share of
// the allocations remains.
constexpr std::int64_t kLeastRare = 2, kMostRare = 32;  // each threshold is twice the one before
constexpr std::int64_t kLeastKept = 9, kLeastKeptOf = 10;  // so that several sizes in a row identify a position
constexpr Evidence kRareLeftOut{256, 4};

// Same, without rare sizes; returns a row among all allocations.
inline std::int64_t iterations_start_without_rare_sizes(const std::uint32_t* sequence, const std::uint64_t* size, std::size_t n) {
  if (n < static_cast<std::size_t>(kRareLeftOut.values)) return -1;
  std::vector<std::uint64_t> sorted(size, size + n);
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::int64_t> count(n);  // of each allocation's size
  for (std::size_t i = 0; i < n; ++i) {
    const auto [first, last] = std::equal_range(sorted.begin(), sorted.end(), size[i]);
    count[i] = last - first;
  }
  std::vector<std::uint32_t> sequences;
  std::vector<std::uint64_t> sizes;
  std::vector<std::size_t> rows;
  std::size_t kept = n;
  for (std::int64_t rare = kLeastRare; rare <= kMostRare; rare *= 2) {
    sequences.clear(), sizes.clear(), rows.clear();
    for (std::size_t i = 0; i < n; ++i) {
      if (count[i] < rare) continue;
      sequences.push_back(sequence[i]), sizes.push_back(size[i]), rows.push_back(i);
    }
    if (rows.size() * kLeastKeptOf < n * kLeastKept) return -1;
    if (rows.size() == kept) continue;
    kept = rows.size();
    const std::int64_t begin = iterations_start(sequences.data(), sizes.data(), kept, kRareLeftOut);
    if (begin >= 0) return static_cast<std::int64_t>(rows[static_cast<std::size_t>(begin)]);
  }
  return -1;
}

// Returns the position in a period with the fewest temporary bytes alive: the best place to begin an iteration.
//
// For n allocations in order. `row` numbers them as `freed_before` does, which holds the number of
// allocations before each one's free, or -1. Buffers that are never freed count as freed at once, so that
// they do not matter; neither do allocations before `start`, where the periods begin. The result uses the
// (lower) median over the periods, so that leftovers of a single period do not matter either.
inline std::int64_t least_load_position(const std::int64_t* row, const std::int64_t* size, const std::int64_t* freed_before, std::size_t n,
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
