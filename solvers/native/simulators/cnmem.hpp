// CNMeM: best fit with coalescing and a free list per stream; all lists are refilled from the default stream's list.
#pragma once

#include "simulators/allocator.hpp"
#include "simulators/headed.hpp"

namespace simulators {

class Cnmem final : public Allocator {
 public:
  static constexpr int64_t unit = 512;  // bytes; all sizes are multiples of it

  // `first`: bytes reserved at once, 0 for none; if that fails, no request can be served. `grows`: reserves more when
  // these bytes are used up.
  Cnmem(Device& device, int64_t first, bool grows) : Allocator(device), grows_(grows) {
    lists_.of(0);
    if (first == 0) return;
    first = rounded(first, unit);
    const int64_t address = device.reserve(first, 0);
    broken_ = address < 0;
    if (!broken_) lists_.add(root, {address, first, true});
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    if (broken_) return fail();
    size = rounded(size, unit);
    const size_t list = lists_.of(stream);
    Headed block = allocate_from(list, size);
    if (block.size == 0) block = steal(size);
    if (block.size == 0) return fail();
    live_ += size;
    return {block.address, used_.add({block, list})};
  }

  // Returns the block to its original list, whatever stream frees it.
  void free(int64_t handle, int64_t) override {
    const Used used = used_[handle];
    used_.remove(handle);
    live_ -= used.block.size;
    lists_.add(used.list, used.block);
  }

 private:
  static constexpr size_t root = 0;
  struct Used {
    Headed block;
    size_t list;
  };

  // Returns a block of size 0 on failure. A list without a fit takes a block of exactly that size from the root, for
  // good.
  Headed allocate_from(size_t list, int64_t size) {
    Headed block = lists_.take(list, size);
    if (block.size > 0) return cut(list, block, size, false);
    if (list != root) {
      block = allocate_from(root, size);
      return {block.address, block.size, true};
    }
    const int64_t address = grows_ ? device_.reserve(size, 0) : -1;
    return address < 0 ? Headed{0, 0, false} : Headed{address, size, true};
  }

  // Steals from the first list with a fit, in order of the streams' appearance. The root list has none at this point.
  Headed steal(int64_t size) {
    const size_t list = lists_.first(size);
    if (list == HeadedLists::none) return {0, 0, false};
    const Headed block = lists_.take(list, size);
    cut(list, block, size, true);
    return {block.address, size, true};
  }

  Headed cut(size_t list, Headed block, int64_t size, bool rest_is_head) {
    if (block.size > size) lists_.add(list, {block.address + size, block.size - size, rest_is_head});
    return {block.address, size, block.head};
  }

  HeadedLists lists_;
  Slots<Used> used_;
  bool grows_, broken_ = false;
};

}  // namespace simulators
