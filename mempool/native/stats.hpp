// Counters. They live under the pool's lock, so they are plain integers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mempool {

// Bytes (or a count) now, at most, and ever.
struct Gauge {
  std::size_t current = 0;
  std::size_t peak = 0;
  std::size_t total = 0;

  void add(std::size_t amount) noexcept {
    current += amount;
    total += amount;
    if (current > peak) peak = current;
  }
  void sub(std::size_t amount) noexcept { current -= amount; }
};

// Where an allocation of at least the small-size threshold was served, and why not at a planned address.
enum class Outcome : std::uint8_t {
  hit,          // at its planned address
  unplanned,    // no plan was active: pass-through, recording, solving
  other_size,   // the plan expected another size here: an extra allocation, or a changed shape
  occupied,     // the planned address intersects something alive
  exhausted,    // after the last planned allocation of the iteration, before the mark
  dynamic,      // the plan leaves this position to the fallback
  lost,         // the sequence has left every known pattern
  no_arena,     // the arena could not be had
  other_stream, // its memory was another stream's, which cannot be waited for now
  outside,      // outside the marked regions or inside pool.dynamic()
  count
};

// Whether a better plan could have served it: not where none could, or it was asked to stay outside.
constexpr bool is_miss(Outcome outcome) noexcept {
  return outcome != Outcome::hit && outcome != Outcome::dynamic && outcome != Outcome::outside;
}

constexpr std::array<const char*, static_cast<std::size_t>(Outcome::count)> kOutcomeNames = {
    "hit",     "unplanned", "other_size", "occupied",     "exhausted",
    "dynamic", "lost",      "no_arena",   "other_stream", "outside"};

struct ClientStats {
  Gauge requested;  // bytes asked for
  Gauge live;       // bytes in use after rounding
  Gauge blocks;     // allocations
  Gauge small;      // allocations below the threshold, counted in `blocks` too
  Gauge small_requested;  // bytes asked for by these, counted in `requested` too
  Gauge small_live;       // and in use after rounding, counted in `live` too
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> outcomes{};
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> steady{};  // since the first plan took effect; filled in when asked for
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> latest{};  // since the latest did; likewise
  // Of the pool: freed, and waiting for other streams; filled in when asked for.
  std::size_t deferred_bytes = 0, deferred_blocks = 0;
  std::size_t deferred_small_bytes = 0, deferred_small_blocks = 0;
  std::uint64_t foreign_frees = 0;  // of addresses that are not ours; refused
  std::uint64_t double_frees = 0;   // of ours where nothing lives; refused
  std::uint64_t out_of_memory = 0;
};

}  // namespace mempool
