// Textbook allocators: first fit and best fit.
#pragma once

#include "simulators/allocator.hpp"

namespace simulators {

// Plain first fit and best fit in one region that grows at its end and never shrinks.
class Fit : public Allocator {
 public:
  // `growth`: the region grows by multiples of this. Alignment and growth are powers of two.
  Fit(Device& device, bool best, int64_t alignment, int64_t growth)
      : Allocator(device), best_(best), alignment_(alignment), growth_(growth) {
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

}  // namespace simulators
