// The guard: who lives where in the arena. A planned address is handed out only if nothing alive intersects it,
// whatever plan, iteration or fallback put it there.
//
// Live ranges never intersect, so [begin, end) is free exactly if the last live range that starts before `end` has
// ended by `begin`. Every planned start is a *cell*, known when plans are installed; a hierarchical bitmap over
// the cells finds the last live one in O(log64 cells). Whatever starts elsewhere (the fallback in a hole, a range of a
// plan since dropped) is a *stranger* in an ordered map, which is empty in the steady state.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "guards.hpp"

namespace mempool {

using Offset = std::uint64_t;  // bytes from the arena's base

// A set of small integers with "largest member not above".
class BitSet {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  void resize(std::uint32_t size);
  void set(std::uint32_t index) noexcept {
    std::uint64_t& word = levels_[0][index >> 6];
    const bool was_empty = word == 0;
    word |= std::uint64_t{1} << (index & 63);
    if (was_empty) set_above(index >> 6);
  }
  void clear(std::uint32_t index) noexcept {
    std::uint64_t& word = levels_[0][index >> 6];
    word &= ~(std::uint64_t{1} << (index & 63));
    if (word == 0) clear_above(index >> 6);
  }
  bool test(std::uint32_t index) const noexcept { return levels_[0][index >> 6] >> (index & 63) & 1; }
  // The largest member <= index, or kNone.
  std::uint32_t last_up_to(std::uint32_t index) const noexcept {
    const std::uint64_t word = levels_[0][index >> 6] & (~std::uint64_t{0} >> (63 - (index & 63)));
    if (word != 0) return (index & ~63u) + 63 - static_cast<std::uint32_t>(__builtin_clzll(word));
    return search_up_to(index);
  }
  // The smallest member >= index, or kNone.
  std::uint32_t first_from(std::uint32_t index) const noexcept;

 private:
  static constexpr std::size_t kMostLevels = 6;  // of 64 words each, for 2^32 members
  std::uint32_t search_up_to(std::uint32_t index) const noexcept;
  void set_above(std::uint32_t word) noexcept;
  void clear_above(std::uint32_t word) noexcept;

  std::size_t depth_ = 1;
  std::array<std::vector<std::uint64_t>, kMostLevels> levels_{{{0}}};  // bit i of level l+1: word i of level l is not 0
};

class Occupancy {
 public:
  struct Range {
    Offset end = 0;           // 0: nothing lives here
    std::size_t requested = 0;
  };

  // Makes the sorted, distinct `starts` the cells. Ranges alive stay alive. O(cells + live).
  void set_cells(std::vector<Offset> starts);
  // BitSet::kNone if it is none.
  std::uint32_t cell_of(Offset start) const noexcept {
    const auto mask = static_cast<std::uint32_t>(index_.size() - 1);
    for (std::uint32_t slot = slot_of(start);; slot = (slot + 1) & mask) {
      const std::uint32_t cell = index_[slot];
      if (cell == BitSet::kNone || starts_[cell] == start) return cell;
    }
  }
  std::uint32_t cells_before(Offset end) const noexcept;     // number of cells that start below `end`

  // Guard for a range whose cells_before(end) is known. This is the promise of the pool: never skip it.
  bool is_free(Offset begin, Offset end, std::uint32_t cells_before_end) const noexcept {
    if (MEMPOOL_GUARDED("cells") && cells_before_end != 0) {
      const std::uint32_t last = live_.last_up_to(cells_before_end - 1);
      if (last != BitSet::kNone && ranges_[last].end > begin) return false;
    }
    return strangers_.empty() || !MEMPOOL_GUARDED("strangers") || strangers_free(begin, end);
  }
  void take_cell(std::uint32_t cell, Offset end, std::size_t requested) noexcept {
    ranges_[cell] = {end, requested};
    live_.set(cell);
    ++alive_;
  }
  void take(Offset begin, Offset end, std::size_t requested);
  // The range that starts at `begin` is over; its description, or {0, 0} if nothing lives there.
  Range release(Offset begin) noexcept {
    const std::uint32_t cell = cell_of(begin);
    if (cell == BitSet::kNone) return release_stranger(begin);
    const Range range = ranges_[cell];
    if (range.end == 0) return range;
    ranges_[cell].end = 0;
    live_.clear(cell);
    --alive_;
    return range;
  }

  // The requested size of what lives at `begin`; 0 if nothing does.
  std::size_t requested_at(Offset begin) const noexcept;

  // The start of the smallest free range of at least `bytes` below `limit`, at a multiple of `alignment`; `limit` if none.
  Offset find_hole(std::size_t bytes, std::size_t alignment, Offset limit) const;
  std::size_t alive() const noexcept { return alive_; }
  std::size_t strangers() const noexcept { return strangers_.size(); }
  Offset end_of_last() const noexcept;  // the arena may shrink down to this
  std::size_t table_bytes() const noexcept;
  std::vector<std::pair<Offset, Offset>> live_ranges() const;

 private:
  bool strangers_free(Offset begin, Offset end) const noexcept;
  Range release_stranger(Offset begin) noexcept;
  std::uint32_t slot_of(Offset start) const noexcept {
    return static_cast<std::uint32_t>((start * 0x9E3779B97F4A7C15ull) >> shift_);
  }

  std::vector<Offset> starts_;           // of the cells, sorted
  std::vector<Range> ranges_;            // what lives at each cell
  std::vector<std::uint32_t> index_{BitSet::kNone, BitSet::kNone};  // open-addressing hash: start -> cell
  unsigned shift_ = 63;
  BitSet live_;
  std::map<Offset, Range> strangers_;
  std::size_t alive_ = 0;
};

}  // namespace mempool
