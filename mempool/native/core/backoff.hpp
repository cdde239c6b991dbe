// Exponential backoff for actions that are repeated or fail.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mempool {

// Counts in iterations or boundaries, as the user chooses.
class ExponentialBackoff {
 public:
  // The pause is `shortest` after the first time and doubles after each further time, up to `longest`.
  constexpr ExponentialBackoff(std::uint64_t shortest, std::uint64_t longest) noexcept
      : shortest_(shortest), longest_(longest), pause_(shortest) {}

  bool is_due(std::uint64_t now) const noexcept { return now >= at_; }
  void done(std::uint64_t now) noexcept { done(now, longest_); }
  // Start a pause of at most `longest`.
  void done(std::uint64_t now, std::uint64_t longest) noexcept {
    pause_ = std::min(pause_, longest);
    wait(now);
    pause_ = std::min(2 * pause_, longest);
  }
  // Repeat a pause of the present length.
  void wait(std::uint64_t now) noexcept { at_ = now + pause_; }
  void make_due(std::uint64_t at = 0) noexcept { at_ = at; }
  // Reset, as if the action had never been done.
  void start_over() noexcept { pause_ = shortest_, at_ = 0; }

 private:
  std::uint64_t shortest_, longest_;
  std::uint64_t pause_;   // the pause after the next time
  std::uint64_t at_ = 0;  // not due before this time
};

}  // namespace mempool
