// What must hold of a pool at rest, told from what it shows of itself.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "observer.hpp"
#include "fallback/segments.hpp"
#include "core/pool_state.hpp"

namespace stress {

using namespace mempool;

// Its blocks lie without gaps in their segments, and no two segments overlap.
inline void look_at(const Snapshot& snapshot) {
  std::vector<std::uint64_t> ends;
  for (const Snapshot::Segment& segment : snapshot.segments) ends.push_back(segment.base);
  for (const Snapshot::Block& block : snapshot.blocks) {
    if (block.address != ends[block.segment]) fail("a gap in a snapshot", block.address, block.size);
    ends[block.segment] += block.size;
  }
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const Snapshot::Segment& segment = snapshot.segments[i];
    if (ends[i] != segment.base + segment.size) fail("blocks do not fill their segment", segment.base, segment.size);
    ranges.emplace_back(segment.base, ends[i]);
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) fail("segments overlap", ranges[i].first, ranges[i].second);
  }
}

// What the fallback keeps count of, counted anew. The pool's lock is held.
inline void check_returnable(const Segments& segments, std::size_t page) {
  std::size_t bytes = 0;
  for (const auto& [base, segment] : segments.by_base()) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (!block->free) continue;
      const std::size_t begin = block->address - base, end = begin + block->size;
      if (page == 0 || segment.large) {
        bytes += block->size == segment.size ? segment.size : 0;
      } else if ((begin + page - 1) / page < end / page) {
        bytes += segment.pages.count((begin + page - 1) / page, end / page) * page;
      }
    }
  }
  if (bytes != segments.retained()) fail("what is free and returnable is counted wrong", bytes, segments.retained());
}

}  // namespace stress
