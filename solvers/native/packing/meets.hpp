// The relation "meets": which jobs overlap in time, and the maximal sets in which any two jobs do.
#pragma once

#include "packing/jobs.hpp"

namespace packing {

class Meets {
 public:
  using Set = std::vector<uint64_t>;  // a bit for each job

  explicit Meets(const Jobs& jobs) : words_((static_cast<size_t>(jobs.count()) + 63) / 64) {
    const int32_t n = jobs.count();
    with_.assign(n, Set(words_, 0));
    for (int32_t a = 0; a < n; ++a)
      for (int32_t b = 0; b < a; ++b)
        if (meet(jobs, a, b)) put(with_[a], b), put(with_[b], a);
  }

  bool operator()(int32_t a, int32_t b) const { return has(with_[a], b); }

  // Calls take(set) for each maximal set of jobs that meet in pairs (Bron and Kerbosch, 1973, with the pivot
  // of Tomita and others, 2006), as long as spend() allows one more step.
  template <class Take, class Spend>
  void largest(Take take, Spend spend) const {
    Set all(words_, 0);
    for (int32_t j = 0; j < static_cast<int32_t>(with_.size()); ++j) put(all, j);
    std::vector<int32_t> chosen;
    extend(chosen, all, Set(words_, 0), take, spend);
  }

 private:
  static bool has(const Set& set, int32_t job) { return set[job / 64] >> (job % 64) & 1; }
  static void put(Set& set, int32_t job) { set[job / 64] |= uint64_t{1} << (job % 64); }
  static void drop(Set& set, int32_t job) { set[job / 64] &= ~(uint64_t{1} << (job % 64)); }
  static bool none(const Set& set) {
    return std::all_of(set.begin(), set.end(), [](uint64_t word) { return word == 0; });
  }

  static bool meet(const Jobs& jobs, int32_t a, int32_t b) {
    int32_t k = jobs.first[a], l = jobs.first[b];
    while (k < jobs.first[a + 1] && l < jobs.first[b + 1]) {
      const Piece &x = jobs.pieces[k], &y = jobs.pieces[l];
      if (x.start < y.end && y.start < x.end) return true;
      ++(x.end < y.end ? k : l);
    }
    return false;
  }

  Set both(const Set& a, const Set& b) const {
    Set result(words_);
    for (size_t w = 0; w < words_; ++w) result[w] = a[w] & b[w];
    return result;
  }

  static int64_t size_of(uint64_t word) {
    int64_t count = 0;
    for (; word != 0; word &= word - 1) ++count;
    return count;
  }

  template <class Take, class Spend>
  void extend(std::vector<int32_t>& chosen, Set open, Set closed, Take& take, Spend& spend) const {
    if (!spend()) return;
    if (none(open) && none(closed)) return take(chosen);
    const auto n = static_cast<int32_t>(with_.size());
    int32_t pivot = -1;
    int64_t fewest = n + 1;
    for (int32_t v = 0; v < n; ++v) {
      if (!has(open, v) && !has(closed, v)) continue;
      int64_t left = 0;
      for (size_t w = 0; w < words_; ++w) left += size_of(open[w] & ~with_[v][w]);
      if (left < fewest) fewest = left, pivot = v;
    }
    for (int32_t v = 0; v < n; ++v) {
      if (!has(open, v) || has(with_[pivot], v)) continue;
      chosen.push_back(v);
      extend(chosen, both(open, with_[v]), both(closed, with_[v]), take, spend);
      chosen.pop_back();
      drop(open, v), put(closed, v);
    }
  }

  size_t words_;
  std::vector<Set> with_;
};

}  // namespace packing
