// The latest decisions about a client's plans and arena, for explanations: what was planned, evicted, followed
// or refused, and when. The planner adds its own decisions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace mempool {

enum class Decision : std::uint8_t {
  recording,   // requests are recorded from now on
  paused,      // recording paused after event `count` of recording_state.hpp
  stopped,     // recording ended
  period,      // a recurring iteration was found: `count` allocations, seen `times` times
  planned,     // a pattern was installed: `count` allocations, an arena of `bytes`
  replaced,    // the same for a pattern with the sizes of a known one
  jointly,     // `count` variants were planned together
  around,      // planned around `count` ranges that stay in the arena
  loaded,      // a pattern from a file was installed
  confirmed,   // the program follows a pattern from a file, which gets its arena
  set_aside,   // the program did not follow the patterns from the file
  superseded,  // a pattern was dropped, since another serves its requests
  evicted,     // a pattern was dropped as the least recently used
  withdrawn,  // unprofitable patterns were dropped
  forgotten,  // an unused pattern was dropped for lack of memory
  dropped,     // all patterns were dropped
  arena,       // event `count` of arena.hpp: the arena had or has `bytes`
  refused,     // no arena of `bytes`: refusal `count`
  outgrown     // the iteration exceeds the plan and bypasses it
};
inline constexpr std::array<const char*, 19> kDecisionNames = {
    "recording", "paused",     "stopped",
    "period",    "planned",    "replaced", "jointly",   "around",  "loaded",  "confirmed", "set_aside",
    "superseded", "evicted",   "withdrawn", "forgotten", "dropped",  "arena",   "refused", "outgrown"};

class DecisionLog {
 public:
  struct Entry {
    std::uint64_t iteration;
    Decision decision;
    std::uint64_t pattern, count, times, bytes;
  };
  static constexpr std::size_t kMost = 64;

  void add(const Entry& entry) noexcept {
    try {
      if (entries_.size() == kMost) entries_.pop_front();
      entries_.push_back(entry);
    } catch (...) {  // the explanation lacks a line
    }
  }
  const std::deque<Entry>& entries() const noexcept { return entries_; }

 private:
  std::deque<Entry> entries_;
};

}  // namespace mempool
