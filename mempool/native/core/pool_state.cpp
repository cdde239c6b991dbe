#include "core/pool_state.hpp"

#include <algorithm>
#include <utility>

#include "core/client.hpp"

namespace mempool {
namespace {

// Fills gaps between live blocks with free blocks and passes both to a sink: segment(s) and then its
// block(b)s, in order.
template <class Sink>
class Walk {
 public:
  Walk(const ForeignUses& uses, Sink& sink) : uses_(uses), sink_(sink) {}

  void of_graph(GraphPools::Id id) { graph_ = id; }  // for all following segments
  void begin(Address base, std::size_t bytes, Snapshot::Segment::Kind kind, Stream stream, bool paged) {
    sink_.segment({base, bytes, stream, kind, paged ? 1u : 0u, graph_.first, graph_.second});
    at_ = base;
    end_ = base + bytes;
  }
  // Add live blocks, in address order; the part of a block outside the segment belongs to another segment.
  void live(Address address, std::size_t bytes, std::size_t requested) {
    free_up_to(address);
    const std::size_t size = std::min<std::size_t>(bytes, end_ - at_);
    sink_.block({at_, size, requested, 0, uses_.waits(address) ? Snapshot::Block::waiting : Snapshot::Block::live});
    at_ += size;
  }
  void end() { free_up_to(end_); }

 private:
  void free_up_to(Address address) {
    if (address > at_) sink_.block({at_, address - at_, 0, 0, Snapshot::Block::free});
    at_ = std::max(at_, address);
  }

  const ForeignUses& uses_;
  Sink& sink_;
  GraphPools::Id graph_{0, 0};
  Address at_ = 0, end_ = 0;
};

template <class Sink>
void walk_arena(const Pool& pool, bool paged, Walk<Sink>& walk) {
  if (pool.arena_bytes() == 0) return;
  walk.begin(pool.arena_base(), pool.arena_bytes(), Snapshot::Segment::arena, pool.arena_streams().first(), paged);
  const auto ranges = pool.occupancy().live_ranges();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto [begin, end] = ranges[i];
    const Offset next = i + 1 < ranges.size() ? ranges[i + 1].first : pool.arena_bytes();
    const std::size_t requested = end - begin;
    walk.live(pool.arena_base() + begin, std::min<std::size_t>(pool.round_up(requested), next - begin), requested);
  }
  walk.end();
}

// Walk the live blocks of a segment that begin in [begin, end). No block crosses a border, because the pages
// of live blocks are committed.
template <class Sink>
void walk_run(const Segment& segment, const Block*& block, Address begin, Address end, bool paged, Walk<Sink>& walk) {
  while (block != nullptr && block->address + block->size <= begin) block = block->after;
  Stream stream = block != nullptr ? block->stream : 0;
  for (const Block* first = block; first != nullptr && first->address < end; first = first->after) {
    if (first->free) continue;
    stream = first->stream;
    break;
  }
  walk.begin(begin, end - begin, segment.large ? Snapshot::Segment::large : Snapshot::Segment::shared, stream, paged);
  for (const Block* each = block; each != nullptr && each->address < end; each = each->after) {
    if (!each->free) walk.live(each->address, each->size, each->requested);
  }
  walk.end();
}

template <class Sink>
void walk_segments(const Segments& segments, std::size_t page, bool large, Walk<Sink>& walk) {
  for (const auto& [base, segment] : segments.by_base()) {
    if (segment.large != large) continue;
    const Block* block = segment.first;
    if (large || page == 0) {
      walk_run(segment, block, base, base + segment.size, page != 0, walk);
      continue;
    }
    const std::size_t pages = segment.pages.size();
    for (std::size_t first = segment.pages.find(0, pages, true); first < pages;) {
      const std::size_t last = segment.pages.find(first, pages, false);
      walk_run(segment, block, base + first * page, base + last * page, true, walk);
      first = segment.pages.find(last, pages, true);
    }
  }
}

template <class Page, class Sink>
void walk_small_page(const Page& page, std::size_t unit, Walk<Sink>& walk) {
  const std::size_t size = (page.size_class + std::size_t{1}) * unit;
  for (std::size_t i = 0; i < page.blocks; ++i) {
    if ((page.free[i / 64] >> (i % 64) & 1) != 0) continue;
    walk.live(page.address + i * size, size, page.requested[i]);
  }
}

template <class Sink>
void walk_small(const Pool& pool, std::size_t device_page, Walk<Sink>& walk) {
  pool.small().each_region([&](const auto& region) {
    const auto& pages = region.pages;
    const auto held = [&](std::size_t i) { return device_page == 0 || pages[i].committed; };
    for (std::size_t first = 0; first < pages.size();) {
      if (!held(first)) {
        ++first;
        continue;
      }
      std::size_t last = first, in_use = pages.size();
      for (; last < pages.size() && held(last); ++last) {
        if (in_use == pages.size() && pages[last].used != 0) in_use = last;
      }
      const Stream stream = pages[in_use == pages.size() ? first : in_use].stream;
      walk.begin(pages[first].address, (last - first) * SmallBlocks::kPage, Snapshot::Segment::small, stream,
                 device_page != 0);
      for (; first < last; ++first) walk_small_page(pages[first], pool.small().unit(), walk);
      walk.end();
    }
  });
}

template <class Sink>
void walk(Pool& pool, Sink& sink) {
  const std::size_t page = pool.source().traits().page;
  Walk<Sink> walk(pool.uses(), sink);
  walk_arena(pool, page != 0, walk);
  walk_segments(pool.segments(), page, false, walk);
  walk_segments(pool.segments(), page, true, walk);
  walk_small(pool, page, walk);
  pool.graphs().each([&](GraphPools::Id id, const Segments& segments) {
    walk.of_graph(id);
    walk_segments(segments, page, false, walk);
    walk_segments(segments, page, true, walk);
  });
}

struct Columns {
  Snapshot& snapshot;
  void segment(const Snapshot::Segment& segment) { snapshot.segments.push_back(segment); }
  void block(Snapshot::Block block) {
    block.segment = static_cast<std::uint32_t>(snapshot.segments.size() - 1);
    snapshot.blocks.push_back(block);
  }
};

struct Sums {
  Usage& usage;
  Usage::Part* part = nullptr;
  std::uint64_t idle_blocks = 0, idle_bytes = 0;
  bool in_use = false;

  void segment(const Snapshot::Segment& segment) {
    finish();
    part = segment.kind == Snapshot::Segment::small ? &usage.small : &usage.large;
    ++part->segments;
    part->bytes += segment.size;
  }
  void block(const Snapshot::Block& block) {
    if (block.state != Snapshot::Block::free) {
      in_use = true;
      return;
    }
    ++idle_blocks;
    idle_bytes += block.size;
  }
  void finish() {
    if (in_use) {
      part->idle_blocks += idle_blocks;
      part->idle_bytes += idle_bytes;
    }
    idle_blocks = idle_bytes = 0;
    in_use = false;
  }
};

}  // namespace

Snapshot take_snapshot(Pool& pool, const Client* client) {
  Snapshot snapshot;
  Columns columns{snapshot};
  const Guarded guard(pool.lock);
  walk(pool, columns);
  if (client != nullptr) client->history().copy_from(0, snapshot.history);
  return snapshot;
}

DeviceLog::Runs runs_held(Pool& pool) {
  Snapshot snapshot;
  Columns columns{snapshot};
  walk(pool, columns);
  DeviceLog::Runs runs;
  for (const Snapshot::Segment& segment : snapshot.segments) runs.emplace_back(segment.base, segment.size);
  return runs;
}

Usage take_usage(Pool& pool) {
  Usage usage;
  Sums sums{usage};
  const Guarded guard(pool.lock);
  walk(pool, sums);
  sums.finish();
  const MemorySource& source = pool.source();
  usage.reserved_total = source.reserved().total;
  usage.recent_peak = source.recent_peak();
  usage.times_took = source.times_took();
  usage.times_gave = source.times_gave();
  usage.retries = pool.retries();
  usage.waits = pool.waits();
  return usage;
}

}  // namespace mempool
