// Ranges of addresses that do not overlap.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace traces {

class Held {
 public:
  struct Range {
    int64_t size, stream;
    int32_t pool = 0;
  };

  // True if the range would overlap no other; an empty range overlaps nothing.
  bool fits(int64_t address, int64_t size) const {
    if (size == 0) return true;
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first - address < size) return false;
    return next == ranges_.begin() || address - std::prev(next)->first >= std::prev(next)->second.size;
  }
  // Adds a range; false if it would overlap another.
  bool add(int64_t address, int64_t size, int64_t stream, int32_t pool = 0) {
    if (!fits(address, size)) return false;
    if (size > 0) ranges_[address] = {size, stream, pool};
    return true;
  }
  // Returns the pool of the range that contains an address, 0 if there is none.
  int32_t pool_at(int64_t address) const {
    const auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return 0;
    const auto& [begin, range] = *std::prev(next);
    return address - begin < range.size ? range.pool : 0;
  }
  // Removes the range that begins at the address, if there is one.
  void remove(int64_t address) { ranges_.erase(address); }
  // Removes a range from all ranges that it overlaps: an expandable segment grows and shrinks at both ends.
  void cut(int64_t address, int64_t size) {
    if (size == 0) return;
    auto at = ranges_.upper_bound(address);
    if (at != ranges_.begin() && std::prev(at)->first + std::prev(at)->second.size > address) --at;
    while (at != ranges_.end() && at->first < address + size) {
      const auto [begin, range] = *at;
      at = ranges_.erase(at);
      if (begin < address) ranges_[begin] = {address - begin, range.stream, range.pool};
      const int64_t rest = begin + range.size - (address + size);
      if (rest > 0) ranges_[address + size] = {rest, range.stream, range.pool};
    }
  }
  const std::map<int64_t, Range>& ranges() const { return ranges_; }

 private:
  std::map<int64_t, Range> ranges_;
};

}  // namespace traces
