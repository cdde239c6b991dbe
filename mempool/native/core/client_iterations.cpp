// Marks and boundaries: where iterations begin, which pattern they follow, and how closely.
#include <time.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/client.hpp"
#include "devices/hosted_memory.hpp"

namespace mempool {
namespace {

constexpr std::size_t kMostPinned = 256;
constexpr std::size_t kFewEvents = 64;  // in a shorter recording, every mark deserves a look
// iterations during which a buffer blocks a slot before counting as long-lived
constexpr std::uint64_t kPatience = 2;
constexpr std::uint64_t kMostMissScore = 24;  // low, so that the score soon returns to 0
// clean iterations before which the planner never stops recording
constexpr std::uint64_t kCleanIterations = 32;

}  // namespace

std::uint64_t Client::large_allocations() const noexcept {
  return std::accumulate(stats_.outcomes.begin(), stats_.outcomes.end(), std::uint64_t{0});
}

std::uint64_t Client::misses() const noexcept {
  std::uint64_t misses = 0;
  for (std::size_t i = 0; i < stats_.outcomes.size(); ++i) {
    if (is_miss(static_cast<Outcome>(i))) misses += stats_.outcomes[i];
  }
  return misses;
}

std::uint64_t Client::unplanned_bytes(std::uint64_t bytes) noexcept {
  const ThreadCache& cache = ThreadCache::mine();
  const Guarded guard(pool_->lock);
  if (!replaying_ || bypass_.active || outside() || cache.client != caches_) return bytes;
  std::uint64_t left = bytes;
  for (std::uint32_t ahead = 0; left != 0; ++ahead) {
    const Follower::Next next = cache.sequence->follower.next_due(ahead);
    if (next.slot == nullptr || next.size > left) break;
    if (next.slot->offset == kDynamic || !pool_->is_slot_free(*next.slot, next.size)) return bytes;
    left -= next.size;
  }
  return left;
}

// Let the latest plan take effect and restart the hit statistics, kept as a difference so that a hit updates
// only one counter.
void Client::begin_latest() noexcept {
  coming_ = nullptr;
  latest_at_ = iterations_ + 1;
  clean_ = longest_clean_ = miss_score_ = 0;
  idle_backoff_.start_over();
  idle_backoff_.wait(iterations_);
  bypass_backoff_.start_over();
  before_latest_ = stats_.outcomes;
  misses_before_ = 0;
  results_.planned.clear();
  divergences_.clear();  // of another plan
}

// Check at a boundary whether the last installed pattern is followed from here on. If a shorter pattern ended
// in the middle of an iteration, the live buffers are still in the old slots, and the new pattern takes
// effect with the next iteration.
void Client::begin_latest_if_followed() noexcept {
  if (coming_ == nullptr || !replaying_) return;
  for (const Sequence& sequence : sequences_) {
    const Follower& one = sequence.follower;
    if (one.pattern() == coming_ && one.position() <= 1) return begin_latest();
  }
}

std::uint64_t Client::latest_misses() const noexcept {
  std::uint64_t misses = 0;
  for (std::size_t i = 0; i < stats_.outcomes.size(); ++i) {
    if (is_miss(static_cast<Outcome>(i))) misses += stats_.outcomes[i] - before_latest_[i];
  }
  return misses;
}

// Return true if a longer period is unlikely. A difference at every hundredth iteration belongs to a period of a
// hundred, and shows only after several occurrences. A sequence that has left the pattern reaches no boundary, hence
// the comparison of misses.
bool Client::settled() const noexcept {
  return clean_ >= std::max(kCleanIterations, 4 * longest_clean_) && latest_misses() == misses_before_;
}

void Client::judge_iteration() noexcept {
  const std::uint64_t misses = latest_misses();
  if (replaying_) {
    const bool clean = misses == misses_before_;
    if (!clean) longest_clean_ = std::max(longest_clean_, clean_);
    clean_ = clean ? clean_ + 1 : 0;
    // One iteration in six may always miss a little (a log, a checkpoint); more misses indicate a change.
    if (!clean) miss_score_ = std::min(miss_score_ + 6, kMostMissScore);
    if (clean && miss_score_ > 0) --miss_score_;
    if (ring_.on() ? settled() && clean_ % kCleanIterations == 0 : !clean) signal_work();
  }
  misses_before_ = misses;
}

void Client::ignore_time() noexcept {
  const Guarded guard(pool_->lock);
  if (marked_by_ == &ThreadCache::mine()) marked_by_ = nullptr;
}

// Return the processor seconds of this thread since its last mark, or wall-clock seconds if a device works for the
// thread; 0 if another thread set the last mark, or the planner has worked in this thread since.
double Client::seconds_since_mark() noexcept {
  timespec time{};
  clock_gettime(pool_->source().traits().slow_return ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &time);
  const double now = static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  const double before = std::exchange(marked_at_, now);
  const void* const thread = &ThreadCache::mine();
  return std::exchange(marked_by_, thread) == thread ? now - before : 0;
}

// Keep the result of the iteration that ends, and wake the planner if the result may end the plans.
void Client::keep_result() noexcept {
  const std::uint64_t hits = stats_.outcomes[static_cast<std::size_t>(Outcome::hit)], missed = misses();
  const IterationResult result{hits - std::exchange(hits_before_, hits), missed - std::exchange(all_misses_before_, missed),
                               std::exchange(iteration_seconds_, 0.0)};
  if (!replaying_) return results_.unplanned.add(result);
  results_.planned.add(result);
  if (!results_.planned.deserve_a_look()) return;
  woken_ = true;
  wake_signal_.ring();
}

Client::Results Client::results() {
  const Guarded guard(pool_->lock);
  return results_;
}

void Client::note_pinned(const Occupancy::Range& range) noexcept {
  for (Pinned& pinned : pinned_) {
    if (pinned.range.begin != range.begin || pinned.range.end != range.end) continue;
    pinned.last = iterations_;
    return;
  }
  if (range.end == 0 || pinned_.size() == kMostPinned) return;
  try {
    pinned_.push_back({range, iterations_, iterations_});
  } catch (...) {  // the range will block the slot again
  }
}

// At a boundary, forget the blocking ranges that have ended, since they were only freed late.
void Client::forget_freed_pinned() noexcept {
  const Occupancy& occupancy = pool_->occupancy();
  const auto over = [&](const Pinned& pinned) { return occupancy.end_at(pinned.range.begin) != pinned.range.end; };
  pinned_.erase(std::remove_if(pinned_.begin(), pinned_.end(), over), pinned_.end());
}

std::vector<std::pair<Offset, Offset>> Client::pinned_ranges() {
  const Guarded guard(pool_->lock);
  return lasting_pinned();
}

std::vector<std::pair<Offset, Offset>> Client::lasting_pinned() const {
  std::vector<std::pair<Offset, Offset>> ranges;
  bool any = false;
  for (const Pinned& pinned : pinned_) {
    if (pinned.last - pinned.first < kPatience) continue;
    any = any || pinned.last + kPatience > iterations_;
    ranges.emplace_back(pinned.range.begin, pinned.range.end);
  }
  return any ? ranges : std::vector<std::pair<Offset, Offset>>();
}

void Client::boundary(Pattern* ended) noexcept {
  judge_iteration();
  keep_result();
  ++iterations_;
  taken_outside_arena_ = 0;
  if (HostedMemory* const hosted = pool_->source().device().hosted()) hosted->begin_iteration();
  bypass_ = {};
  if (ended != nullptr) {
    // A warm-up is always followed by the steady pattern.
    if (ended_ != nullptr && ended_->cyclic && ended->cyclic) ended_->next = ended;
    ended_ = ended;
    if (ended->cyclic) {
      history_of_patterns_.add(ended);
      if (Pattern* const next = history_of_patterns_.next()) ended->next = next;
    }
    ++ended->iterations;
    ended->last_used = iterations_;
  }
  if (!pinned_.empty()) forget_freed_pinned();
  pool_->end_drain_unless_needed();
  if (!defer_growth_to_low_water()) have_arena();
  begin_latest_if_followed();
  // Without a plan the needs of the next iteration are unknown.
  if (!replaying_) return;
  pool_->return_idle_after(*this);
  if (idle_backoff_.is_due(iterations_)) release_idle_outside_arena();
}

// Release memory outside the arena that was idle since the last call.
void Client::release_idle_outside_arena() noexcept {
  pool_->release_idle_outside_arena() ? idle_backoff_.done(iterations_) : idle_backoff_.wait(iterations_);
}

void Client::begin_everywhere(std::uint64_t mark) noexcept {
  Pattern* const ended = ended_;
  const bool warming = current_ != nullptr && !current_->cyclic && mark < current_->tables.front().marks.size();
  if (!warming && ended != nullptr) current_ = ended->next != nullptr ? ended->next : ended;
  if (!warming && ended == nullptr && current_ != nullptr && !current_->cyclic) current_ = current_->next;
  // true during the first iteration, in which the optimizer's state is allocated
  warmup_only_ = warmup_only_ && mark == 0;
  if (current_ == nullptr && !known_.empty() && !warmup_only_) current_ = known_.front();
  ++turn_;
  for (Sequence& sequence : sequences_) begin(sequence, mark);
  begin_latest_if_followed();
}

// Return the pattern of the sequence that is furthest in the iteration; null if no sequence has begun one.
Pattern* Client::followed() const noexcept {
  const Follower* furthest = nullptr;
  for (const Sequence& sequence : sequences_) {
    const Follower& one = sequence.follower;
    if (one.pattern() == nullptr || one.position() == 0) continue;
    if (furthest == nullptr || one.position() > furthest->position()) furthest = &one;
  }
  return furthest == nullptr ? nullptr : furthest->pattern();
}

void Client::record_detected_step() {
  const Guarded guard(pool_->lock);
  if (trace_.on()) trace_.add(RecordedEvent::found, 0, 0, 0, sequence(0).follower.sequence());
}

void Client::mark(Mark kind, bool found) {
  const Guarded guard(pool_->lock);
  flight::note(flight::mark, uid_, 0, kind, found);
  Sequence& mine = sequence(0);
  const RecordedEvent::Kind event = kind == Mark::step    ? RecordedEvent::step
                                    : kind == Mark::begin ? RecordedEvent::begin
                                                          : RecordedEvent::end;
  if (trace_.on()) trace_.add(found ? RecordedEvent::found : event, 0, 0, 0, mine.follower.sequence());
  pool_->collect();
  marked_ = true;
  between_ = kind == Mark::end;
  if (ring_.on()) ring_.add(event, 0, 0, 0, mine.follower.sequence());
  if (kind != Mark::end) {
    iteration_seconds_ = seconds_since_mark();
    boundary(followed());
    begin_everywhere(marks_++);
  }
  const bool first = ring_.kept() < kFewEvents;
  if (ring_.on() && kind != Mark::begin && (first || ring_.seen() >= check_at_)) signal_work();
}

Offset Client::planned_offset_of(Address address) noexcept {
  const Guarded guard(pool_->lock);
  return pool_->planned_offset_of(address);
}

void Client::allocate_next_at(Offset place) noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::next_at, uid_, 0, place);
  next_offset_ = place;
}

void Client::enter_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::enter_dynamic, uid_, 0);
  ++dynamic_;
}

void Client::leave_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::leave_dynamic, uid_, 0);
  if (dynamic_ != 0 && --dynamic_ == 0) next_offset_ = kDynamic;
}

}  // namespace mempool
