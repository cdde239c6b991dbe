// Prediction of the next pattern from the history of patterns: the pattern that followed the longest earlier
// match of the latest history. Epochs of several iteration variants (A A A B, or two networks in turn) are
// thus predicted once they have been seen.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/pattern.hpp"

namespace mempool {

class PatternHistory {
 public:
  void add(Pattern* ended) noexcept {
    if (count_ == past_.size()) {
      std::copy(past_.begin() + kForgotten, past_.end(), past_.begin());
      count_ -= kForgotten;
    }
    past_[count_++] = ended;
  }
  // Null: the last pattern has not occurred before.
  Pattern* next() const noexcept {
    Pattern* foretold = nullptr;
    std::size_t longest = 0;
    // past_[i] followed the history that ends at i - 1
    for (std::size_t i = count_; i-- > 1 && longest < kMostAlike;) {
      std::size_t alike = 0;
      while (alike < i && alike < kMostAlike && past_[i - 1 - alike] == past_[count_ - 1 - alike]) ++alike;
      if (alike <= longest) continue;
      longest = alike;
      foretold = past_[i];
    }
    return foretold;
  }
  void replace(const Pattern* old, Pattern* fresh) noexcept {
    std::replace(past_.begin(), past_.begin() + static_cast<std::ptrdiff_t>(count_), const_cast<Pattern*>(old), fresh);
  }
  void forget(const Pattern* pattern) noexcept {
    const auto end = std::remove(past_.begin(), past_.begin() + static_cast<std::ptrdiff_t>(count_), pattern);
    count_ = static_cast<std::size_t>(end - past_.begin());
  }
  void clear() noexcept { count_ = 0; }

 private:
  static constexpr std::size_t kMostAlike = 16, kForgotten = 32;
  std::array<Pattern*, 96> past_{};  // oldest first
  std::size_t count_ = 0;
};

}  // namespace mempool
