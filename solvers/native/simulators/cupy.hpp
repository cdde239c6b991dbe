// CuPy's pool: best fit among free blocks of the same stream, with splitting and merging.
#pragma once

#include <unordered_map>

#include "simulators/allocator.hpp"
#include "simulators/chain.hpp"

namespace simulators {

class Cupy final : public Allocator {
 public:
  static constexpr int64_t unit = 512;  // bytes; all sizes are multiples of it

  explicit Cupy(Device& device) : Allocator(device) {}

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    size = rounded(size, unit);
    BySize& free = free_[stream];
    int64_t at = free.smallest(size);
    if (at >= 0) {
      free.remove(blocks_, at);
      if (blocks_[at].size > size) free.add(blocks_, blocks_.split(at, size));
    } else if ((at = take_segment(size, stream)) < 0) {
      return fail();
    }
    live_ += size;
    return {blocks_[at].address, at};
  }

  // Returns the block to its original free list, whatever stream frees it.
  void free(int64_t at, int64_t) override {
    live_ -= blocks_[at].size;
    BySize& free = free_[blocks_[at].stream];
    const int64_t above = blocks_[at].above, below = blocks_[at].below;
    if (above >= 0 && blocks_[above].free) free.remove(blocks_, above), blocks_.merge(at);
    if (below >= 0 && blocks_[below].free) free.remove(blocks_, below), blocks_.merge(at = below);
    free.add(blocks_, at);
  }

 private:
  int64_t take_segment(int64_t size, int64_t stream) {
    int64_t address = device_.reserve(size, stream);
    if (address < 0) {
      give_back();
      address = device_.reserve(size, stream);
    }
    return address < 0 ? -1 : blocks_.add(address, size, stream);
  }

  void give_back() {
    for (const int64_t at : blocks_.whole()) {
      free_[blocks_[at].stream].remove(blocks_, at);
      device_.release(blocks_[at].address);
      blocks_.remove(at);
    }
  }

  Chain blocks_;
  std::unordered_map<int64_t, BySize> free_;  // by stream
};

}  // namespace simulators
