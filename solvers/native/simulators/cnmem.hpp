// CNMeM: best fit with coalescing in a list for each stream; all lists take from that of the default stream.
#pragma once

#include <unordered_map>
#include <vector>

#include "allocator.hpp"
#include "headed.hpp"

namespace simulators {

class Cnmem final : public Allocator {
 public:
  static constexpr int64_t unit = 512;  // bytes; all sizes are multiples of it

  // `first`: bytes taken at once, 0 for none; where they cannot be had, no request can be served. `grows`: takes more
  // when that is not enough.
  Cnmem(Device& device, int64_t first, bool grows) : Allocator(device), lists_(1), grows_(grows) {
    if (first == 0) return;
    first = rounded(first, unit);
    const int64_t address = device.reserve(first, 0);
    broken_ = address < 0;
    if (!broken_) lists_[root].add({address, first, true});
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    if (broken_) return fail();
    size = rounded(size, unit);
    const size_t list = list_of(stream);
    Headed block = allocate_from(list, size);
    if (block.size == 0) block = steal(size);
    if (block.size == 0) return fail();
    live_ += size;
    return {block.address, used_.add({block, list})};
  }

  // To the list that it came from, whatever stream frees it.
  void free(int64_t handle, int64_t) override {
    const Used used = used_[handle];
    used_.remove(handle);
    live_ -= used.block.size;
    lists_[used.list].add(used.block);
  }

 private:
  static constexpr size_t root = 0;
  struct Used {
    Headed block;
    size_t list;
  };

  size_t list_of(int64_t stream) {
    if (stream == 0) return root;
    const auto [found, is_new] = list_of_.try_emplace(stream, lists_.size());
    if (is_new) lists_.emplace_back();
    return found->second;
  }

  // Of no bytes if there is none. A list that has none takes a block of just that size, for good.
  Headed allocate_from(size_t list, int64_t size) {
    Headed block = lists_[list].take(size);
    if (block.size > 0) return cut(list, block, size, false);
    if (list != root) {
      block = allocate_from(root, size);
      return {block.address, block.size, true};
    }
    const int64_t address = grows_ ? device_.reserve(size, 0) : -1;
    return address < 0 ? Headed{0, 0, false} : Headed{address, size, true};
  }

  // From the list of the stream that came first and has one, the default stream's excepted.
  Headed steal(int64_t size) {
    for (size_t list = root + 1; list < lists_.size(); ++list) {
      const Headed block = lists_[list].take(size);
      if (block.size == 0) continue;
      cut(list, block, size, true);
      return {block.address, size, true};
    }
    return {0, 0, false};
  }

  Headed cut(size_t list, Headed block, int64_t size, bool rest_is_head) {
    if (block.size > size) lists_[list].add({block.address + size, block.size - size, rest_is_head});
    return {block.address, size, block.head};
  }

  std::vector<HeadedList> lists_;
  std::unordered_map<int64_t, size_t> list_of_;  // by stream
  Slots<Used> used_;
  bool grows_, broken_ = false;
};

}  // namespace simulators
