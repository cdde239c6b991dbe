// The free list of CNMeM and of RMM's pool: ranges that touch are one, unless the upper one is a head.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace simulators {

// A head begins what was taken from elsewhere in one piece, and never joins what lies below.
struct Headed {
  int64_t address, size;
  bool head;
};

class HeadedList {
 public:
  void add(Headed range) {
    auto above = ranges_.lower_bound(range.address);
    if (above != ranges_.end() && !above->second.head && above->first == range.address + range.size) {
      range.size += above->second.size;
      by_size_.erase({above->second.size, above->first});
      above = ranges_.erase(above);
    }
    if (!range.head && above != ranges_.begin()) {
      auto& [address, below] = *std::prev(above);
      if (address + below.size == range.address) {
        by_size_.erase({below.size, address});
        below.size += range.size;
        by_size_.insert({below.size, address});
        return;
      }
    }
    ranges_.emplace_hint(above, range.address, range);
    by_size_.insert({range.size, range.address});
  }

  // All of another list, which is empty then. Moves the fewer.
  void add(HeadedList&& other) {
    if (ranges_.size() < other.ranges_.size()) std::swap(*this, other);
    for (const auto& [address, range] : other.ranges_) add(range);
    other = HeadedList();
  }

  // Takes out the smallest range of at least so many bytes, the lowest of its size; of no bytes if there is none.
  Headed take(int64_t size) {
    const auto found = by_size_.lower_bound({size, 0});
    return found == by_size_.end() ? Headed{0, 0, false} : take(ranges_.find(found->second));
  }

  // Takes out exactly this range; false: it is not free, or not by itself.
  bool take(int64_t address, int64_t size) {
    const auto found = ranges_.find(address);
    if (found == ranges_.end() || found->second.size != size) return false;
    take(found);
    return true;
  }

 private:
  Headed take(std::map<int64_t, Headed>::iterator found) {
    const Headed range = found->second;
    by_size_.erase({range.size, range.address});
    ranges_.erase(found);
    return range;
  }

  std::map<int64_t, Headed> ranges_;                // by address
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, address)
};

}  // namespace simulators
