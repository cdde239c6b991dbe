// State machine of a client's recording: when the planner's ring records, and when a pause without recording ends.
//
//   idle --begin--> recording --settled, improvable, fruitless, failed--> backed off --resume--> recording
//
// The planner sends events; `kRecordingTransitions` determines the next state. While a plan is followed, a higher miss
// rate ends a pause. Unless the plan cannot be improved, a pause also ends after a number of allocations, which grows with
// each fruitless recording.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace mempool {

enum class RecordingState : std::uint8_t {
  idle,       // records when the program or the planner requests it
  recording,
  backed_off  // records again when the pause is over
};
enum class RecordingEvent : std::uint8_t {
  end,         // the client closes, or the process is a forked child
  begin,       // record from now on
  resume,      // the pause is over
  planned,     // a pattern was planned for the first time
  replanned,   // a known pattern was planned again
  settled,     // the program has long followed plans that cannot be improved
  improvable,  // as settled, with plans that may be improved later
  fruitless,   // recording has long shown nothing new; some allocations may never follow a plan
  failed,      // planning failed, or a plan was useless: do not record for some time, regardless of misses
  dropped      // no plan remains; a pause continues, since this is a single failure
};
inline constexpr std::array<const char*, 3> kRecordingStateNames = {"idle", "recording", "backed_off"};
inline constexpr std::array<const char*, 10> kRecordingEventNames = {
    "end", "begin", "resume", "planned", "replanned", "settled", "improvable", "fruitless", "failed", "dropped"};

// The state after each event, by the state before.
inline constexpr std::array<std::array<RecordingState, kRecordingEventNames.size()>, 3> kRecordingTransitions = [] {
  constexpr RecordingState idle = RecordingState::idle, on = RecordingState::recording, off = RecordingState::backed_off;
  return std::array<std::array<RecordingState, kRecordingEventNames.size()>, 3>{{
      // end   begin resume planned replanned settled improvable fruitless failed dropped
      {{idle,  on,   idle,  idle,   idle,     idle,   idle,      idle,     idle,  idle}},  // idle
      {{idle,  on,   on,    on,     on,       off,    off,       off,      off,   on}},    // recording
      {{idle,  on,   on,    off,    off,      off,    off,       off,      off,   off}},   // backed off
  }};
}();

// Tunables of the pauses.
struct RecordingOptions {
  double ignored_miss_rate = 1.0 / 1000;  // miss rate that never justifies recording again
  std::uint64_t changed_score = 12;       // score of misses at which a pattern counts as permanently changed
  // Smallest and largest pause, in allocations. A pause is four times the length of the recording before it, at least
  // four times the smallest, and doubles with each failure: short enough that a new pattern is planned soon, rare
  // enough to cost nothing.
  std::uint64_t min_pause = std::uint64_t{1} << 6, max_pause = std::uint64_t{1} << 22;
};
inline constexpr RecordingOptions kRecording;

class RecordingSchedule {
 public:
  // Counters of the client since the start, of requests above the small-size threshold.
  struct Counts {
    std::uint64_t allocations = 0, misses = 0;
  };

  RecordingState state() const noexcept { return state_; }
  // Return true if the state changed.
  bool apply(RecordingEvent event, const Counts& now, bool replaying) noexcept {
    const double share = miss_rate(now);
    switch (event) {
      case RecordingEvent::end: break;
      case RecordingEvent::begin:
      case RecordingEvent::resume:
        if (now.allocations < pause_until_) unimproved_ = 0;  // recording starts before the pause ends
        since_ = now;
        began_ = now.allocations;
        break;
      case RecordingEvent::planned: fruitless_ = 0; [[fallthrough]];
      case RecordingEvent::replanned: since_ = now; break;
      case RecordingEvent::settled:
      case RecordingEvent::improvable:
        pause(now, unimproved_++);
        fruitless_ = 0;
        if (event == RecordingEvent::settled) pause_until_ = kNever;
        most_share_ = kRecording.ignored_miss_rate;
        most_score_ = kRecording.changed_score;
        planned_ = true;
        break;
      case RecordingEvent::fruitless:
        pause(now, fruitless_++);
        if (!replaying || share >= 0.25) break;
        most_share_ = std::max(kRecording.ignored_miss_rate, 2 * share);
        planned_ = true;
        break;
      case RecordingEvent::failed: pause(now, fruitless_++); break;
      case RecordingEvent::dropped:
        if (state_ == RecordingState::recording || now.allocations >= pause_until_) pause(now, fruitless_++);
        endure_all();
        break;
    }
    const RecordingState before = state_;
    state_ = kRecordingTransitions[static_cast<std::size_t>(before)][static_cast<std::size_t>(event)];
    return state_ != before;
  }
  // Return true if the pause is over.
  bool is_due(const Counts& now, bool replaying, std::uint64_t miss_score) const noexcept {
    if (state_ != RecordingState::backed_off) return false;
    if (now.allocations >= pause_until_) return true;
    return replaying ? miss_score >= most_score_ || miss_rate(now) > most_share_ : planned_;
  }
  // Return the share of misses since recording last began or ended, or since the latest plan.
  double miss_rate(const Counts& now) const noexcept {
    const std::uint64_t passed = std::max<std::uint64_t>(now.allocations - since_.allocations, 1);
    return static_cast<double>(now.misses - since_.misses) / static_cast<double>(passed);
  }
  std::uint64_t began() const noexcept { return began_; }  // number of allocations when the last recording began

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  void endure_all() noexcept {
    most_share_ = std::numeric_limits<double>::infinity();
    most_score_ = kNever;
    planned_ = false;
  }
  void pause(const Counts& now, unsigned doublings) noexcept {
    const std::uint64_t recorded = std::clamp(now.allocations - began_, kRecording.min_pause, kRecording.max_pause);
    pause_until_ = now.allocations + std::min(recorded << std::min(2 + doublings, 24U), kRecording.max_pause);
    since_ = now;
    endure_all();
  }

  RecordingState state_ = RecordingState::idle;
  Counts since_;             // counters when recording began or ended, or when the latest plan was made
  std::uint64_t began_ = 0;
  unsigned fruitless_ = 0;   // consecutive fruitless recordings
  unsigned unimproved_ = 0;  // consecutive recordings that found no better plan than the followed one
  std::uint64_t pause_until_ = kNever;  // number of allocations at which the pause ends
  // share and score of misses that end the pause while a plan is in effect
  double most_share_ = std::numeric_limits<double>::infinity();
  std::uint64_t most_score_ = kNever;
  bool planned_ = false;     // the pause ends when no plan is in effect any more
};

}  // namespace mempool
