// Position of one sequence of allocations in a pattern. This class has the whole policy for divergence, and returns
// positions, not addresses, so that a wrong guess only costs hits.
//
// * Expected size: a match; advance.
// * Unexpected size: either an extra allocation (the pattern continues at the same position) or a buffer with
//   a changed shape (the pattern continues behind this position). The next size that fits one of the two
//   positions decides.
// * First difference in an iteration: try another known pattern, or the part of another thread, that shares
//   the prefix and either expects this size or has ended here.
//   In an envelope, if exactly one of the next positions has this size, skip to that position, since small batches
//   may omit allocations, such as those of a sort. If the next size contradicts the skip, return.
// * Second stray in a row, or a stray soon after another: step to the nearby position that agrees with most of
//   the last sizes, because allocations were omitted or repeated.
// * kWindow strays in a row or in short succession: the only position in any known pattern that follows the
//   last kWindow sizes; while a warm-up may last, in the warm-up only.
//
// A part has one player at a time: of several threads that do the same work, one thread replays without disturbance by
// the others.
#pragma once

#include <algorithm>
#include <vector>

#include "core/pattern.hpp"
#include "core/stats.hpp"

namespace mempool {

inline constexpr std::uint32_t kEarly = 32;    // positions during which an iteration counts as just begun
// allocations after which a difference no longer counts against the position
inline constexpr std::uint64_t kForgiven = 64;

class Follower {
 public:
  Follower(std::uint32_t sequence, Stream stream) : sequence_(sequence), role_(sequence), stream_(stream) {}

  struct Match {
    const Slot* slot = nullptr;  // null: no position
    Outcome outcome = Outcome::desynchronized;
    std::uint64_t size = 0;      // planned size of the position
    bool boundary = false;       // this allocation is the first of a new iteration of the first table

    static Match none(Outcome why) noexcept { return {nullptr, why, 0, false}; }
  };
  // Fast path of next(): return the slot of the next allocation if its size is as expected and no other event is due,
  // else null. advance() then moves to the next position.
  const Slot* expected_slot(std::uint64_t size) const noexcept {
    if (boundary_ || strays_ != 0 || position_ == 0 || !expects(size)) return nullptr;
    return &slot_at(position_);
  }
  // Return the expected allocation after `ahead` further ones, and its slot; no slot beyond the iteration's end, or
  // while desynchronized.
  struct Next {
    const Slot* slot = nullptr;
    std::uint64_t size = 0;
  };
  Next next_due(std::uint32_t ahead) const noexcept {
    const std::uint32_t position = position_ + ahead;
    if (strays_ != 0 || table_ == nullptr || position >= table_->length()) return {};
    return {&slot_at(position), table_->sizes[position]};
  }
  void advance(std::uint64_t size) noexcept {
    recent_[count_++ % kWindow] = size;
    ++position_;
  }
  // Return the position of the next allocation. `marked`: iterations begin by marks only.
  Match next(std::uint64_t size, const std::vector<Pattern*>& known, bool marked) noexcept {
    recent_[count_++ % kWindow] = size;
    if (table_ != nullptr && (strays_ != 0 || position_ == 0) && played(*table_)) return yield_part(size, known);
    if (expects(size)) {
      strays_ = 0;
      return matched();
    }
    return diverged(size, known, marked);
  }
  // Begin iteration number `iteration` at position 0 of `pattern`, or at the position of the `mark`-th mark
  // of a warm-up.
  void begin(Pattern* pattern, std::uint64_t mark, std::uint64_t iteration) noexcept;
  // Follow no pattern until an iteration begins.
  void warmup_only() noexcept { warm_at_ = ~std::uint64_t{0}; }
  void leave() noexcept {
    table_ = nullptr, pattern_ = finished_ = upcoming_ = nullptr;
    strays_ = 0;
    boundary_ = false;
  }
  // Reassign this follower to another stream; the allocation count continues.
  void pass_on(Stream stream) noexcept {
    leave();
    stream_ = stream;
    role_ = sequence_;
    rival_ = nullptr;
    debt_ = 0;
    idle_ = false;
  }
  // Replace `old` by `fresh`, which serves the same sizes, at the same position.
  void replace(const Pattern* old, Pattern* fresh) noexcept;
  // Follow a newly planned pattern if the last sizes match. A follower in step with another pattern switches only at
  // the iteration's end, when the fewest buffers, which may occupy slots of the new plan, are live.
  void take_up(Pattern* pattern) noexcept;

  std::uint32_t sequence() const noexcept { return sequence_; }
  Stream stream() const noexcept { return stream_; }
  Pattern* pattern() const noexcept { return pattern_; }
  const Table* table() const noexcept { return table_; }  // null: no table is followed
  std::uint32_t position() const noexcept { return position_; }
  std::uint64_t expected() const noexcept {
    return table_ != nullptr && position_ < table_->length() ? table_->sizes[position_] : 0;
  }
  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t iteration() const noexcept { return iteration_; }
  // The pattern to follow when this iteration ends; null if the next pattern is the same one or the regular
  // successor.
  Pattern* upcoming() const noexcept { return upcoming_; }
  // The pattern of the last iteration that ended; null if none was followed.
  Pattern* finished() const noexcept { return finished_; }
  // Mark the follower as idle, without a part, since the thread has ended and no other thread has taken over.
  void set_idle(bool idle) noexcept { idle_ = idle; }
  // Return true if the iteration has just begun and its pattern has a next allocation.
  bool is_early() const noexcept {
    const std::uint64_t place = count_ - began_at_;
    return table_ != nullptr && place < kEarly && place < table_->length();
  }
  // The place of the next allocation, and the most bytes that any of the patterns has there; a size of 0 unless `is_early`.
  struct Due {
    std::uint64_t place = 0, size = 0;
  };
  Due early(const std::vector<Pattern*>& known) const noexcept {
    const std::uint64_t place = count_ - began_at_;
    return is_early() ? Due{place, most_at(place, known)} : Due{};
  }
  // Return true if the follower has begun a part, so that the slots about to be used should stay free.
  bool plays() const noexcept { return table_ != nullptr && plays(*table_); }
  // Return true during a warm-up, when long-lived buffers are allocated wherever there is room.
  bool warms_up() const noexcept { return count_ < warm_at_ && !idle_; }
  // Return true if the current allocation is at the low-water mark, before which the fewest bytes are live.
  bool at_low_water() const noexcept { return table_ == &pattern_->tables.front() && position_ == pattern_->low_water + 1; }
  bool follows(const Table& table) const noexcept { return table_ == &table; }
  // The first allocations of this iteration, compared with the known ones.
  enum class Begun : std::uint8_t { known, smaller, larger };
  Begun begun() const noexcept { return begun_; }
  bool in_step() const noexcept { return table_ != nullptr && strays_ < kWindow && beyond_ < kWindow; }

 private:
  std::uint64_t most_at(std::uint64_t place, const std::vector<Pattern*>& known) const noexcept {
    std::uint64_t most = table_->sizes[place];
    for (Pattern* pattern : known) {
      const Table* const table = own_table(pattern);
      if (table != nullptr && place < table->length()) most = std::max(most, table->sizes[place]);
    }
    return most;
  }
  const Slot& slot_at(std::uint32_t position) const noexcept {
    return table_->slots[position * std::size_t{pattern_->unroll} + column_];
  }
  // Return true if the next position is for this size. Only this function may permit a position.
  bool expects(std::uint64_t size) const noexcept {
    return table_ != nullptr && position_ < table_->length() &&
           (table_->fits(position_, size) || !MEMPOOL_GUARDED("own_size"));
  }
  Match matched() noexcept {
    table_->player = this;
    const std::uint32_t position = position_++;
    const Slot& slot = slot_at(position);
    return {&slot, Outcome::hit, table_->sizes[position], boundary_ && take_boundary()};
  }
  bool differed_lately() const noexcept { return last_stray_ != 0 && count_ - last_stray_ <= kForgiven; }
  bool take_boundary() noexcept {
    boundary_ = false;
    return true;
  }
  Match yield_part(std::uint64_t size, const std::vector<Pattern*>& known) noexcept;
  Match diverged(std::uint64_t size, const std::vector<Pattern*>& known, bool marked) noexcept;
  bool switch_table(std::uint64_t size, const std::vector<Pattern*>& known) noexcept;
  bool switch_to_ended(std::uint64_t size, const std::vector<Pattern*>& known) noexcept;
  bool resynchronise(const std::vector<Pattern*>& known) noexcept;
  bool step_near(bool marked, std::uint32_t reach) noexcept;
  bool skip_to(std::uint64_t size) noexcept;
  std::uint32_t agreement(std::uint32_t position) const noexcept;
  bool align(Pattern* pattern, std::uint64_t count) noexcept;
  void enter(Pattern* pattern, const Table* table, std::uint32_t position) noexcept;
  const Table* own_table(const Pattern* pattern) const noexcept { return pattern->table_of(role_, stream_); }
  bool plays(const Table& table) const noexcept {
    return table_ == &table && !idle_ && strays_ == 0 && position_ != 0;
  }
  bool played(const Table& table) noexcept;
  void begin_next() noexcept;
  bool next_begins_with(const Pattern* ended, std::uint64_t size) const noexcept;
  bool begins_like(const Table& other) const noexcept;

  std::uint32_t sequence_;
  // the recorded sequence whose part this follower plays: the threads of a thread pool swap their work
  std::uint32_t role_;
  Stream stream_;
  Pattern* pattern_ = nullptr;
  Pattern* finished_ = nullptr;
  Pattern* upcoming_ = nullptr;
  const Table* table_ = nullptr;
  std::uint32_t position_ = 0;   // the next expected position
  std::uint32_t column_ = 0;     // iteration_ % unroll
  std::uint32_t strays_ = 0;     // allocations since the last match, or since leaving the pattern
  std::uint32_t beyond_ = 0;     // allocations after the last planned one of the iteration, before the mark
  std::uint32_t debt_ = 0;       // differences in short succession
  std::uint64_t last_stray_ = 0; // count_ at the last difference
  std::uint64_t skipped_at_ = 0;     // count_ at the last skip in this iteration
  std::uint32_t skipped_from_ = 0;   // position before that skip
  bool clean_ = true;            // every allocation matched since the iteration began
  bool boundary_ = false;
  bool idle_ = false;
  std::uint64_t iteration_ = 0;
  std::uint64_t count_ = 0;      // total allocations
  std::uint64_t began_at_ = 0;   // count_ when the iteration began
  // count_ at which a warm-up is over, even one of a shorter variant; 0: the warm-up is over
  std::uint64_t warm_at_ = 0;
  Begun begun_ = Begun::known;
  std::uint64_t recent_[kWindow] = {};
  // Another follower that plays a part this follower would take; the rival's count, and this follower's count
  // at the rival's last move.
  const Follower* rival_ = nullptr;
  std::uint64_t rival_count_ = 0, rival_since_ = 0;
};

// Return true if a marked iteration of `sequence` with these sizes follows the pattern to its end without a miss.
// May throw std::bad_alloc.
bool leads_through(const Pattern& pattern, std::uint32_t sequence, const std::uint64_t* sizes, std::size_t count);

// Announces upcoming uses of a follower's plan, each once and within a window, to a device that prefetches memory.
class Lookahead {
 public:
  // Call `tell(offset, bytes)` for upcoming buffers, after an allocation that was served at the planned
  // address.
  template <class Tell>
  void go_on(const Follower& follower, std::size_t window, Tell tell) {
    const Pattern& pattern = *follower.pattern();
    const Table& table = *follower.table();
    const std::uint64_t length = table.length(), now = follower.iteration() * length + follower.position();
    if (&table != table_ || now < at_ || now > told_) {  // the follower has moved elsewhere
      table_ = &table;
      at_ = told_ = now;
      ahead_ = 0;
    }
    for (; at_ < now; ++at_) ahead_ -= std::min(ahead_, table.sizes[at_ % length]);
    const bool repeats = pattern.cyclic && (pattern.next == nullptr || pattern.next == &pattern);
    const std::uint64_t end = repeats ? now + length : (follower.iteration() + 1) * length;
    for (; ahead_ < window && told_ < end; ++told_) {
      const std::uint64_t position = told_ % length, bytes = table.sizes[position];
      const Slot& slot = table.slots[position * pattern.unroll + told_ / length % pattern.unroll];
      if (slot.offset != kDynamic) tell(slot.offset, bytes);
      ahead_ += bytes;
    }
  }

 private:
  const Table* table_ = nullptr;  // only compared, because the table may no longer exist
  // Positions continue counting across the iterations of a table.
  std::uint64_t at_ = 0;    // the follower's position at the last call
  std::uint64_t told_ = 0;  // all positions before this one are announced
  std::uint64_t ahead_ = 0; // bytes of the positions from `at_` to `told_`
};

}  // namespace mempool
