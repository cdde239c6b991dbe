// The arena that a client's patterns need: when to allocate or enlarge it, and when to release it for an iteration that
// outgrows the plan.
#include <algorithm>
#include <utility>

#include "core/client.hpp"

namespace mempool {
namespace {

// Longest backoff in iterations after a refused arena: because of live ranges, after a failed memory check, and after a
// failed allocation on the device.
constexpr std::uint64_t kLongestMoment = 4, kLongestLook = 64, kLongestPause = 1024;
// buffers larger than planned before an iteration counts as outgrown; few where they are served beside the arena
constexpr unsigned kSeveral = 6, kFewHosted = 2;
// largest (size - planned size) / planned size considered; envelopes reach down by the same factor
constexpr double kMostExcess = 7;
constexpr unsigned kBypassPatience = 256;  // allocations to wait for the live ranges found in the arena to end

}  // namespace

// Allocate or enlarge the arena for the patterns, at a boundary. If the arena is refused or stays smaller,
// the pool continues with the present arena and tries again some iterations later.
void Client::have_arena() noexcept {
  if (pool_->forked() || !pool_->source().device().bound()) return;
  if (known_.empty() || matches_awaited_ != 0) return;
  for (Pattern* pattern : known_) {
    if (!pattern->dormant || !in_use(pattern)) continue;
    pattern->dormant = false;
    layout_changed();
  }
  take_arena();
  if (pool_->arena_bytes() >= needed_bytes()) refusal_ = Refusal::none;
  const bool enough = has_arena_of_use();
  if (std::exchange(replaying_, enough) || !replaying_) return;
  if (active_at_ == 0) {
    active_at_ = iterations_ + 1;
    before_steady_ = stats_.outcomes;
  }
  begin_latest();
}

// Decide if the arena serves plans from now on. In front of another allocator the arena serves all patterns or none,
// since requests beyond a short arena would take as much memory again outside; only while it drains, for a larger arena
// to replace it, a short arena serves on. An arena that serves no pattern is released once empty.
bool Client::has_arena_of_use() noexcept {
  const std::size_t bytes = pool_->arena_bytes();
  if (pool_->source().device().hosted() == nullptr) return largest(bytes) != nullptr || (replaying_ && bytes != 0);
  if (bytes < needed_bytes()) pool_->shrink_arena(0);
  const bool drains = replaying_ && pool_->arena().state() == ArenaState::draining;
  return pool_->arena_bytes() != 0 && (drains || bytes >= needed_bytes());
}

std::uint32_t Client::matches_to_confirm(const Pattern& pattern) const noexcept {
  return std::clamp(pattern.tables.front().length() / 4, 1U, kWindow);
}

// Allocate the arena of a loaded plan once the required number of allocations has followed the plan, which may belong
// to another program, another model or other batches.
void Client::confirm_loaded(const Follower& follower, const Follower::Match& match) noexcept {
  if (match.slot == nullptr) {
    if (follower.pattern() != nullptr) matches_awaited_ = matches_to_confirm(*follower.pattern());
    return;
  }
  if (matches_awaited_ > 1) --matches_awaited_;
  if (matches_awaited_ > 1 || match.slot->offset == kDynamic) return;
  matches_awaited_ = 0;
  decide(Decision::confirmed, follower.pattern()->id);
  have_arena();
}

// Decide at a boundary whether growing the arena waits for this iteration's low-water mark. Buffers live at
// the low-water mark have no slots in the new arena yet, so that both must fit, and an arena that cannot grow
// in place is replaced while empty. An iteration without a low-water mark ends the waiting.
bool Client::defer_growth_to_low_water() noexcept {
  if (std::exchange(growth_deferred_, false)) return false;
  const auto wants = [&](const Pattern* one) {
    return !one->dormant && one->low_water != 0 && one->arena_bytes > pool_->arena_bytes() && one->arena_backoff.is_due(iterations_);
  };
  growth_deferred_ = std::any_of(known_.begin(), known_.end(), wants);
  return growth_deferred_;
}

void Client::grow_at_low_water(Stream stream) noexcept {
  if (pool_->source().held_for(stream)) return;
  growth_deferred_ = false;
  have_arena();
}

// Detect an iteration that outgrows the plan. Its largest buffers have no slot, and the iteration would need as much
// memory again outside the arena. If detected in time, the iteration bypasses the plan: once the arena has no live
// range (such as the last iteration's gradients), the arena is released, and the iteration uses its memory. If memory
// suffices for both, the bypass is used with exponential backoff. In front of another allocator, the arena is released
// whatever memory there is, and its holes serve until then.
//
// A few larger buffers may be extras, so the decision requires several buffers that exceed the planned sizes
// by about the same factor, and at least as many such buffers as others. Return true if this request is
// oversized too. If the request nevertheless matched a slot, that slot belongs to another buffer, unless the
// slot's size equals the request.
bool Client::outgrows(const Follower::Due& due, std::size_t bytes, const Follower::Match& match) noexcept {
  const double excess = static_cast<double>(bytes) / static_cast<double>(due.size) - 1;
  const bool alike = bypass_.larger != 0 && excess <= 2 * bypass_.excess && bypass_.excess <= 2 * excess;
  if (excess > kMostExcess || (match.slot != nullptr && (!alike || match.size == bytes))) return false;
  const bool hosted = pool_->source().device().hosted() != nullptr;
  bypass_.excess = excess;
  bypass_.larger = alike ? bypass_.larger + 1 : 1;
  if (!bypass_.decided && bypass_.larger >= (hosted ? kFewHosted : kSeveral) && 2 * bypass_.larger > due.place) {
    bypass_.decided = true;
    bypass_.active = may_bypass_plan();
    if (bypass_.active) {
      growth_deferred_ = false;  // the next boundary decides again
      if (hosted && largest() != nullptr) largest()->arena_backoff.done(iterations_, kLongestLook);
      decide(Decision::outgrown);
    }
  }
  return alike;
}

bool Client::may_bypass_plan() noexcept {
  if (pool_->clients().size() != 1 || pool_->source().has_budget()) return false;
  const bool gone = pool_->arena_bytes() == 0, hosted = pool_->source().device().hosted() != nullptr;
  const bool room = !gone && !hosted && pool_->fits_twice();
  if (room && !bypass_backoff_.is_due(iterations_)) return false;
  if (room) bypass_backoff_.done(iterations_);
  bypass_.patience = gone ? 0 : kBypassPatience;
  return true;
}

// At each allocation of such an iteration, try to release the arena except for the part with long-lived ranges. If live
// ranges remain after kBypassPatience allocations, they belong to this iteration, which then returns to the plan.
void Client::bypass_plan(Stream stream) noexcept {
  if (bypass_.patience == 0) return;
  const std::size_t before = pool_->arena_bytes();
  const bool empty = pool_->clients().size() == 1 && pool_->occupancy().end_of_last() <= before / Pool::kOutsideShare;
  if (empty && !pool_->source().held_for(stream)) pool_->shrink_arena(0);
  if (pool_->arena_bytes() < before) {
    bypass_.patience = 0;
  } else if (--bypass_.patience == 0 || taken_outside_arena_ > before / Pool::kOutsideShare) {
    bypass_.active = false;
  }
}

// Allocate the largest arena that a pattern needs, or else the largest possible arena for smaller patterns.
void Client::take_arena() noexcept {
  if (pool_->arena().conversion_backs_off(pool_->boundaries())) return;
  const bool all = pool_->source().device().hosted() != nullptr;  // the arena serves all patterns or none
  for (Pattern* one = largest(); one != nullptr && pool_->arena_bytes() < one->arena_bytes;
       one = largest(one->arena_bytes - 1)) {
    if (!one->arena_backoff.is_due(iterations_)) {
      if (all) return;
      continue;
    }
    const Refusal why = needs_request() ? Refusal::budget : pool_->take_arena(one->arena_bytes);
    if (why == Refusal::none) one->arena_backoff.start_over();
    if (why == Refusal::none || why == Refusal::pending) return;
    refused(*one, why);
    if (all) return;
  }
}

// Set the backoff after a refusal: a check of available memory is cheap, a failed attempt costs all free memory, and a
// moment without live ranges is brief.
void Client::refused(Pattern& pattern, Refusal why) noexcept {
  const bool looked = why == Refusal::insufficient_memory || why == Refusal::budget;
  pattern.arena_backoff.done(iterations_, why == Refusal::device ? kLongestPause : looked ? kLongestLook : kLongestMoment);
  const bool drains = why == Refusal::alive && pool_->arena().state() == ArenaState::draining;
  if (drains) pattern.arena_backoff.make_due(iterations_ + 1);  // the arena may be empty at the next boundary
  if (&pattern != largest() || std::exchange(refusal_, why) == why) return;
  ++refusals_;
  decide(Decision::refused, pattern.id, static_cast<std::uint64_t>(why), 0, pattern.arena_bytes);
}

bool Client::request_arena() noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::request_arena, uid_, 0);
  for (Pattern* pattern : known_) pattern->arena_backoff.make_due();
  const bool before = std::exchange(arena_allowed_, true);
  matches_awaited_ = 0;
  have_arena();
  arena_allowed_ = before;
  return pool_->arena_bytes() >= needed_bytes();
}

void Client::set_arena_allowed(bool takes) noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::arena_allowed, uid_, 0, takes);
  for (Pattern* pattern : known_) pattern->arena_backoff.make_due();
  arena_allowed_ = takes;
}

void Client::take_offered_arena() noexcept {
  const Guarded guard(pool_->lock);
  have_arena();
}

// Return the pattern that needs the largest arena of at most `most` bytes, dormant patterns excepted; null:
// none.
Pattern* Client::largest(std::size_t most) const noexcept {
  Pattern* largest = nullptr;
  for (Pattern* pattern : known_) {
    if (pattern->dormant || pattern->arena_bytes > most) continue;
    if (largest == nullptr || pattern->arena_bytes > largest->arena_bytes) largest = pattern;
  }
  return largest;
}

void Client::device_is_bound() noexcept {
  const Guarded guard(pool_->lock);
  pool_->read_traits();
  flight::note(flight::device_bound, uid_, 0);
  for (Client* client : pool_->clients()) client->have_arena();
}

}  // namespace mempool
