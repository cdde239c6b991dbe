// One recurring iteration as the pool replays it: the expected sizes in order, and the planned address of each.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include "live.hpp"
#include "occupancy.hpp"
#include "rarely.hpp"

namespace mempool {

inline constexpr Offset kDynamic = ~Offset{0};  // this position is left to the fallback
inline constexpr std::uint32_t kWindow = 8;     // sizes that are enough to recognise a place in a pattern

// The same places as disjoint ranges in order.
std::vector<std::pair<Offset, Offset>> joined(std::vector<std::pair<Offset, Offset>> ranges);

struct Slot {
  Offset offset = kDynamic;            // from the arena's base
  std::uint32_t cell = 0;              // of `offset` in the occupancy
  std::uint32_t cells_before_end = 0;  // cells that start below offset + size
};

class Follower;

// What one sequence (the allocations of one thread on one stream) does in the pattern.
struct Table {
  std::uint32_t sequence = 0;           // the sequence that was recorded; a loaded pattern counts threads from 0
  Stream stream = 0;
  std::vector<std::uint64_t> sizes;     // bytes requested, by position; at least one. Of an envelope: at most
  std::vector<std::uint64_t> least;     // of an envelope: bytes requested at least; else empty
  std::vector<Slot> slots;              // [position * unroll + iteration % unroll]
  std::vector<std::uint64_t> prefixes;  // hash of all sizes before each position, and of all
  std::vector<std::uint32_t> marks;     // warm-up: the position at each mark
  std::uint64_t phase = 0;              // the count of the sequence's allocations at which position 0 was last due
  mutable const Follower* player = nullptr;  // who was the last to follow it

  // Fills `prefixes` and the index behind `place_after`. `cyclic`: position 0 follows the last.
  void build_index(bool cyclic);
  // The only position that follows these kWindow sizes (oldest first), or the number of positions if none or several.
  std::uint32_t place_after(const std::uint64_t* window) const noexcept;
  // Whether a request of this size may have the position's place.
  bool fits(std::uint32_t position, std::uint64_t size) const noexcept {
    return sizes[position] == size || (!least.empty() && least[position] <= size && size < sizes[position]);
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
};

struct Pattern : Live<Pattern> {
  std::uint64_t id = 0;
  bool cyclic = true;          // false: a warm-up, which `next` follows
  bool marked = false;         // of a warm-up: the program marks its iterations
  std::uint32_t unroll = 1;    // iterations after which addresses repeat
  std::size_t arena_bytes = 0;
  std::uint32_t calm = 0;      // the position of the first table before which least is alive
  std::vector<Table> tables;   // the first is the one whose end is the iteration's end
  Pattern* next = nullptr;     // the pattern that followed last time
  std::uint64_t iterations = 0;  // begun
  std::uint64_t last_used = 0;   // the client's iteration in which it was
  unsigned unused = 0;           // rounds of rest_unused() in a row in which nobody followed it
  bool rests = false;            // for so long that no arena is kept for it
  Rarely asks{4, 1024};          // the client's iterations; for an arena that was refused
  std::vector<std::pair<Offset, Offset>> reach;  // where its buffers lie: disjoint ranges in order

  // Calls visit(table, slot, bytes requested) for each planned buffer, once for each unrolled iteration.
  template <class Visit>
  void each_planned(Visit visit) {
    for (Table& table : tables) {
      for (std::size_t i = 0; i < table.slots.size(); ++i) {
        if (table.slots[i].offset != kDynamic) visit(table, table.slots[i], table.sizes[i / unroll]);
      }
    }
  }
  void settle_reach();  // to be called when the offsets are known for good
  // Whether the other expects the same sizes in the same sequences.
  bool same_sizes(const Pattern& other) const noexcept;
  // Whether each request that the other has a place for has one here, at the same position.
  bool serves(const Pattern& other) const noexcept;
  // It is for iterations of many kinds that differ in sizes only, and has places for the largest.
  bool is_envelope() const noexcept { return !tables.front().least.empty(); }
  const Table* table_of(std::uint32_t sequence, Stream stream) const noexcept {
    for (const Table& table : tables) {
      if (table.sequence == sequence && table.stream == stream) return &table;
    }
    return nullptr;
  }
};

}  // namespace mempool
