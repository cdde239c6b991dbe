// Counters, protected by the pool's lock and therefore plain integers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mempool {

// Current value, peak and total of a number of bytes or of a count.
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

// Result of an allocation above the small-size threshold: served at the planned address, or the reason
// for the miss.
enum class Outcome : std::uint8_t {
  hit,              // at the planned address
  unplanned,        // no plan was active: pass-through, recording, solving
  size_mismatch,    // the plan expected another size here: an extra allocation, or a changed shape
  slot_occupied,    // a live range intersects the planned address
  past_end,         // after the last planned allocation of the iteration, before the mark
  dynamic,          // the plan leaves this position to the fallback
  desynchronized,   // the sequence has left every known pattern
  no_arena,         // the arena could not be allocated
  other_stream,     // another stream used the memory last and cannot be waited for now
  out_of_iteration, // outside the marked regions or inside pool.dynamic()
  count
};

// Return true if a better plan could have served the request; false also for requests left out of the plan
// deliberately.
constexpr bool is_miss(Outcome outcome) noexcept {
  return outcome != Outcome::hit && outcome != Outcome::dynamic && outcome != Outcome::out_of_iteration;
}

constexpr std::array<const char*, static_cast<std::size_t>(Outcome::count)> kOutcomeNames = {
    "hit",     "unplanned",      "size_mismatch", "slot_occupied", "past_end",
    "dynamic", "desynchronized", "no_arena",      "other_stream",  "out_of_iteration"};

struct ClientStats {
  Gauge requested;  // bytes asked for
  Gauge live;       // bytes in use after rounding
  Gauge blocks;     // allocations
  Gauge small;      // allocations up to the small-size threshold, counted in `blocks` too
  Gauge small_requested;  // bytes asked for by small allocations, counted in `requested` too
  Gauge small_live;       // bytes in use after rounding, counted in `live` too
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> outcomes{};
  // since the first plan took effect; filled in on request
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> steady{};
  // since the latest plan took effect; filled in on request
  std::array<std::uint64_t, static_cast<std::size_t>(Outcome::count)> latest{};
  // Deferred frees of the pool, waiting for other streams; filled in on request.
  std::size_t deferred_bytes = 0, deferred_blocks = 0;
  std::size_t deferred_small_bytes = 0, deferred_small_blocks = 0;
  std::uint64_t foreign_frees = 0;  // frees of addresses that are not the pool's; refused
  std::uint64_t double_frees = 0;   // frees of addresses of the pool without a live buffer; refused
  std::uint64_t out_of_memory = 0;
};

}  // namespace mempool
