// What is done when it is called for, then ever more rarely, as where it is called for without end or in vain.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mempool {

// In iterations or boundaries, whichever its user counts.
class Rarely {
 public:
  // After the first time so many pass before the next, twice as many after each, and never more than `longest`.
  constexpr Rarely(std::uint64_t shortest, std::uint64_t longest) noexcept
      : shortest_(shortest), longest_(longest), pause_(shortest) {}

  bool is_due(std::uint64_t now) const noexcept { return now >= at_; }
  void done(std::uint64_t now) noexcept { done(now, longest_); }
  // By what it came to, it is worth while again after `longest` at the latest.
  void done(std::uint64_t now, std::uint64_t longest) noexcept {
    pause_ = std::min(pause_, longest);
    wait(now);
    pause_ = std::min(2 * pause_, longest);
  }
  // As long as after the last time.
  void wait(std::uint64_t now) noexcept { at_ = now + pause_; }
  void make_due(std::uint64_t at = 0) noexcept { at_ = at; }
  // As if it had never been done.
  void start_over() noexcept { pause_ = shortest_, at_ = 0; }

 private:
  std::uint64_t shortest_, longest_;
  std::uint64_t pause_;   // after the next time
  std::uint64_t at_ = 0;  // not before this
};

}  // namespace mempool
