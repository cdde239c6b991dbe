// Memory of captured graphs. A graph uses the same addresses again at every replay, wherever the program's own buffers
// have gone by then, so what was allocated while one was captured is a pool's of its own: nobody else gets it before that
// pool is released.
//
// While a graph is captured nothing may wait for the device, and no event may be recorded on a stream that is part of it:
// MemorySource is on hold, and gives nothing back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <utility>

#include "segments.hpp"

namespace mempool {

class GraphPools {
 public:
  using Id = std::pair<std::uint64_t, std::uint64_t>;
  using Filter = std::function<bool(Stream)>;  // whether a request of this stream belongs to the pool

  explicit GraphPools(MemorySource& source) : source_(source) {}

  // Requests that the filter takes come from this pool from now on; each begin wants a release. May throw std::bad_alloc.
  void begin(Id id, Filter filter);
  // False: no such pool takes requests.
  bool end(Id id) noexcept;
  // Whether nothing may wait for the device on behalf of this pool; each says whether that has changed.
  bool hold(Id id) noexcept;
  bool let_go(Id id) noexcept;
  // What no graph needs any more goes back, now or when the last of its buffers is freed.
  void release(Id id) noexcept;

  bool begun() const noexcept { return begun_ != 0; }
  bool begun(Id id) noexcept;
  unsigned uses(Id id) noexcept;  // begins without a release
  // The segments that a request of this stream is to be served from, or null.
  Segments* of(Stream stream) noexcept;
  // The live block at this address, and the segments it is of; or null.
  Block* find(Address address, Segments*& in) noexcept;
  bool owns(Address address) const noexcept;
  // Pools that are released and empty go back.
  void trim() noexcept;

  // Calls use(id, segments) with each of the pools, whose segments only a snapshot reads from outside.
  template <class Use>
  void each(Use use) const {
    for (const One& one : pools_) use(one.id, one.segments);
  }
  std::size_t pools() const noexcept { return pools_.size(); }
  std::size_t blocks() const noexcept;

 private:
  static constexpr std::size_t kShared = std::size_t{2} << 20;  // bytes
  struct One {
    // Small segments: a program may capture hundreds of graphs, each with a pool of its own.
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
