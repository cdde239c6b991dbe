// Alignment of a program's first allocations with the iterations that follow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace traces {

// Place of an allocation without a counterpart.
constexpr std::int64_t kExtra = std::numeric_limits<std::int64_t>::max();

// Returns the place of each of `n` allocations in the repetitions of a sequence of `count` sizes: the last repetition
// has the places 0 to `count` - 1, earlier ones have negative places. Allocation number i of the sequence has at
// least `least[i]` and at most `most[i]` bytes.
//
// The alignment runs backwards, greedily: an allocation without a match within the next 32 places, or one
// repetition if shorter, is an extra.
inline std::vector<std::int64_t> align_backwards(const std::int64_t* sizes, std::size_t n, const std::int64_t* least,
                                                 const std::int64_t* most, std::int64_t count) {
  std::vector<std::int64_t> places(n, kExtra);
  if (count == 0) return places;
  constexpr std::int64_t kLook = 32;
  const std::int64_t look = std::min(count, kLook);
  std::int64_t next = count - 1;
  for (std::size_t i = n; i-- > 0;) {
    for (std::int64_t place = next; place > next - look; --place) {
      const std::int64_t at = (place % count + count) % count;
      if (least[at] > sizes[i] || sizes[i] > most[at]) continue;
      places[i] = place;
      next = place - 1;
      break;
    }
  }
  return places;
}

}  // namespace traces
