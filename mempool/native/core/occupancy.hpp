// The overlap guard: the live ranges of the arena. A planned address is handed out only if no live range
// intersects the slot, no matter which plan, iteration or fallback request placed the range.
//
// Live ranges never intersect, so [begin, end) is free exactly if the last live range that starts before
// `end` has ended by `begin`. Every planned start is a planned slot (*slot* in the code), known when plans
// are installed; a hierarchical bitmap over the slots finds the last live one in O(log64 slots). A range that
// starts elsewhere (a fallback block in a hole, a buffer of a dropped plan) is an unplanned range (*unplanned*
// in the code) in an ordered map, which is empty in the steady state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "core/guards.hpp"
#include "core/owners.hpp"

namespace mempool {

using Offset = std::uint64_t;  // bytes from the arena's base
using StreamIndex = std::uint8_t;     // index of a stream that uses the arena: see arena_streams.hpp

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
  void set_planned_slots(const std::vector<Offset>& starts);
  std::uint32_t slot_at(Offset start) const noexcept;        // BitSet::kNone: no planned slot starts there
  std::uint32_t slots_before(Offset end) const noexcept;     // number of planned slots that start below `end`

  // Overlap guard for a range whose slots_before(end) is known. The pool's promise rests on this check: never
  // skip it.
  bool is_free(Offset begin, Offset end, std::uint32_t slots_before_end) const noexcept {
    if (MEMPOOL_GUARDED("planned_slots") && slots_before_end != 0) {
      const std::uint32_t last = live_.last_up_to(slots_before_end - 1);
      if (last != BitSet::kNone && slots_[last].end > begin) return false;
    }
    return unplanned_.empty() || !MEMPOOL_GUARDED("unplanned_ranges") || clear_of_unplanned(begin, end);
  }
  void take_slot(std::uint32_t slot, Offset end) noexcept {
    slots_[slot].end = end;
    live_.set(slot);
    ++alive_;
  }
  // Set the line of the live range in a slot; required for every index except 0.
  void set_stream_index(std::uint32_t slot, StreamIndex stream_index) noexcept { holders_[slot].stream_index = stream_index; }
  void reset_stream_indices() noexcept {  // call only with no live range left
    for (Holder& holders : holders_) {
      if (MEMPOOL_GUARDED("stream_index")) holders.stream_index = 0;
    }
  }
  void set_owner(std::uint32_t slot, Owner owner) noexcept { holders_[slot].owner = owner; }
  void set_owner_at(Offset begin, Owner owner) noexcept;  // of the live range that starts at `begin`
  void take(Offset begin, Offset end, StreamIndex stream_index);
  // End the live range that starts at `begin`. Return its end, or 0 if no live range starts there.
  Offset release(Offset begin) noexcept;
  // End (0: no live range), stream index and owner of the live range that starts at `begin`.
  struct LiveRange {
    Offset end;
    StreamIndex stream_index;
    Owner owner;
  };
  LiveRange at(Offset begin) const noexcept;
  Offset end_at(Offset begin) const noexcept { return at(begin).end; }

  // Return the start of the smallest free range of at least `bytes` below `limit`, aligned to `alignment`;
  // `limit` if none exists. With more than kHolesExamined live ranges, a search examines only the gaps
  // between the next kHolesExamined ranges and the gap behind the last range.
  Offset find_hole(std::size_t bytes, std::size_t alignment, Offset limit);
  // False: a search found no hole of so many bytes or fewer, and no range has been released since.
  bool may_have_hole(std::size_t bytes, Offset limit) const noexcept { return bytes < no_hole_ || limit != no_hole_below_; }
  static constexpr std::size_t kHolesExamined = 256;
  Offset largest_hole(Offset limit) const noexcept;  // bytes of the largest free range below `limit`
  // A live range that intersects [begin, end); {0, 0} if none does.
  struct Range {
    Offset begin = 0, end = 0;
  };
  Range overlapping(Offset begin, Offset end) const noexcept;
  std::size_t alive() const noexcept { return alive_; }
  Offset end_of_last() const noexcept;  // lower limit for shrinking the arena
  std::size_t table_bytes() const noexcept;
  std::vector<std::pair<Offset, Offset>> live_ranges() const;
  // Call visit(begin, end) for each live range, in order.
  template <class Visit>
  void each_live(Visit visit) const {
    walk(0, [&](Offset begin, Offset end) { return visit(begin, end), true; });
  }

 private:
  static constexpr std::size_t kAnyBytes = ~std::size_t{0};

  struct PlannedSlot {
    Offset start = 0;
    Offset end = 0;  // of the live range; 0: the slot is free
  };

  // Call visit(begin, end) for live ranges that start at `from` or later, in order, until visit returns
  // false.
  template <class Visit>
  void walk(Offset from, Visit&& visit) const;
  bool clear_of_unplanned(Offset begin, Offset end) const noexcept;
  std::uint32_t bucket_of(Offset start) const noexcept;

  std::vector<PlannedSlot> slots_;              // sorted by start
  struct Holder {
    StreamIndex stream_index = 0;
    Owner owner = 0;
  };
  // stream index and owner of each slot's live range; a separate array because one stream and one client need neither
  std::vector<Holder> holders_;
  std::vector<std::uint32_t> index_;     // open-addressing hash table: start -> slot
  unsigned shift_ = 63;
  BitSet live_;
  std::map<Offset, LiveRange> unplanned_;    // by begin
  std::size_t alive_ = 0;
  Offset hole_cursor_ = 0;               // start of the next search for a hole
  std::size_t no_hole_ = kAnyBytes;      // the fewest bytes that a search found no hole for since the last release
  Offset no_hole_below_ = 0;             // limit of that search
};

template <class Visit>
void Occupancy::walk(Offset from, Visit&& visit) const {
  auto unplanned = unplanned_.lower_bound(from);
  const auto next_slot = [&](std::uint32_t slot) {
    return slot >= slots_.size() ? BitSet::kNone : live_.first_from(slot);
  };
  for (std::uint32_t slot = next_slot(slots_before(from)); slot != BitSet::kNone || unplanned != unplanned_.end();) {
    Offset begin = 0, end = 0;
    if (slot != BitSet::kNone && (unplanned == unplanned_.end() || slots_[slot].start < unplanned->first)) {
      begin = slots_[slot].start;
      end = slots_[slot].end;
      slot = next_slot(slot + 1);
    } else {
      begin = unplanned->first;
      end = unplanned->second.end;
      ++unplanned;
    }
    if (!visit(begin, end)) return;
  }
}

}  // namespace mempool
