// The longest periodic tail of a sequence, in linear time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace traces {

// A tail of `length` values that equal the value `period` places before, as far as that lies in the tail.
// {0, 0} is none. length >= repeats * period, for the number of repeats that was asked for.
struct Tail {
  std::int64_t period = 0;
  std::int64_t length = 0;
};

// Of all tails that repeat a period at least `repeats` times the longest, and of its periods the smallest.
//
// Read backwards, a tail is a prefix, and the smallest period of the prefix of length l is l minus its longest
// border: the prefix function of Knuth, Morris and Pratt (1977) gives all of them in at most 2 n comparisons.
// `border` is scratch memory, kept by the caller so that repeated calls allocate nothing.
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
    if (length / repeats >= period) best = {period, length};  // longer ones come later
  }
  return best;
}

}  // namespace traces
