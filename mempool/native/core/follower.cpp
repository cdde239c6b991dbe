#include "core/follower.hpp"

#include <algorithm>

namespace mempool {
namespace {

constexpr std::uint32_t kStrayPatience = 64;
// allocations; large because an interpreter's lock lets threads run in bursts
constexpr std::uint64_t kStandstill = 4096;
constexpr std::uint32_t kNear = 256;     // positions
// Strays at the beginning of an iteration after which the iteration counts as unlike all known ones. A single stray suffices
// if its size differs from the planned one by less than this factor, as in another batch; else it may be an extra allocation.
constexpr std::uint32_t kFewStrays = 2;
constexpr std::uint64_t kSimilar = 8;
constexpr std::uint32_t kFar = 4096;

}  // namespace

void Follower::enter(Pattern* pattern, const Table* table, std::uint32_t position) noexcept {
  if (upcoming_ == pattern) upcoming_ = nullptr;
  pattern_ = pattern;
  table_ = table;
  role_ = table->sequence;
  if (position != 0) table->player = this;
  position_ = position;
  column_ = static_cast<std::uint32_t>(iteration_ % pattern->unroll);
  strays_ = beyond_ = 0;
  skipped_at_ = 0;
}

// Return true if another follower plays the table. A follower that stands still while this follower advances does not
// count; at the end of the table, it counts for a shorter time.
bool Follower::played(const Table& table) noexcept {
  const Follower* other = table.player;
  if (other == nullptr || other == this || !other->plays(table)) return false;
  if (rival_ != other || rival_count_ != other->count_) {
    rival_ = other;
    rival_count_ = other->count_;
    rival_since_ = count_;
  }
  return count_ - rival_since_ < (other->position_ == table.length() ? kWindow : kStandstill);
}

void Follower::begin(Pattern* pattern, std::uint64_t mark, std::uint64_t iteration) noexcept {
  iteration_ = iteration;
  finished_ = pattern_;
  upcoming_ = nullptr;
  warm_at_ = 0;
  began_at_ = count_;
  begun_ = Begun::known;
  const Table* table = pattern == nullptr ? nullptr : own_table(pattern);
  if (table == nullptr) {
    table_ = nullptr;
    pattern_ = nullptr;
    strays_ = 0;
    return;
  }
  const bool warming = !pattern->cyclic && mark < table->marks.size();
  enter(pattern, table, warming ? table->marks[mark] : 0);
  if (!pattern->cyclic && pattern->marked) warm_at_ = count_ + 2 * std::uint64_t{table->length()};
  clean_ = true;
}

bool Follower::next_begins_with(const Pattern* ended, std::uint64_t size) const noexcept {
  const Table* table = own_table(ended->next != nullptr ? ended->next : ended);
  return table != nullptr && table->fits(0, size);
}

// Return true if `other` expects the same sizes as the current table up to this position. For envelopes only
// the last sizes are known and compared.
bool Follower::begins_like(const Table& other) const noexcept {
  if (other.least.empty() && table_->least.empty()) return other.prefixes[position_] == table_->prefixes[position_];
  for (std::uint32_t back = 1; back < kWindow && back <= position_; ++back) {
    if (!other.fits(position_ - back, recent_[(count_ - 1 - back) % kWindow])) return false;
  }
  return true;
}

void Follower::begin_next() noexcept {
  Pattern* const next = pattern_->next != nullptr ? pattern_->next : pattern_;
  boundary_ = table_ == &pattern_->tables.front();
  Pattern* const upcoming = upcoming_;
  begin(next, ~std::uint64_t{0}, iteration_ + 1);
  --began_at_;  // the current allocation is the first of the new iteration
  if (upcoming != nullptr && !align(upcoming, count_ - 1)) upcoming_ = upcoming;
}

void Follower::replace(const Pattern* old, Pattern* fresh) noexcept {
  if (finished_ == old) finished_ = fresh;
  if (upcoming_ == old) upcoming_ = fresh;
  if (pattern_ != old) return;
  pattern_ = fresh;
  column_ = static_cast<std::uint32_t>(iteration_ % fresh->unroll);
  if (table_ == nullptr) return;
  table_ = &fresh->tables[static_cast<std::size_t>(table_ - old->tables.data())];
  table_->player = this;
}

void Follower::take_up(Pattern* pattern) noexcept {
  if ((!in_step() || differed_lately()) && align(pattern, count_)) {
    upcoming_ = nullptr;
    return;
  }
  if (!in_step()) {
    leave();
  } else if (pattern_ != pattern) {
    upcoming_ = pattern;
  }
}

// Move to the position of `pattern` that the allocation count implies, if the last sizes fit. `count`:
// allocations before the one that the position is for.
bool Follower::align(Pattern* pattern, std::uint64_t count) noexcept {
  const Table* table = own_table(pattern);
  if (table == nullptr || count < table->phase || played(*table)) return false;
  const std::uint32_t length = table->length();
  const auto position = static_cast<std::uint32_t>((count - table->phase) % length);
  // Compare the remembered sizes, the last kWindow, except the current allocation's size.
  for (std::uint32_t back = 1; back <= kWindow - (count_ - count) && back <= count; ++back) {
    const auto before = static_cast<std::uint32_t>((position + std::uint64_t{length} * kWindow - back) % length);
    if (!table->fits(before, recent_[(count - back) % kWindow])) return false;
  }
  enter(pattern, table, position);
  clean_ = false;
  return true;
}

bool Follower::switch_table(std::uint64_t size, const std::vector<Pattern*>& known) noexcept {
  for (const bool own : {true, false}) {
    for (Pattern* pattern : known) {
      if (pattern->cyclic != pattern_->cyclic) continue;
      for (const Table& table : pattern->tables) {
        if (&table == table_ || table.stream != stream_ || (table.sequence == role_) != own) continue;
        if (position_ >= table.length() || !table.fits(position_, size)) continue;
        if (!begins_like(table) || played(table)) continue;
        enter(pattern, &table, position_);
        return true;
      }
    }
  }
  return false;
}

// Switch to another pattern with the same beginning that is shorter and has ended here.
bool Follower::switch_to_ended(std::uint64_t size, const std::vector<Pattern*>& known) noexcept {
  for (Pattern* pattern : known) {
    const Table* table = own_table(pattern);
    if (table == nullptr || !pattern->cyclic || table->length() != position_) continue;
    if (!begins_like(*table) || !next_begins_with(pattern, size)) continue;
    enter(pattern, table, position_);
    return true;
  }
  return false;
}

// Move to the only position that follows the last kWindow sizes. During warm-up, cyclic patterns are skipped:
// buffers with the sizes of a steady iteration may be long-lived, such as an optimizer's state.
bool Follower::resynchronise(const std::vector<Pattern*>& known) noexcept {
  if (count_ < kWindow) return false;
  std::uint64_t window[kWindow];
  for (std::uint32_t i = 0; i < kWindow; ++i) window[i] = recent_[(count_ + i) % kWindow];
  for (const bool own : {true, false}) {
    for (Pattern* pattern : known) {
      if (warms_up() && pattern->cyclic) continue;
      for (const Table& table : pattern->tables) {
        if (table.stream != stream_ || (table.sequence == role_) != own) continue;
        const std::uint32_t position = table.position_after(window);
        if (position == table.length() || played(table)) continue;
        enter(pattern, &table, position);
        clean_ = false;
        return true;
      }
    }
  }
  return false;
}

// Return how many of the last sizes, including the current one, match the sizes that end at the position.
std::uint32_t Follower::agreement(std::uint32_t position) const noexcept {
  const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>({kWindow, position + std::uint64_t{1}, count_}));
  std::uint32_t agree = 0;
  while (agree < most && table_->fits(position - agree, recent_[(count_ - 1 - agree) % kWindow])) ++agree;
  return agree;
}

// Step to the nearby position that agrees with most of the last sizes. A longer distance requires more agreement: two
// sizes within 32 positions, one more for each eightfold distance. Without marks, this iteration may have ended early:
// a nearer position beyond its end then means the next iteration.
bool Follower::step_near(bool marked, std::uint32_t reach) noexcept {
  const std::uint32_t length = table_->length();
  const bool goes_on = !marked && pattern_->cyclic && upcoming_ == nullptr &&
                       (pattern_->next == nullptr || pattern_->next == pattern_);
  const std::uint64_t size = recent_[(count_ - 1) % kWindow];
  if (!table_->fits_anywhere(size)) return false;
  std::uint32_t place = length;
  bool wraps = false;
  int best = 0;
  const auto consider = [&](std::uint32_t to, int cost, bool beyond) noexcept {
    if (!table_->fits(to, size)) return;
    const std::uint32_t agree = agreement(to);
    const int score = 3 * static_cast<int>(agree) - cost;
    if (agree < 2 || score <= best) return;
    best = score;
    place = to;
    wraps = beyond;
  };
  reach = std::min(reach, length - 1);
  int cost = 1;
  for (std::uint32_t away = 1; away <= reach && 3 * int{kWindow} - cost > best; ++away) {
    if ((away & (away - 1)) == 0 && away > 1) ++cost;
    if (position_ + away < length) {
      consider(position_ + away, cost, false);
    } else if (goes_on) {
      consider(position_ + away - length, cost, true);
    }
    if (away <= position_) consider(position_ - away, cost, false);
  }
  if (place == length) return false;
  if (wraps) begin_next();
  position_ = place;
  return true;
}

// Skip to the next position of exactly this size, if it is the only one among the near positions.
bool Follower::skip_to(std::uint64_t size) noexcept {
  const std::uint32_t end = std::min(table_->length(), position_ + kNear);
  std::uint32_t place = end;
  for (std::uint32_t to = position_ + 1; to < end; ++to) {
    if (table_->sizes[to] != size || table_->least_of(to) != size) continue;
    if (place != end) return false;
    place = to;
  }
  if (place == end) return false;
  skipped_at_ = count_;
  skipped_from_ = position_;
  position_ = place;
  return true;
}

// Leave a table that another follower plays first; another matching table without a player may exist.
Follower::Match Follower::yield_part(std::uint64_t size, const std::vector<Pattern*>& known) noexcept {
  if (strays_ == 0 && switch_table(size, known)) return matched();
  leave();
  boundary_ = false;
  strays_ = kWindow;
  return Match::none(Outcome::desynchronized);
}

Follower::Match Follower::diverged(std::uint64_t size, const std::vector<Pattern*>& known, bool marked) noexcept {
  if (table_ != nullptr && position_ == table_->length() && strays_ == 0) {
    // Buffers allocated after a marked warm-up and before its mark may be long-lived, such as an optimizer's state.
    const bool ends_here = pattern_->cyclic ? !marked : !pattern_->marked;
    // Unless the next iteration begins with this size, another pattern may continue this pattern.
    if (!(ends_here && next_begins_with(pattern_, size)) && clean_ && switch_table(size, known)) return matched();
    if (!ends_here) {
      clean_ = false;
      ++beyond_;
      return Match::none(Outcome::past_end);
    }
    begin_next();
    if (table_ != nullptr && position_ == 0 && played(*table_)) return yield_part(size, known);
    if (expects(size)) return matched();
  }
  if (table_ != nullptr) {
    if (skipped_at_ != 0 && count_ == skipped_at_ + 1) {  // no omission: the previous size was an extra allocation
      position_ = skipped_from_;
      last_stray_ = count_;
      if (expects(size)) return matched();
      strays_ = 1;
    }
    if (strays_ == 0 && clean_ && switch_table(size, known)) return matched();
    if (strays_ == 0 && clean_ && !marked && switch_to_ended(size, known)) {
      begin_next();
      if (played(*table_)) return yield_part(size, known);
      // The next pattern may have been replaced by a waiting plan, which is at an arbitrary position.
      if (expects(size)) return matched();
    }
    const std::uint64_t behind = std::uint64_t{position_} + strays_;
    if (strays_ > 0 && behind < table_->length() && table_->fits(static_cast<std::uint32_t>(behind), size)) {
      position_ = static_cast<std::uint32_t>(behind);
      strays_ = 0;
      return matched();
    }
    clean_ = false;
  }
  const bool suspect = strays_ != 0 || differed_lately();
  // Only iterations of an envelope omit sizes; in other patterns, an omission means another program or an exception.
  if (table_ != nullptr && !suspect && pattern_->is_envelope() && skip_to(size)) return matched();
  // Recurring differences mean a wrong position, however well single sizes match there.
  debt_ = differed_lately() ? debt_ + 1 : 1;
  last_stray_ = count_;
  if (table_ != nullptr && suspect && position_ < table_->length()) {
    // After many strays, search rarely but farther away.
    const bool far = strays_ >= kWindow;
    const bool looks = far ? strays_ % (strays_ < kStrayPatience ? kWindow : kStrayPatience) == 0 : debt_ < kWindow;
    if (looks && step_near(marked, far ? kFar : kNear)) {
      strays_ = 0;
      return matched();
    }
  }
  ++strays_;
  if (position_ == 0 && table_ != nullptr && strays_ <= std::min(kFewStrays, table_->length())) {
    const std::uint64_t most = most_at(strays_ - 1, known);
    const bool is_similar = size / kSimilar < most && most / kSimilar < size;
    if (is_similar || strays_ == kFewStrays) begun_ = size > most ? Begun::larger : Begun::smaller;
  }
  if (table_ != nullptr && strays_ < kWindow && debt_ < kWindow) return Match::none(Outcome::size_mismatch);
  if (debt_ >= kWindow) {
    debt_ = 0;
    if (resynchronise(known) || table_ != nullptr) return Match::none(Outcome::size_mismatch);
  }
  // A program that has left all patterns permanently should not pay for each search.
  if (strays_ > kStrayPatience && count_ % kStrayPatience != 0) return Match::none(Outcome::desynchronized);
  // The window ends with this allocation, so that the search finds the position of the *next* allocation.
  return Match::none(resynchronise(known) ? Outcome::size_mismatch : Outcome::desynchronized);
}

bool leads_through(const Pattern& pattern, std::uint32_t sequence, const std::uint64_t* sizes, std::size_t count) {
  Pattern own = pattern;  // a table knows its follower
  for (Table& table : own.tables) table.build_index(own.cyclic);
  const std::vector<Pattern*> known{&own};
  for (const Table& table : own.tables) {
    if (table.sequence != sequence) continue;
    Follower follower(sequence, table.stream);
    follower.begin(&own, ~std::uint64_t{0}, 0);
    return std::all_of(sizes, sizes + count, [&](std::uint64_t size) { return follower.next(size, known, true).slot != nullptr; });
  }
  return false;
}

}  // namespace mempool
