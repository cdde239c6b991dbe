// TensorFlow's allocator "best fit with coalescing": regions that double, splits only of sufficiently large blocks.
#pragma once

#include "simulators/allocator.hpp"
#include "simulators/chain.hpp"

namespace simulators {

class Bfc final : public Allocator {
 public:
  static constexpr int64_t unit = 256;  // bytes; all sizes are multiples of it

  // `region`: bytes of the first region; each next region is twice as large as the last. `slack`: a block is split if
  // larger than the request by at least so many bytes, or at least twice as large. `collects`: free regions are
  // released before a request fails.
  Bfc(Device& device, int64_t region, int64_t slack, bool collects)
      : Allocator(device), region_(rounded(region, unit)), slack_(slack), collects_(collects) {}

  Placed allocate(int64_t size, int64_t) override {
    if (size == 0) return none();
    size = rounded(size, unit);
    int64_t at = free_.smallest(size);
    if (at < 0) at = extend(size);
    if (at < 0 && collects_ && collect(size)) at = extend(size);
    if (at < 0) return fail();
    free_.remove(blocks_, at);
    const int64_t over = blocks_[at].size - size;
    if (over >= size || over >= slack_) free_.add(blocks_, blocks_.split(at, size));
    live_ += blocks_[at].size;
    return {blocks_[at].address, at};
  }

  void free(int64_t at, int64_t) override {
    live_ -= blocks_[at].size;
    const int64_t above = blocks_[at].above, below = blocks_[at].below;
    if (above >= 0 && blocks_[above].free) free_.remove(blocks_, above), blocks_.merge(at);
    if (below >= 0 && blocks_[below].free) free_.remove(blocks_, below), blocks_.merge(at = below);
    free_.add(blocks_, at);
  }

 private:
  static constexpr int64_t largest_region = Device::most_bytes * 4;  // so that doubling does not overflow

  // Reserves an entirely free region for a request; -1 beyond the limit. The last region takes the remaining bytes.
  int64_t extend(int64_t size) {
    const int64_t available = (device_.limit() - device_.reserved()) & -unit;
    if (size > available) return -1;
    const bool enough = size <= region_;
    while (size > region_) region_ *= 2;
    const int64_t bytes = std::min(region_, available);
    const int64_t address = device_.reserve(bytes, 0);
    if (address < 0) return -1;
    if (enough) region_ = std::min(region_ * 2, largest_region);
    const int64_t at = blocks_.add(address, bytes, 0);
    free_.add(blocks_, at);
    return at;
  }

  // Releases all free regions, if that leaves room for the request.
  bool collect(int64_t size) {
    const auto regions = blocks_.whole();
    int64_t bytes = 0;
    for (const int64_t at : regions) bytes += blocks_[at].size;
    if (bytes == 0 || size > device_.limit() - device_.reserved() + bytes) return false;
    for (const int64_t at : regions) {
      free_.remove(blocks_, at);
      device_.release(blocks_[at].address);
      blocks_.remove(at);
    }
    return true;
  }

  int64_t region_, slack_;
  bool collects_;
  Chain blocks_;
  BySize free_;
};

}  // namespace simulators
