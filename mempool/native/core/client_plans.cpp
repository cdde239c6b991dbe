// Lifecycle of patterns: installed by the planner, loaded from files, replaced and forgotten.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/client.hpp"

namespace mempool {
namespace {

constexpr unsigned kDormantAfter = 10;  // rounds of retire_unused_patterns() without use

}  // namespace

bool Client::in_use(const Pattern* pattern) const noexcept {
  if (pattern == current_ || pattern == ended_ || pattern == coming_) return true;
  if (current_ != nullptr && pattern == current_->next) return true;
  return std::any_of(sequences_.begin(), sequences_.end(), [&](const Sequence& sequence) {
    const Follower& one = sequence.follower;
    return one.pattern() == pattern || one.finished() == pattern || one.upcoming() == pattern;
  });
}

// Count a change of the layout, after which other clients may plan closer.
void Client::layout_changed() noexcept {
  ++layouts_;
  pool_->layout_changed();
}

void Client::forget(Pattern* pattern) noexcept {
  layout_changed();
  for (const auto& other : patterns_) {
    if (other->next == pattern) other->next = nullptr;
  }
  history_of_patterns_.forget(pattern);
  known_.erase(std::remove(known_.begin(), known_.end(), pattern), known_.end());
  patterns_.erase(std::find_if(patterns_.begin(), patterns_.end(), [&](const auto& p) { return p.get() == pattern; }));
}

void Client::keep_patterns_bounded() noexcept {
  while (known_.size() > kMostPatterns) {
    Pattern* oldest = nullptr;
    for (Pattern* pattern : known_) {
      if (in_use(pattern) || pattern == known_.front()) continue;
      if (oldest == nullptr || pattern->last_used < oldest->last_used) oldest = pattern;
    }
    if (oldest == nullptr) return;
    decide(Decision::evicted, oldest->id);
    forget(oldest);
  }
}

// Return true if this client is between two iterations while other clients of the memory are at work.
bool Client::is_idle() noexcept {
  const std::uint64_t mine = large_allocations(), others = pool_->boundaries() - iterations_;
  const bool same = std::exchange(allocations_seen_, mine) == mine;
  return std::exchange(others_seen_, others) != others && same && !plays();
}

void Client::retire_unused_patterns() noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::retire_unused, uid_, 0);
  const bool idle = is_idle();
  for (Pattern* pattern : known_) {
    const bool used = (in_use(pattern) && !idle) || pattern->last_used > unused_checked_at_;
    pattern->unused = used ? 0 : pattern->unused + 1;
    const bool dormant = pattern->unused >= kDormantAfter;
    if (std::exchange(pattern->dormant, dormant) != dormant) layout_changed();
  }
  unused_checked_at_ = iterations_;
  pool_->shrink_arena();
}

void Client::forget_unused() noexcept {
  std::size_t needed = 0;
  for (const Pattern* pattern : known_) {
    if (in_use(pattern)) needed = std::max(needed, pattern->arena_bytes);
  }
  for (std::size_t i = known_.size(); i-- > 0;) {
    if (in_use(known_[i]) || known_[i]->arena_bytes <= needed) continue;
    decide(Decision::forgotten, known_[i]->id);
    forget(known_[i]);
  }
}

// Validate a pattern, which may come from a file: the hot path relies on these properties.
void Client::check(const Pattern& pattern, bool cyclic) const {
  if (pattern.cyclic != cyclic) throw std::invalid_argument("a steady pattern is cyclic and a warm-up is not");
  if (pattern.tables.empty()) throw std::invalid_argument("a pattern needs at least one table");
  const std::size_t alignment = pool_->source().traits().alignment;
  for (const Table& table : pattern.tables) {
    if (table.sizes.empty() || table.slots.size() != table.sizes.size() * pattern.unroll) {
      throw std::invalid_argument("a table needs at least one position, and a slot for each unrolled iteration");
    }
    if (table.least.empty() == pattern.is_envelope()) {
      throw std::invalid_argument("of an envelope, each table has least sizes");
    }
    for (const Slot& slot : table.slots) {
      if (slot.offset != kDynamic && slot.offset % alignment != 0) {
        throw std::invalid_argument("an offset is not a multiple of the device's alignment");
      }
    }
  }
}

// Add patterns to the known ones, all of them or none.
void Client::admit(std::vector<std::unique_ptr<Pattern>> fresh) {
  patterns_.reserve(patterns_.size() + fresh.size());
  std::vector<Pattern*> known;
  known.reserve(known_.size() + fresh.size());
  for (const auto& pattern : fresh) known.push_back(pattern.get());
  known.insert(known.end(), known_.begin(), known_.end());
  known_.swap(known);
  try {
    pool_->rebuild_slots();
  } catch (...) {
    known_.swap(known);
    throw;
  }
  for (auto& pattern : fresh) {
    pattern->id = ++patterns_admitted_;
    patterns_.push_back(std::move(pattern));
  }
  layout_changed();
}

// Replace older patterns that `fresh` serves completely; their followers continue in `fresh` at the same position.
// Return true if such patterns existed and none was in use: then `fresh` waits like them, and is dormant if they were.
bool Client::supersede(Pattern* fresh) noexcept {
  bool idle = false, used = false;
  for (auto it = patterns_.begin(); it != patterns_.end();) {
    Pattern* const old = it->get();
    if (old == fresh || !fresh->serves(*old)) {
      ++it;
      continue;
    }
    (in_use(old) ? used : idle) = true;
    decide(Decision::superseded, old->id);
    fresh->last_used = std::max(fresh->last_used, old->last_used);
    fresh->unused = old->unused;
    fresh->dormant = old->dormant;
    for (Sequence& sequence : sequences_) sequence.follower.replace(old, fresh);
    for (const auto& pattern : patterns_) {
      if (pattern->next == old) pattern->next = fresh;
    }
    if (fresh->next == nullptr && old->next != old) fresh->next = old->next;
    history_of_patterns_.replace(old, fresh);
    if (ended_ == old) ended_ = fresh;
    if (current_ == old) current_ = fresh;
    if (coming_ == old) coming_ = fresh;
    known_.erase(std::remove(known_.begin(), known_.end(), old), known_.end());
    it = patterns_.erase(it);
  }
  if (used) fresh->unused = 0, fresh->dormant = false;
  return idle && !used;
}

// Write a pattern to the flight recorder, before this thread's call that installs the pattern.
void Client::note_pattern(const Pattern& pattern) const noexcept {
  if (!flight::on()) return;
  flight::note(flight::pattern, uid_, 0, pattern.arena_bytes, pattern.unroll, pattern.low_water, pattern.cyclic + 2 * pattern.marked);
  for (const Table& table : pattern.tables) {
    flight::note(flight::table, uid_, 0, table.sequence, table.stream, table.phase);
    for (std::size_t i = 0; i < table.slots.size(); ++i) {
      const std::size_t position = i / pattern.unroll;
      flight::note(flight::slot, uid_, 0, table.sizes[position], table.least.empty() ? 0 : table.least[position], table.slots[i].offset);
    }
    for (const std::uint32_t mark : table.marks) flight::note(flight::table_mark, uid_, 0, mark);
  }
}

std::uint64_t Client::install(std::unique_ptr<Pattern> pattern, std::uint64_t iterations_seen, bool instead) {
  check(*pattern, true);
  for (Table& table : pattern->tables) table.build_index(true);
  pattern->update_arena_ranges();
  Pattern* const fresh = pattern.get();
  std::vector<std::unique_ptr<Pattern>> one;
  one.push_back(std::move(pattern));
  note_pattern(*fresh);
  const Guarded guard(pool_->lock);
  flight::note(flight::install, uid_, 0, iterations_seen, instead);
  for (Table& table : fresh->tables) {  // streams of a pattern from a file were renamed here
    if (table.sequence >= sequences_.size() || sequences_[table.sequence].is_spare()) continue;
    table.stream = sequences_[table.sequence].follower.stream();
  }
  const auto same = [&](const Pattern* known) { return known->same_sizes(*fresh); };
  if (instead && std::none_of(known_.begin(), known_.end(), same)) return 0;
  admit(std::move(one));
  decide(instead ? Decision::replaced : Decision::planned, fresh->id, fresh->allocations(), 0, fresh->arena_bytes);
  if (matches_awaited_ != 0 && !instead) set_loaded_aside(fresh);
  const bool idle = supersede(fresh);
  keep_patterns_bounded();
  if (replaying_ && !growth_deferred_ && !bypass_.active) have_arena();
  const std::uint64_t id = fresh->id;
  if (idle) return id;
  coming_ = fresh;
  if (current_ == nullptr || !marked_) current_ = fresh;
  if (marked_) return id;
  if (active_at_ == 0) iterations_ = std::max(iterations_, iterations_seen);
  for (Sequence& sequence : sequences_) sequence.follower.take_up(fresh);
  return id;
}

// Set loaded patterns that the program has not followed aside until a sequence follows one.
void Client::set_loaded_aside(const Pattern* fresh) noexcept {
  decide(Decision::set_aside);
  matches_awaited_ = 0;
  warmup_only_ = false;
  for (Sequence& sequence : sequences_) sequence.follower.leave();
  current_ = ended_ = coming_ = nullptr;
  for (Pattern* pattern : known_) pattern->dormant = pattern != fresh;
}

// Assign this process's streams to tables of a plan from another process; sequences keep their numbers.
void Client::name_streams(std::uint32_t sequence) noexcept {
  const Stream stream = sequences_[sequence].follower.stream();
  bool renamed = false;
  for (const auto& pattern : patterns_) {
    for (Table& table : pattern->tables) {
      if (table.sequence != sequence || table.stream == stream) continue;
      for (Sequence& other : sequences_) {
        // the follower took the table for the part of the follower's own stream
        if (other.follower.follows(table) && MEMPOOL_GUARDED("renamed")) other.follower.leave();
      }
      table.stream = stream;
      renamed = true;
    }
  }
  try {
    if (renamed) pool_->rebuild_slots();
  } catch (...) {  // stream sharing is updated a little later; until then streams wait for more than needed
  }
}

std::uint64_t Client::load(std::unique_ptr<Pattern> warmup, std::unique_ptr<Pattern> steady, bool unsure) {
  if (warmup != nullptr) check(*warmup, false);
  check(*steady, true);
  Pattern* const lasting = steady.get();
  lasting->next = lasting;
  std::vector<std::unique_ptr<Pattern>> both;
  if (warmup != nullptr) {
    warmup->next = lasting;
    both.push_back(std::move(warmup));
  }
  both.push_back(std::move(steady));
  for (const auto& pattern : both) {
    for (Table& table : pattern->tables) table.build_index(pattern->cyclic);
    pattern->update_arena_ranges();
    note_pattern(*pattern);
  }
  const Guarded guard(pool_->lock);
  flight::note(flight::load, uid_, 0, both.size() - 1, unsure);
  Pattern* const first = both.front().get();
  admit(std::move(both));
  const std::uint64_t id = lasting->id;
  decide(Decision::loaded, id, lasting->allocations(), 0, lasting->arena_bytes);
  for (const Sequence& sequence : sequences_) {
    if (!sequence.is_spare()) name_streams(sequence.follower.sequence());
  }
  bypass_ = {};
  warmup_only_ = first->cyclic && first->is_envelope();
  current_ = warmup_only_ ? nullptr : first;
  ended_ = nullptr;
  history_of_patterns_.clear();
  if (unsure) matches_awaited_ = matches_to_confirm(*first);
  have_arena();
  turn_ = 1;
  for (Sequence& sequence : sequences_) begin(sequence, ~std::uint64_t{0});
  return id;
}

void Client::drop_patterns() noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::drop_patterns, uid_, 0);
  if (!known_.empty()) decide(Decision::dropped);
  for (Sequence& sequence : sequences_) sequence.follower.leave();
  current_ = ended_ = coming_ = nullptr;
  matches_awaited_ = 0;
  history_of_patterns_.clear();
  bypass_ = {};
  replaying_ = false;
  refusal_ = Refusal::none;
  known_.clear();
  patterns_.clear();
  layout_changed();
  pinned_.clear();
  pool_->forget_planned_offsets(owner_);
  try {
    pool_->rebuild_slots();
  } catch (...) {  // the old slots stay: correct, and slightly more than needed
  }
  pool_->shrink_arena();
}

std::vector<std::pair<Offset, Offset>> Client::other_plans_ranges() {
  std::vector<std::pair<Offset, Offset>> ranges;
  {
    const Guarded guard(pool_->lock);
    for (const Client* client : pool_->clients()) {
      if (client == this) continue;
      for (const Pattern* pattern : client->known_) {
        if (!pattern->dormant) ranges.insert(ranges.end(), pattern->arena_ranges.begin(), pattern->arena_ranges.end());
      }
    }
  }
  return merged(std::move(ranges));
}

bool Client::give_back(bool force) noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::give_back, uid_, 0, force);
  pool_->trim();
  const std::uint64_t now = pool_->boundaries();
  const bool quiet = gave_back_at_ == now;
  gave_back_at_ = now;
  if (!force && !quiet) return pool_->arena_bytes() == 0;
  if (!pool_->release_arena()) {
    if (force) pool_->shrink_arena(0);
    return false;
  }
  for (Client* client : pool_->clients()) client->replaying_ = false;
  return true;
}

}  // namespace mempool
