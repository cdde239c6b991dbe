// Free ranges of addresses, kept in a treap by address (Seidel and Aragon, 1996). Each node knows the largest range of
// its subtree, so that finding the lowest sufficient range takes O(log n) steps, as do all other operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "packing/random.hpp"

namespace simulators {

class Holes {
 public:
  // Without `by_size`, smallest() is unavailable, and all operations take half the time.
  explicit Holes(bool by_size = true) : knows_sizes_(by_size) {}

  // Adds a free range, merged with adjacent ones. The range must overlap no hole.
  void add(int64_t address, int64_t size) {
    const Range left = before(address), right = from(address);
    const bool joins_left = left.size > 0 && left.address + left.size == address;
    const bool joins_right = right.size > 0 && right.address == address + size;
    if (joins_right) forget(right.address, right.size), size += right.size;
    if (joins_left) change(left, {left.address, left.size + size});
    else insert({address, size});
  }

  // Adds a free range without merging adjacent ones.
  void add_apart(int64_t address, int64_t size) { insert({address, size}); }

  // Removes a range, which must lie within one hole.
  void take(int64_t address, int64_t size) {
    const Range hole = before(address + 1);
    const int64_t below = address - hole.address, above = hole.size - below - size;
    if (below > 0) change(hole, {hole.address, below});
    else if (above > 0) change(hole, {address + size, above});
    else forget(hole.address, hole.size);
    if (below > 0 && above > 0) insert({address + size, above});
  }

  // Returns the address of the lowest hole of at least `size` bytes, -1 if none exists.
  int64_t lowest(int64_t size) const {
    int32_t at = root_;
    if (largest(at) < size) return -1;
    while (true) {
      const Node& node = nodes_[at];
      if (largest(node.left) >= size) at = node.left;
      else if (node.range.size >= size) return node.range.address;
      else at = node.right;
    }
  }

  // Returns the address of the smallest hole of at least `size` bytes, the lowest of equal ones; -1 if none exists.
  int64_t smallest(int64_t size) const {
    const auto found = by_size_.lower_bound({size, 0});
    return found == by_size_.end() ? -1 : found->second;
  }

  // Returns the bytes of the largest hole, 0 if none exists.
  int64_t largest() const { return root_ < 0 ? 0 : nodes_[root_].largest; }

  // Returns the bytes of the hole that ends at an address, 0 if none does.
  int64_t ending_at(int64_t address) const {
    const Range left = before(address);
    return left.size > 0 && left.address + left.size == address ? left.size : 0;
  }

 private:
  struct Range {
    int64_t address, size;
  };
  struct Node {
    Range range;
    int64_t largest;  // of the subtree
    uint64_t priority;  // at most the parent's
    int32_t left, right;
  };

  int64_t largest(int32_t at) const { return at < 0 ? -1 : nodes_[at].largest; }

  void pull(int32_t at) {
    Node& node = nodes_[at];
    node.largest = std::max({node.range.size, largest(node.left), largest(node.right)});
  }

  // Returns the hole of the highest address below `address`; size 0 if none exists.
  Range before(int64_t address) const {
    Range found{0, 0};
    for (int32_t at = root_; at >= 0;) {
      const Node& node = nodes_[at];
      if (node.range.address < address) found = node.range, at = node.right;
      else at = node.left;
    }
    return found;
  }

  // Returns the hole of the lowest address not below `address`.
  Range from(int64_t address) const {
    Range found{0, 0};
    for (int32_t at = root_; at >= 0;) {
      const Node& node = nodes_[at];
      if (node.range.address >= address) found = node.range, at = node.left;
      else at = node.right;
    }
    return found;
  }

  // Replaces a range by one with the same neighbours.
  void change(Range old, Range now) {
    forget_size(old);
    keep_size(now);
    path_.clear();
    int32_t at = root_;
    while (nodes_[at].range.address != old.address) {
      path_.push_back(at);
      at = old.address < nodes_[at].range.address ? nodes_[at].left : nodes_[at].right;
    }
    nodes_[at].range = now;
    pull(at);
    for (size_t k = path_.size(); k-- > 0;) pull(path_[k]);
  }

  void keep_size(Range range) {
    if (knows_sizes_) by_size_.insert({range.size, range.address});
  }

  void forget_size(Range range) {
    if (knows_sizes_) by_size_.erase({range.size, range.address});
  }

  void insert(Range range) {
    keep_size(range);
    int32_t made;
    if (unused_.empty()) made = static_cast<int32_t>(nodes_.size()), nodes_.emplace_back();
    else made = unused_.back(), unused_.pop_back();
    nodes_[made] = {range, range.size, random_.next(), -1, -1};
    const auto [low, high] = split(root_, range.address);
    root_ = join(join(low, made), high);
  }

  void forget(int64_t address, int64_t size) {
    forget_size({address, size});
    const auto [low, rest] = split(root_, address);
    const auto [gone, high] = split(rest, address + 1);
    unused_.push_back(gone);
    root_ = join(low, high);
  }

  // Splits a subtree into the nodes below an address and the others.
  std::pair<int32_t, int32_t> split(int32_t at, int64_t address) {
    if (at < 0) return {-1, -1};
    if (nodes_[at].range.address < address) {
      const auto [low, high] = split(nodes_[at].right, address);
      nodes_[at].right = low;
      pull(at);
      return {at, high};
    }
    const auto [low, high] = split(nodes_[at].left, address);
    nodes_[at].left = high;
    pull(at);
    return {low, at};
  }

  int32_t join(int32_t low, int32_t high) {
    if (low < 0 || high < 0) return std::max(low, high);
    if (nodes_[low].priority > nodes_[high].priority) {
      const int32_t right = join(nodes_[low].right, high);
      nodes_[low].right = right;
      pull(low);
      return low;
    }
    const int32_t left = join(low, nodes_[high].left);
    nodes_[high].left = left;
    pull(high);
    return high;
  }

  bool knows_sizes_;
  std::vector<Node> nodes_;
  std::vector<int32_t> unused_, path_;
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, address)
  packing::Random random_{0};
  int32_t root_ = -1;
};

}  // namespace simulators
