#include "core/graph_pools.hpp"

namespace mempool {
namespace {

// Return true if the filter fails: memory kept for a graph without need costs memory, the opposite error
// costs the graph's contents.
bool takes(const GraphPools::Filter& filter, Stream stream) noexcept {
  try {
    return filter(stream);
  } catch (...) {
    return true;
  }
}

}  // namespace

GraphPools::One* GraphPools::find(Id id) noexcept {
  for (One& one : pools_) {
    if (one.id == id) return &one;
  }
  return nullptr;
}

void GraphPools::begin(Id id, Filter filter) {
  One* one = find(id);
  if (one == nullptr) {
    pools_.emplace_back(id, source_);
    one = &pools_.back();
    one->segments.keep_for_replays();
  }
  ++one->uses;
  if (!one->filter) ++begun_;
  one->filter = std::move(filter);
}

bool GraphPools::end(Id id) noexcept {
  One* const one = find(id);
  if (one == nullptr || !one->filter) return false;
  one->filter = nullptr;
  --begun_;
  return true;
}

bool GraphPools::hold(Id id) noexcept {
  One* const one = find(id);
  return one != nullptr && !std::exchange(one->held, true);
}

bool GraphPools::let_go(Id id) noexcept {
  One* const one = find(id);
  return one != nullptr && std::exchange(one->held, false);
}

void GraphPools::release(Id id) noexcept {
  One* const one = find(id);
  if (one != nullptr && one->uses != 0) --one->uses;
}

bool GraphPools::begun(Id id) noexcept {
  const One* const one = find(id);
  return one != nullptr && one->filter;
}

unsigned GraphPools::uses(Id id) noexcept {
  const One* const one = find(id);
  return one == nullptr ? 0 : one->uses;
}

Segments* GraphPools::of(Stream stream) noexcept {
  for (One& one : pools_) {
    if (one.filter && takes(one.filter, stream)) return &one.segments;
  }
  return nullptr;
}

Block* GraphPools::find(Address address, Segments*& in) noexcept {
  for (One& one : pools_) {
    if (Block* const block = one.segments.find(address)) {
      in = &one.segments;
      return block;
    }
  }
  return nullptr;
}

bool GraphPools::owns(Address address) const noexcept {
  for (const One& one : pools_) {
    if (one.segments.owns(address)) return true;
  }
  return false;
}

void GraphPools::trim() noexcept {
  if (source_.held()) return;
  pools_.remove_if([](One& one) {
    if (one.uses != 0 || one.filter || one.segments.blocks() != 0) return false;
    one.segments.trim();
    return one.segments.by_base().empty();  // else the device could not be waited for
  });
}

std::size_t GraphPools::blocks() const noexcept {
  std::size_t count = 0;
  for (const One& one : pools_) count += one.segments.blocks();
  return count;
}

}  // namespace mempool
