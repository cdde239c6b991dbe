// The overlap guard: the live ranges of the arena. A planned address is handed out only if no live range
// intersects the slot, no matter which plan, iteration or fallback request placed the range.
//
// Live ranges never intersect, so [begin, end) is free exactly if the last live range that starts before
// `end` has ended by `begin`. Every planned start is a planned slot (*cell* in the code), known when plans
// are installed; a hierarchical bitmap over the slots finds the last live one in O(log64 slots). A range that
// starts elsewhere (a fallback block in a hole, a buffer of a dropped plan) is an unplanned range (*stranger*
// in the code) in an ordered map, which is empty in the steady state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/guards.hpp"
#include "adapters/owners.hpp"

namespace mempool {

using Offset = std::uint64_t;  // bytes from the arena's base
using Line = std::uint8_t;     // index of a stream that uses the arena: see arena_streams.hpp

// A set of small integers with predecessor and successor queries.
class BitSet {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  BitSet() { resize(0); }
  BitSet(BitSet&&) = default;
  BitSet& operator=(BitSet&&) = default;
  void resize(std::uint32_t size);  // to the empty set
  void set(std::uint32_t index) noexcept {
    std::uint64_t& word = ground_[index >> 6];
    if (word == 0) set_above(index >> 6);
    word |= std::uint64_t{1} << (index & 63);
  }
  void clear(std::uint32_t index) noexcept {
    std::uint64_t& word = ground_[index >> 6];
    word &= ~(std::uint64_t{1} << (index & 63));
    if (word == 0) clear_above(index >> 6);
  }
  // Return the largest member <= index, or kNone.
  std::uint32_t last_up_to(std::uint32_t index) const noexcept {
    const std::uint64_t word = ground_[index >> 6] & (~std::uint64_t{0} >> (63 - (index & 63)));
    if (word != 0) return (index & ~63u) + 63 - static_cast<std::uint32_t>(__builtin_clzll(word));
    return search_up_to(index);
  }
  // Return the smallest member >= index, or kNone.
  std::uint32_t first_from(std::uint32_t index) const noexcept;

 private:
  std::uint32_t search_up_to(std::uint32_t index) const noexcept;

  void set_above(std::uint32_t word) noexcept;
  void clear_above(std::uint32_t word) noexcept;

  // bit i of level l+1 is set if word i of level l is not zero
  std::vector<std::vector<std::uint64_t>> levels_;
  std::uint64_t* ground_ = nullptr;                 // level 0
};

class Occupancy {
 public:
  // Make the sorted, distinct `starts` the planned slots. Live ranges stay live. O(slots + live ranges).
  void set_cells(const std::vector<Offset>& starts);
  std::uint32_t cell_of(Offset start) const noexcept;        // BitSet::kNone: no planned slot starts there
  std::uint32_t cells_before(Offset end) const noexcept;     // number of planned slots that start below `end`

  // Overlap guard for a range whose cells_before(end) is known. The pool's promise rests on this check: never
  // skip it.
  bool is_free(Offset begin, Offset end, std::uint32_t cells_before_end) const noexcept {
    if (MEMPOOL_GUARDED("cells") && cells_before_end != 0) {
      const std::uint32_t last = live_.last_up_to(cells_before_end - 1);
      if (last != BitSet::kNone && cells_[last].end > begin) return false;
    }
    return strangers_.empty() || !MEMPOOL_GUARDED("strangers") || strangers_free(begin, end);
  }
  void take_cell(std::uint32_t cell, Offset end) noexcept {
    cells_[cell].end = end;
    live_.set(cell);
    ++alive_;
  }
  // Set the line of the live range in a slot; required for every line except 0.
  void set_line(std::uint32_t cell, Line line) noexcept { whose_[cell].line = line; }
  void forget_lines() noexcept {  // call only with no live range left
    for (Whose& whose : whose_) {
      if (MEMPOOL_GUARDED("line")) whose.line = 0;
    }
  }
  void set_owner(std::uint32_t cell, Owner owner) noexcept { whose_[cell].owner = owner; }
  void set_owner_at(Offset begin, Owner owner) noexcept;  // of the live range that starts at `begin`
  void take(Offset begin, Offset end, Line line);
  // End the live range that starts at `begin`. Return its end, or 0 if no live range starts there.
  Offset release(Offset begin) noexcept;
  // End (0: no live range), line and owner of the live range that starts at `begin`.
  struct Lives {
    Offset end;
    Line line;
    Owner owner;
  };
  Lives at(Offset begin) const noexcept;
  Offset end_at(Offset begin) const noexcept { return at(begin).end; }

  // Return the start of the smallest free range of at least `bytes` below `limit`, aligned to `alignment`;
  // `limit` if none exists. With more than kHolesLookedAt live ranges, a search examines only the gaps
  // between the next kHolesLookedAt ranges and the gap behind the last range.
  Offset find_hole(std::size_t bytes, std::size_t alignment, Offset limit);
  static constexpr std::size_t kHolesLookedAt = 256;
  Offset largest_hole(Offset limit) const noexcept;  // bytes of the largest free range below `limit`
  // A live range that intersects [begin, end); {0, 0} if none does.
  struct Range {
    Offset begin = 0, end = 0;
  };
  Range in_the_way(Offset begin, Offset end) const noexcept;
  std::size_t alive() const noexcept { return alive_; }
  std::size_t strangers() const noexcept { return strangers_.size(); }
  Offset end_of_last() const noexcept;  // lower limit for shrinking the arena
  std::size_t table_bytes() const noexcept;
  std::vector<std::pair<Offset, Offset>> live_ranges() const;
  // Call visit(begin, end) for each live range, in order.
  template <class Visit>
  void each_live(Visit visit) const {
    walk(0, [&](Offset begin, Offset end) { return visit(begin, end), true; });
  }

 private:
  struct Cell {
    Offset start = 0;
    Offset end = 0;  // of the live range; 0: the slot is free
  };

  // Call visit(begin, end) for live ranges that start at `from` or later, in order, until visit returns
  // false.
  template <class Visit>
  void walk(Offset from, Visit&& visit) const;
  bool strangers_free(Offset begin, Offset end) const noexcept;
  std::uint32_t slot_of(Offset start) const noexcept;

  std::vector<Cell> cells_;              // sorted by start
  struct Whose {
    Line line = 0;
    Owner owner = 0;
  };
  // line and owner of each slot's live range; a separate array because one stream and one client need neither
  std::vector<Whose> whose_;
  std::vector<std::uint32_t> index_;     // open-addressing hash table: start -> slot
  unsigned shift_ = 63;
  BitSet live_;
  std::map<Offset, Lives> strangers_;    // by begin
  std::size_t alive_ = 0;
  Offset hole_cursor_ = 0;               // start of the next search for a hole
};

template <class Visit>
void Occupancy::walk(Offset from, Visit&& visit) const {
  auto stranger = strangers_.lower_bound(from);
  const auto next_cell = [&](std::uint32_t cell) {
    return cell >= cells_.size() ? BitSet::kNone : live_.first_from(cell);
  };
  for (std::uint32_t cell = next_cell(cells_before(from)); cell != BitSet::kNone || stranger != strangers_.end();) {
    Offset begin = 0, end = 0;
    if (cell != BitSet::kNone && (stranger == strangers_.end() || cells_[cell].start < stranger->first)) {
      begin = cells_[cell].start;
      end = cells_[cell].end;
      cell = next_cell(cell + 1);
    } else {
      begin = stranger->first;
      end = stranger->second.end;
      ++stranger;
    }
    if (!visit(begin, end)) return;
  }
}

}  // namespace mempool
