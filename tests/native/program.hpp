// Programs that allocate like training loops, and plans for them: good ones, and ones that lie.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "pattern.hpp"

namespace stress {

using Random = std::mt19937_64;

inline std::size_t below(Random& random, std::size_t limit) { return random() % limit; }
inline bool chance(Random& random, unsigned percent) { return random() % 100 < percent; }

inline std::size_t any_size(Random& random) {
  switch (below(random, 8)) {
    case 0: return below(random, 513);                          // small
    case 1: return 200000 + below(random, 900000);              // a segment of its own
    case 2: return 4096 << below(random, 5);                    // whole pages
    default: return 513 + below(random, 12000);
  }
}

// One iteration: the k-th allocation's size, and after how many allocations it is freed. Times count allocations on a
// circle, so that a buffer may outlive its iteration.
struct Program {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint32_t> lives;

  static Program make(Random& random) {
    Program program;
    const std::size_t count = 4 + below(random, 40);
    for (std::size_t k = 0; k < count; ++k) {
      program.sizes.push_back(std::max<std::size_t>(513, any_size(random)));
      const bool wraps = chance(random, 5);
      const std::size_t longest = wraps ? count : count - k;
      program.lives.push_back(static_cast<std::uint32_t>(1 + below(random, std::max<std::size_t>(1, longest))));
    }
    return program;
  }

  // The beginning of this one, which may be all that an iteration does.
  Program beginning(std::size_t count) const {
    Program part = *this;
    part.sizes.resize(count);
    part.lives.resize(count);
    for (std::size_t k = 0; k < count; ++k) {
      part.lives[k] = static_cast<std::uint32_t>(std::min<std::size_t>(part.lives[k], count - k));
    }
    return part;
  }
  // This one, begun at another place.
  Program from(std::size_t first) const {
    Program turned = *this;
    std::rotate(turned.sizes.begin(), turned.sizes.begin() + static_cast<std::ptrdiff_t>(first), turned.sizes.end());
    std::rotate(turned.lives.begin(), turned.lives.begin() + static_cast<std::ptrdiff_t>(first), turned.lives.end());
    return turned;
  }

  bool meet(std::size_t i, std::size_t j) const {  // i < j
    const std::size_t count = sizes.size();
    return i + lives[i] > j || j + lives[j] > count + i;
  }
};

struct Planned {
  mempool::Table table;
  std::size_t bytes = 0;  // end of its part of the arena
};

// First fit above `base`; a lying plan puts everything anywhere.
inline Planned plan(const Program& program, std::uint32_t sequence, mempool::Stream stream, std::size_t base,
                    std::size_t alignment, bool lies, Random& random) {
  Planned made;
  made.table.sequence = sequence;
  made.table.stream = stream;
  made.table.sizes = program.sizes;
  made.table.slots.resize(program.sizes.size());
  made.bytes = base;
  std::vector<std::size_t> begins;
  for (std::size_t k = 0; k < program.sizes.size(); ++k) {
    std::vector<std::pair<std::size_t, std::size_t>> taken;
    for (std::size_t i = 0; i < k; ++i) {
      if (program.meet(i, k)) taken.emplace_back(begins[i], begins[i] + program.sizes[i]);
    }
    std::sort(taken.begin(), taken.end());
    std::size_t begin = base;
    for (const auto& [from, to] : taken) {
      if (begin + program.sizes[k] <= from) break;
      begin = std::max(begin, (to + alignment - 1) / alignment * alignment);
    }
    if (lies) begin = below(random, 400) * alignment * 8;
    begins.push_back(begin);
    made.bytes = std::max(made.bytes, begin + program.sizes[k]);
    if (!lies || !chance(random, 10)) made.table.slots[k].offset = begin;
  }
  made.bytes = (made.bytes + alignment - 1) / alignment * alignment;
  return made;
}

}  // namespace stress
