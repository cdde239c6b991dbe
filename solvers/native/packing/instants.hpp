// A set of instants with a query for the last member up to an instant: a hierarchical bitmap, in which a bit
// of each level tells whether any bit of a word below is set.
#pragma once

#include <cstdint>
#include <vector>

namespace packing {

class Instants {
 public:
  explicit Instants(int32_t length) {
    for (size_t bits = length; levels_.empty() || bits > 1; bits = (bits + 63) / 64) levels_.emplace_back((bits + 63) / 64, 0);
  }

  void insert(int32_t instant) {
    auto k = static_cast<uint32_t>(instant);
    for (auto& level : levels_) {
      level[k / 64] |= bit(k);
      k /= 64;
    }
  }

  void erase(int32_t instant) {
    auto k = static_cast<uint32_t>(instant);
    for (auto& level : levels_) {
      if ((level[k / 64] &= ~bit(k)) != 0) return;
      k /= 64;
    }
  }

  // There must be such an instant.
  int32_t last_until(int32_t instant) const {
    auto k = static_cast<uint32_t>(instant);
    size_t at = 0;
    uint64_t here = levels_[0][k / 64] & (bit(k) | (bit(k) - 1));
    while (here == 0) {
      k /= 64;
      here = levels_[++at][k / 64] & (bit(k) - 1);
    }
    k = k / 64 * 64 + last(here);
    while (at > 0) k = k * 64 + last(levels_[--at][k]);
    return static_cast<int32_t>(k);
  }

 private:
  static uint64_t bit(uint32_t k) { return uint64_t{1} << k % 64; }
  static uint32_t last(uint64_t word) { return 63 - static_cast<uint32_t>(__builtin_clzll(word)); }

  std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace packing
