// Size rules of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h, 2.13).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace simulators {

struct PyTorchRules {
  static constexpr int64_t mib = 1 << 20;
  static constexpr int64_t least_block = 512;       // kMinBlockSize
  static constexpr int64_t small_size = mib;        // kSmallSize: largest request of the small pool
  static constexpr int64_t small_segment = 2 * mib;  // kSmallBuffer
  static constexpr int64_t least_large = 10 * mib;  // kMinLargeAlloc: smallest request with a segment of its own
  static constexpr int64_t large_unit = 2 * mib;    // kRoundLarge
  static constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();

  int64_t max_split = unlimited;             // blocks of at least this size are not split
  int64_t max_non_split_rounding = 20 * mib;  // such a block serves requests smaller by less than this
  int64_t large_segment = 20 * mib;
  double gc_threshold = 0;               // fraction of the limit
  std::array<int64_t, 16> divisions{};  // for requests from 1 MiB, 2 MiB ... 32 GiB on; the first also for smaller ones

  // Returns the least size of a block for a request.
  int64_t rounded(int64_t size) const {
    if (size < least_block) return least_block;
    const int64_t parts = divisions[std::clamp(log2_of(size) - 20, 0, 15)];
    if (parts > 0 && size > least_block * parts) return next_division(size, parts);
    return (size + least_block - 1) / least_block * least_block;
  }

  int64_t segment_for(int64_t size) const {
    if (size <= small_size) return small_segment;
    if (size < least_large) return large_segment;
    return (size + large_unit - 1) / large_unit * large_unit;
  }

 private:
  static int log2_of(int64_t size) { return 63 - __builtin_clzll(static_cast<unsigned long long>(size)); }

  // Rounds up to the next of `parts` equal steps between two powers of two. With one part, sizes stay as they are.
  static int64_t next_division(int64_t size, int64_t parts) {
    if (parts <= 1 || (size & (size - 1)) == 0) return size;
    const int64_t floor = int64_t{1} << log2_of(size), part = floor >> log2_of(parts);
    if (part == 0) return floor << 1;
    return (size + part - 1) / part * part;
  }
};

}  // namespace simulators
