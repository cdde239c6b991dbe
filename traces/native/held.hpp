// Ranges that do not overlap, by their addresses.
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

  // Whether it would overlap none; what has no bytes overlaps nothing.
  bool fits(int64_t address, int64_t size) const {
    if (size == 0) return true;
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first - address < size) return false;
    return next == ranges_.begin() || address - std::prev(next)->first >= std::prev(next)->second.size;
  }
  // False where it would overlap another.
  bool add(int64_t address, int64_t size, int64_t stream, int32_t pool = 0) {
    if (!fits(address, size)) return false;
    if (size > 0) ranges_[address] = {size, stream, pool};
    return true;
  }
  // Pool of the range that holds an address, 0 where none does.
  int32_t pool_at(int64_t address) const {
    const auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return 0;
    const auto& [begin, range] = *std::prev(next);
    return address - begin < range.size ? range.pool : 0;
  }
  // The range that begins there, if one does.
  void remove(int64_t address) { ranges_.erase(address); }
  // Takes a range out of whatever it overlaps: an expandable segment grows and shrinks at both ends.
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
