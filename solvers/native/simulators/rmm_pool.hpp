// RMM's pool: best fit with coalescing and a free list per stream; takes from other lists before the pool grows.
#pragma once

#include <map>

#include "simulators/allocator.hpp"
#include "simulators/headed.hpp"

namespace simulators {

class RmmPool final : public Allocator {
 public:
  static constexpr int64_t unit = 256;  // bytes; all sizes are multiples of it

  // `initial`: bytes reserved at once, 0 for none; if that fails, no request can be served. `maximum`: most bytes of
  // the pool; -1: as many as the device has.
  RmmPool(Device& device, int64_t initial, int64_t maximum) : Allocator(device), maximum_(maximum) {
    if (initial == 0) return;
    const Headed block = expand_to(initial, initial);
    broken_ = block.size == 0;
    if (!broken_) lists_.add(lists_.of(0), block);
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    if (broken_) return fail();
    size = rounded(size, unit);
    const Headed block = find(size, lists_.of(stream));
    if (block.size == 0) return fail();
    live_ += size;
    return {block.address, used_.add(block)};
  }

  // Adds the block to the list of the stream that frees it.
  void free(int64_t handle, int64_t stream) override {
    const Headed block = used_[handle];
    used_.remove(handle);
    live_ -= block.size;
    lists_.add(lists_.of(stream), block);
  }

 private:
  Headed find(int64_t size, size_t mine) {
    if (const Headed block = cut_from(mine, size); block.size > 0) return block;
    if (const size_t list = lists_.first(size); list != HeadedLists::none) return cut_from(list, size);
    for (size_t list = 0; list < lists_.count(); ++list) {
      if (list == mine) continue;
      lists_.merge(mine, list);
      if (const Headed block = cut_from(mine, size); block.size > 0) return block;
    }
    const Headed block = expand(size, mine);
    return block.size == 0 ? block : cut(mine, block, size);
  }

  Headed cut_from(size_t list, int64_t size) {
    const Headed block = lists_.take(list, size);
    return block.size == 0 ? block : cut(list, block, size);
  }

  Headed cut(size_t list, Headed block, int64_t size) {
    if (block.size > size) lists_.add(list, {block.address + size, block.size - size, false});
    return {block.address, size, block.head};
  }

  Headed expand(int64_t size, size_t mine) {
    int64_t wanted = size_to_grow(size);
    if (wanted < size) reclaim(size, mine), wanted = size_to_grow(size);
    return expand_to(wanted, size);
  }

  // Returns the pool's size, or half of the bytes left up to the maximum, but at least `size`; 0: too few are left.
  int64_t size_to_grow(int64_t size) const {
    if (maximum_ < 0) return std::max(size, pool_);
    const int64_t remaining = rounded(maximum_ - pool_, unit);
    return size <= remaining ? std::max(size, remaining / 2) : 0;
  }

  // Reserves `wanted` bytes, halved as long as the device refuses; size 0 if the device refuses even `least`.
  Headed expand_to(int64_t wanted, int64_t least) {
    for (; wanted >= least; wanted = std::max(least, wanted / 2)) {
      const int64_t address = device_.reserve(wanted, 0);
      if (address >= 0) {
        pool_ += wanted;
        segments_.emplace(address, wanted);
        return {address, wanted, true};
      }
      if (wanted == least) break;
    }
    return {0, 0, false};
  }

  // Releases entirely free segments until `size` bytes more are within the maximum.
  void reclaim(int64_t size, size_t mine) {
    if (size > maximum_) return;
    for (auto at = segments_.begin(); at != segments_.end() && maximum_ - pool_ < size;) {
      const auto [address, bytes] = *at;
      if (!lists_.take(mine, address, bytes)) {
        ++at;
        continue;
      }
      device_.release(address);
      pool_ -= bytes;
      at = segments_.erase(at);
    }
  }

  int64_t maximum_, pool_ = 0;
  HeadedLists lists_;
  std::map<int64_t, int64_t> segments_;          // address -> bytes
  Slots<Headed> used_;
  bool broken_ = false;
};

}  // namespace simulators
