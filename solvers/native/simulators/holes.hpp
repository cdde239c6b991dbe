// Free ranges of addresses.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace simulators {

class Holes {
 public:
  // Adds a free range, merged with adjacent ones. The range must overlap no hole.
  void add(int64_t address, int64_t size) {
    auto above = ranges_.lower_bound(address);
    if (above != ranges_.end() && above->first == address + size) size += above->second, above = forget(above);
    if (above != ranges_.begin()) {
      const auto below = std::prev(above);
      if (below->first + below->second == address) address = below->first, size += below->second, forget(below);
    }
    keep(address, size);
  }

  // Removes a range, which must lie within one hole.
  void take(int64_t address, int64_t size) {
    const auto hole = std::prev(ranges_.upper_bound(address));
    const int64_t begin = hole->first, end = begin + hole->second;
    forget(hole);
    if (begin < address) keep(begin, address - begin);
    if (address + size < end) keep(address + size, end - address - size);
  }

  // Returns the address of the lowest hole of at least `size` bytes, -1 if none exists.
  int64_t lowest(int64_t size) const {
    if (by_size_.empty() || by_size_.rbegin()->first < size) return -1;
    for (const auto& [address, bytes] : ranges_)
      if (bytes >= size) return address;
    return -1;
  }

  // Returns the address of the smallest hole of at least `size` bytes, the lowest of equal ones; -1 if none exists.
  int64_t smallest(int64_t size) const {
    const auto found = by_size_.lower_bound({size, 0});
    return found == by_size_.end() ? -1 : found->second;
  }

  // Returns the bytes of the hole that ends at an address, 0 if none does.
  int64_t ending_at(int64_t address) const {
    const auto above = ranges_.lower_bound(address);
    if (above == ranges_.begin()) return 0;
    const auto& [begin, size] = *std::prev(above);
    return begin + size == address ? size : 0;
  }

 private:
  using Ranges = std::map<int64_t, int64_t>;  // address -> bytes

  void keep(int64_t address, int64_t size) {
    ranges_.emplace(address, size);
    by_size_.insert({size, address});
  }

  Ranges::iterator forget(Ranges::iterator range) {
    by_size_.erase({range->second, range->first});
    return ranges_.erase(range);
  }

  Ranges ranges_;
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, address)
};

}  // namespace simulators
