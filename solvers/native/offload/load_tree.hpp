// Bytes on the device during each operation of a step: adds bytes to a range of operations, and finds the
// first or last operation over a level.
//
// A segment tree of maxima. Operations may count on into the next turn: operation k, of k operations, is
// operation 0 again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace offload {

class LoadTree {
 public:
  explicit LoadTree(const std::vector<int64_t>& load) : k_(static_cast<int64_t>(load.size())) {
    while (leaves_ < k_) leaves_ *= 2;
    maximum_.assign(2 * leaves_, kNone), added_.assign(2 * leaves_, 0);
    std::copy(load.begin(), load.end(), maximum_.begin() + leaves_);
    for (int64_t node = leaves_ - 1; node > 0; --node) maximum_[node] = std::max(maximum_[2 * node], maximum_[2 * node + 1]);
  }

  void add(int64_t from, int64_t to, int64_t bytes) {
    parts(from, to, [&](int64_t a, int64_t b) { add(1, 0, leaves_, a, b, bytes); });
  }

  // The first operation in [from, to) with more than `level` bytes, or `to`.
  int64_t first_over(int64_t from, int64_t to, int64_t level) const {
    if (from >= to) return to;
    const int64_t turn = from < k_ ? 0 : k_;
    const int64_t found = first(1, 0, leaves_, from - turn, std::min(to - turn, k_), level);
    if (found >= 0) return found + turn;
    if (to - turn <= k_) return to;
    const int64_t next = first(1, 0, leaves_, 0, to - turn - k_, level);
    return next < 0 ? to : next + turn + k_;
  }

  // The last operation in [from, to) with more than `level` bytes, or `from` - 1.
  int64_t last_over(int64_t from, int64_t to, int64_t level) const {
    if (from >= to) return from - 1;
    const int64_t turn = from < k_ ? 0 : k_;
    if (to - turn > k_) {
      const int64_t found = last(1, 0, leaves_, 0, to - turn - k_, level);
      if (found >= 0) return found + turn + k_;
    }
    const int64_t found = last(1, 0, leaves_, from - turn, std::min(to - turn, k_), level);
    return found < 0 ? from - 1 : found + turn;
  }

 private:
  static constexpr int64_t kNone = INT64_MIN / 2;

  template <class Visit>
  void parts(int64_t from, int64_t to, Visit visit) const {
    if (from >= to) return;
    if (from >= k_) from -= k_, to -= k_;
    visit(from, std::min(to, k_));
    if (to > k_) visit(0, to - k_);
  }

  void add(int64_t node, int64_t low, int64_t high, int64_t from, int64_t to, int64_t bytes) {
    if (from <= low && high <= to) {
      maximum_[node] += bytes, added_[node] += bytes;
      return;
    }
    const int64_t middle = (low + high) / 2;
    if (from < middle) add(2 * node, low, middle, from, to, bytes);
    if (to > middle) add(2 * node + 1, middle, high, from, to, bytes);
    maximum_[node] = std::max(maximum_[2 * node], maximum_[2 * node + 1]) + added_[node];
  }

  int64_t first(int64_t node, int64_t low, int64_t high, int64_t from, int64_t to, int64_t level) const {
    if (maximum_[node] <= level || to <= low || high <= from) return -1;
    if (high - low == 1) return low;
    const int64_t middle = (low + high) / 2, left = first(2 * node, low, middle, from, to, level - added_[node]);
    return left >= 0 ? left : first(2 * node + 1, middle, high, from, to, level - added_[node]);
  }

  int64_t last(int64_t node, int64_t low, int64_t high, int64_t from, int64_t to, int64_t level) const {
    if (maximum_[node] <= level || to <= low || high <= from) return -1;
    if (high - low == 1) return low;
    const int64_t middle = (low + high) / 2, right = last(2 * node + 1, middle, high, from, to, level - added_[node]);
    return right >= 0 ? right : last(2 * node, low, middle, from, to, level - added_[node]);
  }

  int64_t k_, leaves_ = 1;
  std::vector<int64_t> maximum_, added_;  // per node: the maximum, and the bytes added to all its operations
};

}  // namespace offload
