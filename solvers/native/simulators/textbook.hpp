// Textbook allocators: first fit, best fit and the binary buddy system.
#pragma once

#include <array>
#include <set>
#include <utility>

#include "simulators/allocator.hpp"

namespace simulators {

// Plain first fit and best fit in one region that grows at its end and never shrinks.
class Fit : public Allocator {
 public:
  // `growth`: the region grows by multiples of this. Alignment and growth are powers of two.
  Fit(Device& device, bool best, int64_t alignment, int64_t growth)
      : Allocator(device), best_(best), alignment_(alignment), growth_(growth), holes_(best) {
    top_ = device.reserve_addresses(2 * Device::most_bytes);
    region_ = device.new_region();
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    size = rounded(size, alignment_);
    int64_t address = best_ ? holes_.smallest(size) : holes_.lowest(size);
    if (address < 0 && (address = grow(size, stream)) < 0) return fail();
    holes_.take(address, size);
    live_ += size;
    return {address, blocks_.add({address, size})};
  }

  void free(int64_t handle, int64_t) override {
    const Block block = blocks_[handle];
    blocks_.remove(handle);
    holes_.add(block.address, block.size);
    live_ -= block.size;
  }

 private:
  struct Block {
    int64_t address, size;
  };

  // Grows the region; returns the address of its last hole, then large enough, or -1 beyond the limit.
  int64_t grow(int64_t size, int64_t stream) {
    const int64_t tail = holes_.ending_at(top_), more = rounded(size - tail, growth_);
    if (!device_.map(top_, more, stream, region_, 1)) return -1;
    holes_.add(top_, more);
    top_ += more;
    return top_ - more - tail;
  }

  bool best_;
  int64_t alignment_, growth_, top_, region_;
  Holes holes_;
  Slots<Block> blocks_;
};

// Binary buddy system (Knuth, The Art of Computer Programming, vol. 1, section 2.5): blocks are powers of two, lie at
// multiples of their size within their region, and merge with their buddy, the other half of the split block.
class Buddy final : public Allocator {
 public:
  // `least` and `region` are powers of two. A request beyond `region` bytes has a region of its own.
  Buddy(Device& device, int64_t least, int64_t region)
      : Allocator(device), least_(order_of(least)), region_(order_of(region)) {}

  Placed allocate(int64_t size, int64_t) override {
    if (size == 0) return none();
    const int wanted = std::max(order_of(size), least_);
    int order = wanted;
    while (order < orders && free_[order].empty()) ++order;
    if (order == orders && (order = add_region(wanted)) < 0) return fail();
    const auto [address, base] = *free_[order].begin();
    free_[order].erase(free_[order].begin());
    while (order > wanted) --order, free_[order].insert({address + (int64_t{1} << order), base});
    live_ += int64_t{1} << order;
    return {address, used_.add({address, base, order})};
  }

  void free(int64_t handle, int64_t) override {
    auto [address, base, order] = used_[handle];
    used_.remove(handle);
    live_ -= int64_t{1} << order;
    while (free_[order].erase({base + ((address - base) ^ (int64_t{1} << order)), base}) > 0)
      address = base + ((address - base) & ~(int64_t{1} << order)), ++order;
    free_[order].insert({address, base});
  }

 private:
  static constexpr int orders = 60;
  struct Used {
    int64_t address, base;
    int order;
  };

  // Binary logarithm, rounded up.
  static int order_of(int64_t size) { return size <= 1 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(size - 1)); }

  // Reserves an entirely free region and returns its order; -1 beyond the limit.
  int add_region(int wanted) {
    const int order = std::max(wanted, region_);
    const int64_t address = device_.reserve(int64_t{1} << order, 0);
    if (address < 0) return -1;
    free_[order].insert({address, address});
    return order;
  }

  int least_, region_;
  std::array<std::set<std::pair<int64_t, int64_t>>, orders> free_;  // by order: (address, base of the region)
  Slots<Used> used_;
};

}  // namespace simulators
