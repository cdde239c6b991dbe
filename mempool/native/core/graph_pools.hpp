// Memory of captured graphs. A graph uses the same addresses at every replay, regardless of later allocations
// by the program, so that memory allocated during a capture belongs to a separate pool and is not reused
// elsewhere before that pool is released.
//
// During a capture no call may wait for the device, and no event may be recorded on a stream that is part of
// the capture: MemorySource is on hold and releases nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <utility>

#include "fallback/segments.hpp"

namespace mempool {

class GraphPools {
 public:
  using Id = std::pair<std::uint64_t, std::uint64_t>;
  using Filter = std::function<bool(Stream)>;  // true: a request of this stream belongs to the pool

  explicit GraphPools(MemorySource& source) : source_(source) {}

  // Serve requests that match the filter from this pool from now on; each begin requires a release. May throw
  // std::bad_alloc.
  void begin(Id id, Filter filter);
  // False: no such pool takes requests.
  bool end(Id id) noexcept;
  // Forbid or allow waits for the device on behalf of this pool; return true if that changed.
  bool hold(Id id) noexcept;
  bool let_go(Id id) noexcept;
  // Drop one use of the pool. The memory is released when no graph needs the pool, at once or when the pool's
  // last buffer is freed.
  void release(Id id) noexcept;

  bool begun() const noexcept { return begun_ != 0; }
  bool begun(Id id) noexcept;
  unsigned uses(Id id) noexcept;  // begins without a release
  // Return the segments that serve a request of this stream, or null.
  Segments* of(Stream stream) noexcept;
  // Return the live block at this address, and the segments that contain the block; or null.
  Block* find(Address address, Segments*& in) noexcept;
  bool owns(Address address) const noexcept;
  // Remove pools that are released and empty.
  void trim() noexcept;

  // Call use(id, segments) for each pool, whose segments only a snapshot reads from outside.
  template <class Use>
  void each(Use use) const {
    for (const One& one : pools_) use(one.id, one.segments);
  }
  std::size_t pools() const noexcept { return pools_.size(); }
  std::size_t blocks() const noexcept;

 private:
  static constexpr std::size_t kShared = std::size_t{2} << 20;  // bytes
  struct One {
    // Small segments, because a program may capture hundreds of graphs with one pool each.
    One(Id name, MemorySource& source)
        : id(name), segments(source, std::min(kShared, source.traits().shared_segment)) {}
    Id id;
    Filter filter;  // null: takes no requests now
    unsigned uses = 0;
    bool held = false;
    Segments segments;
  };
  One* find(Id id) noexcept;

  MemorySource& source_;
  std::list<One> pools_;
  unsigned begun_ = 0;
};

}  // namespace mempool
