// Free list of RMM's pool: adjacent ranges merge, unless the upper one is a head.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

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

// Free lists of the streams, numbered in order of first appearance.
class HeadedLists {
 public:
  static constexpr size_t none = ~size_t{0};

  size_t of(int64_t stream) {
    const auto [found, is_new] = numbers_.try_emplace(stream, lists_.size());
    if (is_new) lists_.emplace_back();
    return found->second;
  }

  size_t count() const { return lists_.size(); }
  void add(size_t list, Headed range) { lists_[list].add(range); }

  // See HeadedList::take().
  Headed take(size_t list, int64_t size) { return lists_[list].take(size); }
  bool take(size_t list, int64_t address, int64_t size) { return lists_[list].take(address, size); }

  // Returns the first list with a range of at least `size` bytes.
  size_t first(int64_t size) const {
    for (size_t list = 0; list < lists_.size(); ++list)
      if (lists_[list].largest() >= size) return list;
    return none;
  }

  // Moves all ranges of list `other` to `list`.
  void merge(size_t list, size_t other) { lists_[list].add(std::move(lists_[other])); }

 private:
  std::vector<HeadedList> lists_;
  std::unordered_map<int64_t, size_t> numbers_;  // by stream
};

}  // namespace simulators
