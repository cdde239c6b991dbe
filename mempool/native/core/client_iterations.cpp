// Marks and boundaries: where iterations begin, which pattern they follow, and how closely.
#include <algorithm>
#include <numeric>
#include <utility>

#include "core/client.hpp"

namespace mempool {
namespace {

constexpr std::size_t kMostBlockers = 256;
constexpr std::size_t kFewEvents = 64;  // in a shorter recording, every mark deserves a look
// iterations during which a buffer blocks a slot before counting as long-lived
constexpr std::uint64_t kPatience = 2;
// looks after memory was taken beside the arena, or after a plan took effect
constexpr unsigned kLooksBeside = 2;
constexpr std::uint64_t kMostSpoilt = 24;  // low enough that the score soon returns to zero
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

// Let the latest plan take effect and restart the hit statistics, kept as a difference so that a hit updates
// only one counter.
void Client::begin_latest() noexcept {
  coming_ = nullptr;
  latest_at_ = iterations_ + 1;
  clean_ = longest_clean_ = spoilt_ = 0;
  looks_beside_ = kLooksBeside;
  beside_.start_over();
  beside_.wait(iterations_);
  asides_.start_over();
  before_latest_ = stats_.outcomes;
  misses_before_ = 0;
  divergences_.clear();  // they belonged to another plan
}

// Check at a boundary whether the last installed pattern is followed from here on. If a shorter pattern ended
// in the middle of an iteration, the live buffers are still in the old slots, and the new pattern takes
// effect with the next iteration.
void Client::perhaps_in_effect() noexcept {
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

// Return true if no longer period is to be expected. A difference at every hundredth iteration belongs to a
// period of a hundred and shows after several occurrences. A sequence that has left the pattern reaches no
// boundary that would reveal the loss, hence the comparison of misses.
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
    if (!clean) spoilt_ = std::min(spoilt_ + 6, kMostSpoilt);
    if (clean && spoilt_ > 0) --spoilt_;
    if (ring_.on() ? settled() && clean_ % kCleanIterations == 0 : !clean) signal_work();
  }
  misses_before_ = misses;
}

void Client::note_blocker(const Occupancy::Range& range) noexcept {
  for (Blocker& blocker : blockers_) {
    if (blocker.range.begin != range.begin || blocker.range.end != range.end) continue;
    blocker.last = iterations_;
    return;
  }
  if (range.end == 0 || blockers_.size() == kMostBlockers) return;
  try {
    blockers_.push_back({range, iterations_, iterations_});
  } catch (...) {  // the range will block the slot again
  }
}

// Forget, at a boundary, the blocking ranges that have ended: they were freed late and will not stay.
void Client::watch_blockers() noexcept {
  const Occupancy& occupancy = pool_->occupancy();
  const auto over = [&](const Blocker& blocker) { return occupancy.end_at(blocker.range.begin) != blocker.range.end; };
  blockers_.erase(std::remove_if(blockers_.begin(), blockers_.end(), over), blockers_.end());
  for (const Blocker& blocker : blockers_) {
    if (blocker.first + kPatience <= iterations_) pool_->shut_holes();
  }
}

std::vector<std::pair<Offset, Offset>> Client::blockers() {
  const Guarded guard(pool_->lock);
  return lasting_blockers();
}

std::vector<std::pair<Offset, Offset>> Client::lasting_blockers() const {
  std::vector<std::pair<Offset, Offset>> ranges;
  bool any = false;
  for (const Blocker& blocker : blockers_) {
    if (blocker.last - blocker.first < kPatience) continue;
    any = any || blocker.last + kPatience > iterations_;
    ranges.emplace_back(blocker.range.begin, blocker.range.end);
  }
  return any ? ranges : std::vector<std::pair<Offset, Offset>>();
}

void Client::boundary(Pattern* ended) noexcept {
  judge_iteration();
  ++iterations_;
  if (taken_beside_ != 0 && looks_beside_ == 0) looks_beside_ = kLooksBeside, beside_.wait(iterations_);
  taken_beside_ = 0;
  aside_ = {};
  if (ended != nullptr) {
    // A warm-up is always followed by the steady pattern.
    if (ended_ != nullptr && ended_->cyclic && ended->cyclic) ended_->next = ended;
    ended_ = ended;
    if (ended->cyclic) {
      succession_.add(ended);
      if (Pattern* const next = succession_.next()) ended->next = next;
    }
    ++ended->iterations;
    ended->last_used = iterations_;
  }
  if (!blockers_.empty()) watch_blockers();
  pool_->vacate_no_more();
  if (!awaits_calm()) have_arena();
  perhaps_in_effect();
  // Without a plan the needs of the next iteration are unknown.
  if (!replaying_) return;
  pool_->return_idle_after(*this);
  if (looks_beside_ != 0 && beside_.is_due(iterations_)) look_beside();
}

// Release memory that was taken beside the arena for unplanned requests and is idle now. The first look only
// determines the memory that is idle from then on.
void Client::look_beside() noexcept {
  --looks_beside_;
  pool_->return_beside() ? beside_.done(iterations_) : beside_.wait(iterations_);
}

void Client::begin_everywhere(std::uint64_t mark) noexcept {
  Pattern* const ended = ended_;
  const bool warming = current_ != nullptr && !current_->cyclic && mark < current_->tables.front().marks.size();
  if (!warming && ended != nullptr) current_ = ended->next != nullptr ? ended->next : ended;
  if (!warming && ended == nullptr && current_ != nullptr && !current_->cyclic) current_ = current_->next;
  // true during the first iteration, in which the optimizer's state is allocated
  holds_back_ = holds_back_ && mark == 0;
  if (current_ == nullptr && !known_.empty() && !holds_back_) current_ = known_.front();
  ++turn_;
  for (Sequence& sequence : sequences_) begin(sequence, mark);
  perhaps_in_effect();
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

void Client::show_found() {
  const Guarded guard(pool_->lock);
  if (tape_.on()) tape_.add(RecordedEvent::found, 0, 0, 0, sequence(0).follower.sequence());
}

void Client::mark(Mark kind, bool found) {
  const Guarded guard(pool_->lock);
  Sequence& mine = sequence(0);
  const RecordedEvent::Kind event = kind == Mark::step    ? RecordedEvent::step
                                    : kind == Mark::begin ? RecordedEvent::begin
                                                          : RecordedEvent::end;
  if (tape_.on()) tape_.add(found ? RecordedEvent::found : event, 0, 0, 0, mine.follower.sequence());
  pool_->collect();
  marked_ = true;
  between_ = kind == Mark::end;
  if (ring_.on()) ring_.add(event, 0, 0, 0, mine.follower.sequence());
  if (kind != Mark::end) {
    boundary(followed());
    begin_everywhere(marks_++);
  }
  const bool first = ring_.kept() < kFewEvents;
  if (ring_.on() && kind != Mark::begin && (first || ring_.seen() >= check_at_)) signal_work();
}

Offset Client::place_of(Address address) noexcept {
  const Guarded guard(pool_->lock);
  return pool_->place_of(address);
}

void Client::place_next(Offset place) noexcept {
  const Guarded guard(pool_->lock);
  place_next_ = place;
}

void Client::enter_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  ++dynamic_;
}

void Client::leave_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  if (dynamic_ != 0 && --dynamic_ == 0) place_next_ = kDynamic;
}

}  // namespace mempool
