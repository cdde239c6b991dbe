// The arena that a client's patterns need: when it is taken, made larger, and given up for an iteration that outgrows it.
#include <algorithm>
#include <utility>

#include "client.hpp"

namespace mempool {
namespace {

// Iterations between two times that an arena is asked for in vain, at most: by what was asked.
constexpr std::uint64_t kLongestMoment = 4, kLongestLook = 64, kLongestPause = 1024;
constexpr unsigned kSeveral = 6;         // buffers that are larger than is due
constexpr double kMostExcess = 7;        // and by how much at most, as a share of that: an envelope reaches as far down
constexpr unsigned kAsidePatience = 256;  // allocations, while what an iteration found alive in the arena may go

}  // namespace

// Sees to the arena that the patterns need, at a boundary. Where it cannot be had, or not so large, the pool goes on with
// what there is, and tries again some iterations later.
void Client::have_arena() noexcept {
  if (pool_->forked() || !pool_->source().device().bound()) return;
  if (pool_->clients().size() > 1) have_arena_for_others();
  if (known_.empty()) return;
  for (Pattern* pattern : known_) {
    if (!pattern->rests || !in_use(pattern)) continue;
    pattern->rests = false;
    layout_changed();
  }
  take_arena();
  if (pool_->arena_bytes() >= needed_bytes()) refusal_ = Refusal::none;
  const bool enough = largest(pool_->arena_bytes()) != nullptr;  // for one pattern
  if (std::exchange(replaying_, enough || (replaying_ && pool_->arena_bytes() != 0)) || !replaying_) return;
  if (active_at_ == 0) {
    active_at_ = iterations_ + 1;
    before_steady_ = stats_.outcomes;
  }
  begin_latest();
}

// At a boundary: whether a larger arena is to be taken later in this iteration, when less is alive. What is alive then has no
// place in it yet, so that there is room for both, and where it cannot grow in place nothing alive is in the one there is. An
// iteration that comes to no such moment ends the waiting.
bool Client::awaits_calm() noexcept {
  if (std::exchange(awaits_calm_, false)) return false;
  const auto wants = [&](const Pattern* one) {
    return !one->rests && one->calm != 0 && one->arena_bytes > pool_->arena_bytes() && one->asks.is_due(iterations_);
  };
  awaits_calm_ = std::any_of(known_.begin(), known_.end(), wants);
  return awaits_calm_;
}

void Client::come_to_calm(Stream stream) noexcept {
  if (pool_->source().held_for(stream)) return;
  awaits_calm_ = false;
  have_arena();
}

// An iteration that outgrows its plan has no place for its largest buffers, and beside the arena it would need as much again.
// Where it shows in time, it goes without the plan: once nothing in the arena is alive, such as the last iteration's gradients,
// the arena goes back, and the iteration has its memory. Where there is room for both that is done ever more rarely.
//
// A few buffers may be beside the iteration: it takes several that are about as much larger than is due, and as many as were not.
// True: so is this one, and the place that it has, which is another's, it has by chance; unless the size is the very one.
bool Client::outgrows(const Follower::Due& due, std::size_t bytes, const Follower::Match& match) noexcept {
  const double excess = static_cast<double>(bytes) / static_cast<double>(due.size) - 1;
  const bool alike = aside_.larger != 0 && excess <= 2 * aside_.excess && aside_.excess <= 2 * excess;
  if (excess > kMostExcess || (match.slot != nullptr && (!alike || match.size == bytes))) return false;
  aside_.excess = excess;
  aside_.larger = alike ? aside_.larger + 1 : 1;
  if (!aside_.decided && aside_.larger >= kSeveral && 2 * aside_.larger > due.place) {
    aside_.decided = true;
    aside_.stands = may_stand_aside();
    if (aside_.stands) awaits_calm_ = false;  // the next boundary looks anew
  }
  return alike;
}

bool Client::may_stand_aside() noexcept {
  if (pool_->clients().size() != 1 || pool_->source().has_budget()) return false;
  const bool gone = pool_->arena_bytes() == 0;
  const bool room = !gone && pool_->has_room_for_another();
  if (room && !asides_.is_due(iterations_)) return false;
  if (room) asides_.done(iterations_);
  aside_.patience = gone ? 0 : kAsidePatience;
  return true;
}

// At each allocation of such an iteration, until the arena has gone back, but for what stays in it for good. What does not go
// soon is of this iteration, which then goes on in the arena.
void Client::stand_aside(Stream stream) noexcept {
  if (aside_.patience == 0) return;
  const std::size_t before = pool_->arena_bytes();
  const bool empty = pool_->clients().size() == 1 && pool_->occupancy().end_of_last() <= before / Pool::kMostBeside;
  if (empty && !pool_->source().held_for(stream)) pool_->shrink_arena(0);
  if (pool_->arena_bytes() < before) {
    aside_.patience = 0;
  } else if (--aside_.patience == 0 || taken_beside_ > before / Pool::kMostBeside) {
    aside_.stands = false;
  }
}

// The largest that a pattern needs, or else the largest that can be had: who needs more hinders nobody.
void Client::take_arena() noexcept {
  if (pool_->dissolved()) return;
  for (Pattern* one = largest(); one != nullptr && pool_->arena_bytes() < one->arena_bytes;
       one = largest(one->arena_bytes - 1)) {
    if (!one->asks.is_due(iterations_)) continue;
    const Refusal why = has_to_ask() ? Refusal::budget : pool_->take_arena(one->arena_bytes);
    if (why == Refusal::none) {
      one->asks.start_over();
      return;
    }
    refused(*one, why);
  }
}

// To look at what there is costs little, to try in vain all free memory; a moment in which nothing is alive is soon over.
void Client::refused(Pattern& pattern, Refusal why) noexcept {
  const bool looked = why == Refusal::foreseen || why == Refusal::budget;
  pattern.asks.done(iterations_, why == Refusal::device ? kLongestPause : looked ? kLongestLook : kLongestMoment);
  const bool vacates = why == Refusal::alive && pool_->vacated().any();
  if (vacates) pattern.asks.make_due(iterations_ + 1);  // at the next boundary it may be empty
  if (&pattern == largest() && std::exchange(refusal_, why) != why) ++refusals_;
}

bool Client::ask_for_arena() noexcept {
  const Guarded guard(pool_->lock);
  for (Pattern* pattern : known_) pattern->asks.make_due();
  const bool before = std::exchange(takes_arena_, true);
  have_arena();
  takes_arena_ = before;
  return pool_->arena_bytes() >= needed_bytes();
}

void Client::set_takes_arena(bool takes) noexcept {
  const Guarded guard(pool_->lock);
  for (Pattern* pattern : known_) pattern->asks.make_due();
  takes_arena_ = takes;
}

// An arena that cannot grow in place is replaced, in a moment when nothing in it is alive. At others' own boundaries there may
// never be one, as where each iteration of theirs uses what this client made before: whoever comes to one takes it for those
// who were refused.
void Client::have_arena_for_others() noexcept {
  if (!for_others_.is_due(iterations_) || pool_->occupancy().alive() != 0) return;
  bool had = false, refused = false;
  for (const Client* other : pool_->clients()) {
    if (other == this || other->refusal_ == Refusal::none) continue;
    for (const Pattern* one = other->largest(); one != nullptr && pool_->arena_bytes() < one->arena_bytes;
         one = other->largest(one->arena_bytes - 1)) {
      (pool_->take_arena(one->arena_bytes) == Refusal::none ? had : refused) = true;
    }
  }
  if (had) for_others_.start_over();
  if (refused) for_others_.done(iterations_);
}

// The pattern that does not rest and needs the largest arena, of at most so many bytes; null: there is none.
Pattern* Client::largest(std::size_t most) const noexcept {
  Pattern* largest = nullptr;
  for (Pattern* pattern : known_) {
    if (pattern->rests || pattern->arena_bytes > most) continue;
    if (largest == nullptr || pattern->arena_bytes > largest->arena_bytes) largest = pattern;
  }
  return largest;
}

void Client::device_is_bound() noexcept {
  const Guarded guard(pool_->lock);
  for (Client* client : pool_->clients()) client->have_arena();
}

}  // namespace mempool
