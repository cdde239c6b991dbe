// Vector clocks over the streams of the simulated world (Mattern, "Virtual Time and Global States of Distributed Systems",
// 1989): which of the work that was queued is over when something else begins, whatever order it happened to run in.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace world {

inline constexpr std::size_t kStreams = 4;

struct Clock {
  std::array<std::uint64_t, kStreams> at{};  // by stream: everything queued there up to this tick

  void join(const Clock& other) noexcept {
    for (std::size_t i = 0; i < kStreams; ++i) at[i] = std::max(at[i], other.at[i]);
  }
  // The first stream of whose work this knows more than the others together, or kStreams.
  std::size_t beyond(const Clock& one, const Clock& other) const noexcept {
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (at[i] > std::max(one.at[i], other.at[i])) return i;
    }
    return kStreams;
  }
};

}  // namespace world
