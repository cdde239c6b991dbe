// A recurring iteration for replay: the expected sizes in order, and the planned address of each.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/backoff.hpp"
#include "core/live.hpp"
#include "core/occupancy.hpp"
#include "devices/device.hpp"

namespace mempool {

inline constexpr Offset kDynamic = ~Offset{0};  // the fallback serves this position
// consecutive sizes that suffice to recognise a position in a pattern
inline constexpr std::uint32_t kWindow = 8;

// Return the same ranges merged into disjoint ranges in order.
std::vector<std::pair<Offset, Offset>> merged(std::vector<std::pair<Offset, Offset>> ranges);

struct Slot {
  Offset offset = kDynamic;            // from the arena's base
  std::uint32_t index = 0;             // planned slot of `offset` in the occupancy
  std::uint32_t slots_before_end = 0;  // planned slots that start below offset + size
};

class Follower;

// The part of a pattern that one sequence (the allocations of one thread on one stream) plays.
struct Table {
  std::uint32_t sequence = 0;  // number of the recorded sequence; a loaded pattern counts threads from 0
  Stream stream = 0;
  // bytes requested, by position; at least one position. In an envelope: upper bounds
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> least;     // in an envelope: lower bounds of the bytes requested; else empty
  std::vector<Slot> slots;              // [position * unroll + iteration % unroll]
  std::vector<std::uint64_t> prefixes;  // hash of all sizes before each position, then of all sizes
  std::vector<std::uint32_t> marks;     // warm-up only: the position at each mark
  std::uint64_t phase = 0;              // the sequence's allocation count when position 0 was last due
  mutable const Follower* player = nullptr;  // the last follower of this table

  // Fill `prefixes` and the indexes behind `position_after` and `fits_anywhere`. `cyclic`: position 0 follows the last position.
  void build_index(bool cyclic);
  // Return the only position that follows these kWindow sizes (oldest first), or the number of positions if
  // no position or several do.
  std::uint32_t position_after(const std::uint64_t* window) const noexcept;
  // Return true if a request of this size may take the position's slot.
  bool fits(std::uint32_t position, std::uint64_t size) const noexcept {
    return sizes[position] == size || (!least.empty() && least[position] <= size && size < sizes[position]);
  }
  // Return true if `fits` holds at some position.
  bool fits_anywhere(std::uint64_t size) const noexcept {
    const auto after = std::upper_bound(all_sizes_.begin(), all_sizes_.end(), std::pair{size, ~std::uint64_t{0}});
    return after != all_sizes_.begin() && size < std::prev(after)->second;
  }
  std::uint64_t least_of(std::uint32_t position) const noexcept { return least.empty() ? sizes[position] : least[position]; }
  std::uint32_t length() const noexcept { return static_cast<std::uint32_t>(sizes.size()); }
  std::size_t bytes() const noexcept;  // of host memory

 private:
  struct Place {
    std::uint64_t hash = 0;
    std::uint32_t position = ~std::uint32_t{0};
  };
  static constexpr std::uint32_t kAmbiguous = ~std::uint32_t{0} - 1;
  std::vector<Place> places_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all_sizes_;  // that fit at any position: disjoint ranges in order
};

struct Pattern : Live<Pattern> {
  std::uint64_t id = 0;        // number of the pattern in its client, from 1
  bool cyclic = true;          // false: a warm-up, followed by `next`
  bool marked = false;         // warm-up only: the program marks iterations
  std::uint32_t unroll = 1;    // iterations after which addresses repeat
  std::size_t arena_bytes = 0;
  // the low-water mark: the position in the first table before which the fewest bytes are live
  std::uint32_t low_water = 0;
  std::vector<Table> tables;   // the end of the first table is the end of the iteration
  Pattern* next = nullptr;     // the pattern that followed last time
  std::uint64_t iterations = 0;  // begun
  std::uint64_t last_used = 0;   // the client's iteration number at the last use
  unsigned unused = 0;  // consecutive rounds of retire_unused_patterns() in which no sequence followed the pattern
  bool dormant = false;            // unused for so long that no arena is kept for the pattern
  ExponentialBackoff arena_backoff{4, 1024};          // in iterations of the client; backoff after an arena was refused
  std::vector<std::pair<Offset, Offset>> arena_ranges;  // ranges of the pattern's buffers, disjoint and in order

  // Call visit(table, slot, bytes requested) for each planned buffer, once for each unrolled iteration.
  template <class Visit>
  void each_planned(Visit visit) {
    for (Table& table : tables) {
      for (std::size_t i = 0; i < table.slots.size(); ++i) {
        if (table.slots[i].offset != kDynamic) visit(table, table.slots[i], table.sizes[i / unroll]);
      }
    }
  }
  void update_arena_ranges();  // call once the offsets are final
  // Return true if `other` expects the same sizes in the same sequences.
  bool same_sizes(const Pattern& other) const noexcept;
  // Return true if every request that `other` has a slot for has a slot here, at the same position.
  bool serves(const Pattern& other) const noexcept;
  // Return the number of allocations of an iteration, in all sequences.
  std::size_t allocations() const noexcept {
    std::size_t sum = 0;
    for (const Table& table : tables) sum += table.length();
    return sum;
  }
  // Return true if the pattern is an envelope, which covers iteration variants that differ only in sizes and
  // has slots for the largest sizes.
  bool is_envelope() const noexcept { return !tables.front().least.empty(); }
  const Table* table_of(std::uint32_t sequence, Stream stream) const noexcept {
    for (const Table& table : tables) {
      if (table.sequence == sequence && table.stream == stream) return &table;
    }
    return nullptr;
  }
};

// Prediction of the next pattern from the history of patterns: the pattern that followed the longest earlier
// match of the latest history. Epochs of several iteration variants (A A A B, or two networks in turn) are
// thus predicted once they have been seen.
class PatternHistory {
 public:
  void add(Pattern* ended) noexcept {
    if (count_ == past_.size()) {
      std::copy(past_.begin() + kForgotten, past_.end(), past_.begin());
      count_ -= kForgotten;
    }
    past_[count_++] = ended;
  }
  // Null: the last pattern has not occurred before.
  Pattern* next() const noexcept {
    Pattern* foretold = nullptr;
    std::size_t longest = 0;
    // past_[i] followed the history that ends at i - 1
    for (std::size_t i = count_; i-- > 1 && longest < kMostAlike;) {
      std::size_t alike = 0;
      while (alike < i && alike < kMostAlike && past_[i - 1 - alike] == past_[count_ - 1 - alike]) ++alike;
      if (alike <= longest) continue;
      longest = alike;
      foretold = past_[i];
    }
    return foretold;
  }
  void replace(const Pattern* old, Pattern* fresh) noexcept {
    std::replace(past_.begin(), past_.begin() + static_cast<std::ptrdiff_t>(count_), const_cast<Pattern*>(old), fresh);
  }
  void forget(const Pattern* pattern) noexcept {
    const auto end = std::remove(past_.begin(), past_.begin() + static_cast<std::ptrdiff_t>(count_), pattern);
    count_ = static_cast<std::size_t>(end - past_.begin());
  }
  void clear() noexcept { count_ = 0; }

 private:
  static constexpr std::size_t kMostAlike = 16, kForgotten = 32;
  std::array<Pattern*, 96> past_{};  // oldest first
  std::size_t count_ = 0;
};

}  // namespace mempool
