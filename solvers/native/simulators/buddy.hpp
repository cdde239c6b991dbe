// Binary buddy system (Knuth, The Art of Computer Programming, vol. 1, section 2.5): blocks are powers of two, lie at
// multiples of their size within their region, and merge with their buddy, the other half of the split block.
#pragma once

#include <array>
#include <set>
#include <utility>

#include "simulators/allocator.hpp"
#include "simulators/slots.hpp"

namespace simulators {

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
