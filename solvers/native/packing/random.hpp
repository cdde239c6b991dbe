// Random number generator of all seeded kernels.
#pragma once

#include <cstdint>

namespace packing {

// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine, unlike the standard library's.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int32_t below(int32_t n) { return static_cast<int32_t>((next() >> 32) * static_cast<uint64_t>(n) >> 32); }

  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // in [0, 1)

 private:
  uint64_t state_;
};

}  // namespace packing
