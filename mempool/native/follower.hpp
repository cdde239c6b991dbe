// Where one sequence of allocations stands in its pattern. This is the whole policy for divergence; it hands out
// positions, never addresses, so being fooled costs hits and nothing else.
//
// * The expected size: a match, move on.
// * Another size: an extra allocation (stay: the pattern goes on where it was) or one with a changed shape (step over it:
//   the pattern goes on behind it). Which of the two is told by the next size that matches either.
// * At the first difference in an iteration: another known pattern, or the part of another thread, that shares the prefix
//   and expects this size, or that has ended here.
// * From the second stray on, and where one came a short while ago: the place near by that most of the last sizes lead to;
//   something was left out, or is done again.
// * After kWindow strays in a row, or in short succession: the one place in any known pattern that follows the last kWindow
//   sizes; while a warm-up may last, in that only.
//
// A part has one player at a time: of several threads that do the same work, one replays and the others do not disturb it.
#pragma once

#include <vector>

#include "pattern.hpp"
#include "stats.hpp"

namespace mempool {

inline constexpr std::uint32_t kEarly = 32;    // positions, in which an iteration has only begun
inline constexpr std::uint64_t kForgiven = 64;  // allocations after which a difference no longer counts against the place

class Follower {
 public:
  Follower(std::uint32_t sequence, Stream stream) : sequence_(sequence), role_(sequence), stream_(stream) {}

  struct Match {
    const Slot* slot = nullptr;  // null: no position
    Outcome outcome = Outcome::lost;
    std::uint64_t size = 0;      // that the position was planned for
    bool boundary = false;       // this allocation is the first of a new iteration of the first table

    static Match none(Outcome why) noexcept { return {nullptr, why, 0, false}; }
  };
  // The position of the next allocation. `marked`: iterations begin by marks only.
  // The straight way through next(): the slot of the next allocation if it is the expected one and nothing else happens
  // there, else null. `advance` goes on behind it.
  const Slot* expected_slot(std::uint64_t size) const noexcept {
    if (boundary_ || strays_ != 0 || position_ == 0 || !expects(size)) return nullptr;
    return &table_->slots[position_ * std::size_t{pattern_->unroll} + column_];
  }
  void advance(std::uint64_t size) noexcept {
    recent_[count_++ % kWindow] = size;
    ++position_;
  }
  Match next(std::uint64_t size, const std::vector<Pattern*>& known, bool marked) noexcept {
    recent_[count_++ % kWindow] = size;
    if (table_ != nullptr && (strays_ != 0 || position_ == 0) && played(*table_)) return yield_part(size, known);
    if (expects(size)) {
      strays_ = 0;
      return matched();
    }
    return diverged(size, known, marked);
  }
  // Iteration number `iteration`: position 0 of `pattern`, or the position that a warm-up has for its `mark`-th mark.
  void begin(Pattern* pattern, std::uint64_t mark, std::uint64_t iteration) noexcept;
  // Follows nothing until an iteration begins.
  void hold_back() noexcept { warm_at_ = ~std::uint64_t{0}; }
  void leave() noexcept {
    table_ = nullptr, pattern_ = finished_ = upcoming_ = nullptr;
    strays_ = 0;
    boundary_ = false;
  }
  // Another stream's from now on; allocations are counted on.
  void pass_on(Stream stream) noexcept {
    leave();
    stream_ = stream;
    role_ = sequence_;
    rival_ = nullptr;
    debt_ = 0;
    idle_ = false;
  }
  // `fresh` has the same sizes as `old` and takes its place.
  void replace(const Pattern* old, Pattern* fresh) noexcept;
  // Takes up a pattern that was just planned, if the last sizes are what it expects. Who is in step with another one
  // goes on in that until its iteration ends: fewest buffers, which may lie where the new plan has others, live then.
  void take_up(Pattern* pattern) noexcept;

  std::uint32_t sequence() const noexcept { return sequence_; }
  Stream stream() const noexcept { return stream_; }
  Pattern* pattern() const noexcept { return pattern_; }
  const Table* table() const noexcept { return table_; }  // null: no part of the pattern is followed
  std::uint32_t position() const noexcept { return position_; }
  std::uint64_t expected() const noexcept {
    return table_ != nullptr && position_ < table_->length() ? table_->sizes[position_] : 0;
  }
  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t iteration() const noexcept { return iteration_; }
  // The pattern that is taken up when this iteration ends; null if the next is the same one or its successor.
  Pattern* upcoming() const noexcept { return upcoming_; }
  // The pattern of the iteration that ended last; null if none was followed.
  Pattern* finished() const noexcept { return finished_; }
  // While its thread has ended and no other has taken its place, it plays no part.
  void set_idle(bool idle) noexcept { idle_ = idle; }
  // What is due if nothing so far was beside the iteration, which has only begun; else a size of 0.
  struct Due {
    std::uint64_t place = 0, size = 0;
  };
  Due early() const noexcept {
    const std::uint64_t place = count_ - began_at_;
    return table_ != nullptr && place < kEarly && place < table_->length() ? Due{place, table_->sizes[place]} : Due{};
  }
  // It has begun its part, so that the places it is about to use should stay free.
  bool plays() const noexcept { return table_ != nullptr && plays(*table_); }
  // What is made to stay is made now, wherever that finds room.
  bool warms_up() const noexcept { return count_ < warm_at_ && !idle_; }
  // The allocation at hand is the one before which least is alive.
  bool is_calm() const noexcept { return table_ == &pattern_->tables.front() && position_ == pattern_->calm + 1; }
  bool follows(const Table& table) const noexcept { return table_ == &table; }
  bool in_step() const noexcept { return table_ != nullptr && strays_ < kWindow && beyond_ < kWindow; }

 private:
  // Whether the next position is for this size; nothing else may hand one out.
  bool expects(std::uint64_t size) const noexcept {
    return table_ != nullptr && position_ < table_->length() &&
           (table_->fits(position_, size) || !MEMPOOL_GUARDED("own_size"));
  }
  Match matched() noexcept {
    table_->player = this;
    const std::uint32_t position = position_++;
    const Slot& slot = table_->slots[position * std::size_t{pattern_->unroll} + column_];
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
  std::uint32_t role_;  // the recorded sequence whose part this one plays: threads of a pool swap their work
  Stream stream_;
  Pattern* pattern_ = nullptr;
  Pattern* finished_ = nullptr;
  Pattern* upcoming_ = nullptr;
  const Table* table_ = nullptr;
  std::uint32_t position_ = 0;   // the next expected
  std::uint32_t column_ = 0;     // iteration_ % unroll
  std::uint32_t strays_ = 0;     // allocations since the last match, or since leaving
  std::uint32_t beyond_ = 0;     // allocations behind the iteration's last, before the mark
  std::uint32_t debt_ = 0;       // differences in short succession
  std::uint64_t last_stray_ = 0; // count_ at the last difference
  bool clean_ = true;            // everything matched since the iteration began
  bool boundary_ = false;
  bool idle_ = false;
  std::uint64_t iteration_ = 0;
  std::uint64_t count_ = 0;      // allocations ever
  std::uint64_t began_at_ = 0;   // the count when the iteration began
  std::uint64_t warm_at_ = 0;    // the count at which a warm-up is over, though it was of a shorter kind; 0 if it is
  std::uint64_t recent_[kWindow] = {};
  // Another one that plays a part which this one would take, how far it was, and this one's count then.
  const Follower* rival_ = nullptr;
  std::uint64_t rival_count_ = 0, rival_since_ = 0;
};

}  // namespace mempool
