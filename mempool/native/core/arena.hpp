// State machine of a pool's arena, the region that all plans share.
//
//   none --taken--> serving --released, converted--> none         in place: serving --grown, shrunk--> serving
//                   serving --blocked--> draining --unblocked--> serving; draining --released, converted--> none
//
// The arena gets larger in one of two ways: it grows in place, or it is released while empty and replaced. When memory
// is short, the arena is converted to segments. `kArenaTransitions` has all transitions, and only `Arena::apply` changes
// the state. pool_arena.cpp allocates and releases the memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "core/backoff.hpp"
#include "core/live.hpp"
#include "core/occupancy.hpp"

namespace mempool {

struct LiveArena : Live<LiveArena> {};  // counts the arenas in existence

enum class ArenaState : std::uint8_t {
  none,
  serving,
  // The arena is to be replaced, which requires a moment without live ranges. Buffers that are live at the end of one
  // iteration, such as gradients, recur in the next. So no buffer is placed at their offsets, and the fallback serves
  // the buffers planned there.
  draining
};
enum class ArenaEvent : std::uint8_t { taken, grown, shrunk, blocked, unblocked, released, converted };
inline constexpr std::array<const char*, 3> kArenaStateNames = {"none", "serving", "draining"};
inline constexpr std::array<const char*, 7> kArenaEventNames = {"taken",     "grown",    "shrunk",   "blocked",
                                                                "unblocked", "released", "converted"};

struct ArenaTransition {
  ArenaState before;
  ArenaEvent event;
  ArenaState after;
};
inline constexpr std::array<ArenaTransition, 11> kArenaTransitions{{
    {ArenaState::none, ArenaEvent::taken, ArenaState::serving},
    {ArenaState::serving, ArenaEvent::grown, ArenaState::serving},
    {ArenaState::serving, ArenaEvent::shrunk, ArenaState::serving},
    {ArenaState::serving, ArenaEvent::blocked, ArenaState::draining},
    {ArenaState::serving, ArenaEvent::released, ArenaState::none},
    {ArenaState::serving, ArenaEvent::converted, ArenaState::none},
    {ArenaState::draining, ArenaEvent::grown, ArenaState::draining},
    {ArenaState::draining, ArenaEvent::shrunk, ArenaState::draining},
    {ArenaState::draining, ArenaEvent::unblocked, ArenaState::serving},
    {ArenaState::draining, ArenaEvent::released, ArenaState::none},
    {ArenaState::draining, ArenaEvent::converted, ArenaState::none},
}};

// Receiver of each transition; bytes before and afterwards.
struct ArenaLog {
  virtual void arena_changed(ArenaEvent event, std::size_t before, std::size_t after) noexcept = 0;

 protected:
  ~ArenaLog() = default;
};

// Time is counted in boundaries of all clients.
class Arena {
 public:
  explicit Arena(ArenaLog& log) noexcept : log_(log) {}

  ArenaState state() const noexcept { return state_; }
  Address base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }  // committed, from the base
  std::size_t space() const noexcept { return space_; }  // reserved address space
  bool holds(Address address) const noexcept { return address - base_ < bytes_; }
  // Return true if no buffer is placed at this offset, because the arena drains.
  bool is_drained(Offset begin) const noexcept {
    return state_ == ArenaState::draining && std::binary_search(begins_.begin(), begins_.end(), begin);
  }
  // Return true shortly after a conversion: no arena is taken before the next boundary, or with backoff, before a later
  // one.
  bool conversion_backs_off(std::uint64_t now) const noexcept { return !conversion_backoff_.is_due(now); }
  std::uint64_t conversions() const noexcept { return conversions_; }

  void take(Address base, std::size_t space, std::size_t bytes, std::uint64_t now) noexcept {
    base_ = base;
    space_ = space;
    since_ = now;
    live_.emplace();
    apply(ArenaEvent::taken, bytes);
  }
  void resize(std::size_t bytes) noexcept {
    if (bytes != bytes_) apply(bytes > bytes_ ? ArenaEvent::grown : ArenaEvent::shrunk, bytes);
  }
  // Drain the arena, whose `alive` ranges prevent its replacement. A long-lived buffer may prevent the end of the
  // drain, so a drain lasts for a few boundaries, with exponential backoff between drains. May throw std::bad_alloc.
  void block(const std::vector<std::pair<Offset, Offset>>& alive, std::uint64_t now) {
    if (now == blocked_at_) return;  // a second request at the same boundary, for another plan
    blocked_at_ = now;
    if (rounds_ == kMostRounds) unblock(now);
    if (!drains_.is_due(now)) return;
    ++rounds_;
    for (const auto& [begin, end] : alive) begins_.push_back(begin);
    std::sort(begins_.begin(), begins_.end());
    begins_.erase(std::unique(begins_.begin(), begins_.end()), begins_.end());
    if (state_ != ArenaState::draining) apply(ArenaEvent::blocked, bytes_);
  }
  // End the drain, since a larger arena is impossible now or no longer needed.
  void unblock(std::uint64_t now) noexcept {
    if (state_ != ArenaState::draining) return;
    end_drain();
    drains_.done(now);
    apply(ArenaEvent::unblocked, bytes_);
  }
  void release() noexcept { vanish(ArenaEvent::released); }
  void convert(std::uint64_t now) noexcept {
    if (now - since_ > kServedLong) conversion_backoff_.start_over();
    conversion_backoff_.done(now);
    ++conversions_;
    vanish(ArenaEvent::converted);
  }

 private:
  static constexpr unsigned kMostRounds = 4;        // boundaries in a row of a drain
  static constexpr std::uint64_t kServedLong = 64;  // boundaries after which the backoff of conversions is reset

  void end_drain() noexcept {
    begins_.clear();
    rounds_ = 0;
  }
  void vanish(ArenaEvent how) noexcept {
    end_drain();
    drains_.start_over();
    base_ = space_ = 0;
    live_.reset();
    apply(how, 0);
  }
  void apply(ArenaEvent event, std::size_t bytes) noexcept {
    const auto found = std::find_if(kArenaTransitions.begin(), kArenaTransitions.end(), [&](const ArenaTransition& one) {
      return one.before == state_ && one.event == event;
    });
    if (found == kArenaTransitions.end()) std::abort();  // continuing could hand out unmapped memory
    state_ = found->after;
    const std::size_t before = std::exchange(bytes_, bytes);
    log_.arena_changed(event, before, bytes);
  }

  ArenaLog& log_;
  ArenaState state_ = ArenaState::none;
  Address base_ = 0;
  std::size_t bytes_ = 0, space_ = 0;
  std::optional<LiveArena> live_;
  std::uint64_t since_ = 0;      // when the arena was taken
  std::vector<Offset> begins_;   // drained places, sorted
  unsigned rounds_ = 0;
  std::uint64_t blocked_at_ = ~std::uint64_t{0};
  ExponentialBackoff drains_{64, 1024};
  ExponentialBackoff conversion_backoff_{1, 64};
  std::uint64_t conversions_ = 0;
};

}  // namespace mempool
