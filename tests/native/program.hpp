// Programs that allocate like training loops, and plans for them: good ones, and ones that lie.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/client.hpp"
#include "core/pattern.hpp"

namespace stress {

using Random = std::mt19937_64;  // or any other generator of 64 bits

template <class Random>
std::size_t below(Random& random, std::size_t limit) { return random() % limit; }
template <class Random>
bool chance(Random& random, unsigned percent) { return random() % 100 < percent; }

template <class Random>
std::size_t any_size(Random& random) {
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

  // On a batch of so many percent: two buffers of three are smaller then.
  static constexpr unsigned kSmallest = 40;
  static std::uint64_t scaled(std::uint64_t size, unsigned percent) {
    return size % 3 == 0 ? size : std::max<std::uint64_t>(1, size * percent / 100);
  }
  template <class Random>
  static unsigned any_scale(Random& random) {
    return chance(random, 70) ? 100 : kSmallest + static_cast<unsigned>(below(random, 100 - kSmallest));
  }

  template <class Random>
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
template <class Random>
Planned plan(const Program& program, std::uint32_t sequence, mempool::Stream stream, std::size_t base,
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

// Makes it a part of an envelope, for batches of any scale.
inline void envelop(mempool::Table& table) {
  for (const std::uint64_t size : table.sizes) table.least.push_back(Program::scaled(size, Program::kSmallest));
}

// Where a sequence last began the program, by its own count of allocations, as the planner finds it in the recording;
// anywhere if it has not.
template <class Random>
std::uint64_t phase_of(const mempool::Client::Recording& recording, std::uint32_t sequence, const Program& program,
                       Random& random) {
  std::vector<std::uint64_t> sizes;
  for (const mempool::BriefEvent& event : recording.events) {
    if (event.kind == mempool::RecordedEvent::alloc && event.sequence == sequence) sizes.push_back(event.size);
  }
  for (std::size_t count = 1; count <= sizes.size(); ++count) {
    const std::size_t compared = std::min(count, program.sizes.size());
    const bool same = std::equal(sizes.end() - static_cast<std::ptrdiff_t>(count),
                                 sizes.end() - static_cast<std::ptrdiff_t>(count - compared), program.sizes.begin());
    if (compared >= std::min(mempool::kWindow, static_cast<std::uint32_t>(program.sizes.size())) && same) {
      return recording.counts[sequence] - count;
    }
  }
  return below(random, 2 * program.sizes.size());
}

// A plan of what the client's sequences do, one program each; some of it for another program, or of lies.
template <class Random>
std::unique_ptr<mempool::Pattern> any_pattern(const std::vector<Program>& programs, mempool::Client& client,
                                              std::size_t alignment, bool lies, Random& random, bool cyclic) {
  const mempool::Client::Recording recording = client.recording();
  auto pattern = std::make_unique<mempool::Pattern>();
  pattern->cyclic = cyclic;
  const mempool::Stream main = chance(random, 80) ? 0 : 1;
  const bool enveloped = cyclic && chance(random, 30);
  std::size_t base = 0;
  for (unsigned i = 0; i < programs.size(); ++i) {
    const std::size_t which = chance(random, 90) ? i : below(random, programs.size());
    const mempool::Stream stream = which % 3 == 2 ? 1 - main : main;
    const Program& program = programs[which];
    const std::size_t first = cyclic && chance(random, 30) ? below(random, program.sizes.size()) : 0;
    // Streams may share addresses, which the core makes wait for each other; buffers that meet must then be lucky.
    const std::size_t from = stream != main && chance(random, 50) ? 0 : base;
    Planned part = plan(program.from(first), i, stream, from, alignment, lies, random);
    if (cyclic && i < recording.counts.size()) part.table.phase = phase_of(recording, i, program.from(first), random);
    base = std::max(base, part.bytes);
    if (!cyclic) part.table.marks = {0, part.table.length() / 2, part.table.length()};
    if (enveloped) envelop(part.table);
    pattern->tables.push_back(std::move(part.table));
    pattern->arena_bytes = std::max(pattern->arena_bytes, part.bytes);
  }
  if (chance(random, 50)) pattern->low_water = static_cast<std::uint32_t>(below(random, pattern->tables.front().length()));
  return pattern;
}

}  // namespace stress
