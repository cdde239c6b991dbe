// Results of the latest iterations, from which the planner judges the benefit of plans.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mempool {

struct IterationResult {
  std::uint64_t hits = 0, misses = 0;
  double seconds = 0;  // between two marks of one thread; 0: unknown
};

class IterationResults {
 public:
  // Iterations whose times count: so many that other work on the machine does not slow all of them. With 8 iterations,
  // the load of two other processes led to the withdrawal of a plan with steps of 1 ms.
  static constexpr std::size_t kKept = 64;
  static constexpr std::size_t kJudged = 4;     // iterations whose hits count
  // iterations before the planner judges hits: another variant may still get a plan, and the arena's pages must be
  // touched
  static constexpr std::size_t kLearning = 16;
  static constexpr double kLeastHitRate = 0.6;  // below, search and misses cost more than the hits save

  void add(const IterationResult& result) noexcept { kept_[count_++ % kKept] = result; }
  void clear() noexcept { count_ = 0; }
  std::size_t size() const noexcept { return count_ < kKept ? count_ : kKept; }
  // Return a kept result; 0: the latest.
  const IterationResult& latest(std::size_t number) const noexcept { return kept_[(count_ - 1 - number) % kKept]; }
  double hit_rate() const noexcept {  // of the last kJudged iterations; 1 with fewer results or without requests
    if (count_ < kJudged) return 1;
    double hits = 0, misses = 0;
    for (std::size_t i = 0; i < kJudged; ++i) {
      hits += static_cast<double>(latest(i).hits);
      misses += static_cast<double>(latest(i).misses);
    }
    return hits + misses == 0 ? 1 : hits / (hits + misses);
  }
  // Return true if the planner should judge the plans now: enough times are known for the first time, or hits are few.
  bool deserve_a_look() const noexcept {
    return count_ == kKept || (count_ % kJudged == 0 && hit_rate() < kLeastHitRate);
  }

 private:
  std::array<IterationResult, kKept> kept_{};
  std::size_t count_ = 0;
};

}  // namespace mempool
