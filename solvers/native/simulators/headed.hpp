// Free list of RMM's pool: adjacent ranges merge, unless the upper one is a head.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulators/holes.hpp"

namespace simulators {

// A head is the start of a range obtained elsewhere in one piece, and never merges with the range below.
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

  // Adds all ranges of another list, which is empty afterwards. Moves the ranges of the shorter list.
  void add(HeadedList&& other) {
    if (ranges_.size() < other.ranges_.size()) std::swap(*this, other);
    for (const auto& [address, range] : other.ranges_) add(range);
    other = HeadedList();
  }

  // Removes the smallest range of at least `size` bytes, the lowest of equal ones; returns size 0 if none exists.
  Headed take(int64_t size) {
    const auto found = by_size_.lower_bound({size, 0});
    return found == by_size_.end() ? Headed{0, 0, false} : take(ranges_.find(found->second));
  }

  // Returns the bytes of the largest range, 0 if none exists.
  int64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

  // Removes exactly this range; false if it is not free, or part of a larger free range.
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

// Free lists of the streams, numbered in order of first appearance, with an index of their largest ranges.
class HeadedLists {
 public:
  static constexpr size_t none = ~size_t{0};

  size_t of(int64_t stream) {
    const auto [found, is_new] = numbers_.try_emplace(stream, lists_.size());
    if (is_new) lists_.emplace_back();
    return found->second;
  }

  void add(size_t list, Headed range) {
    lists_[list].add(range);
    tell(list);
  }

  // See HeadedList::take().
  Headed take(size_t list, int64_t size) {
    if (lists_[list].told < size) return {0, 0, false};
    const Headed range = lists_[list].take(size);
    tell(list);
    return range;
  }

  bool take(size_t list, int64_t address, int64_t size) {
    const bool taken = lists_[list].take(address, size);
    tell(list);
    return taken;
  }

  // Returns the first list with a range of at least `size` bytes; with size 1, the first list that is not empty.
  size_t first(int64_t size) const {
    const int64_t found = largest_.lowest(size);
    return found < 0 ? none : static_cast<size_t>(found);
  }

  // Returns the next list after this one that is not empty.
  size_t next(size_t list) const {
    const auto found = filled_.upper_bound(list);
    return found == filled_.end() ? none : *found;
  }

  // Moves all ranges of list `other` to `list`.
  void merge(size_t list, size_t other) {
    lists_[list].add(std::move(lists_[other]));
    tell(list);
    tell(other);
  }

 private:
  struct List : HeadedList {
    int64_t told = 0;  // largest range, as recorded in largest_
  };

  void tell(size_t list) {
    List& one = lists_[list];
    const int64_t largest = one.largest(), number = static_cast<int64_t>(list);
    if (largest == one.told) return;
    if (one.told > 0) largest_.take(number, one.told);
    else filled_.insert(list);
    if (largest > 0) largest_.add_apart(number, largest);
    else filled_.erase(list);
    one.told = largest;
  }

  std::vector<List> lists_;
  std::unordered_map<int64_t, size_t> numbers_;  // by stream
  Holes largest_{false};                         // by list number: a hole as large as the largest range of the list
  std::set<size_t> filled_;
};

}  // namespace simulators
