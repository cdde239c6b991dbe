// The arena of a pool: taken, grown, replaced while empty, shrunk, and converted to segments.
#include <algorithm>
#include <utility>

#include "core/client.hpp"
#include "core/flight.hpp"
#include "core/pool.hpp"
#include "devices/hosted_memory.hpp"

namespace mempool {
namespace {

// Upper limit on an arena in bytes. No plan needs more, and the limit keeps page rounding and the fourfold
// reservation clear of overflow.
constexpr std::size_t kMostArena = std::size_t{1} << 48;

}  // namespace

void Pool::arena_changed(ArenaEvent event, std::size_t before, std::size_t after) noexcept {
  flight::note(flight::arena, 0, 0, before, after);
  for (Client* const client : clients_) client->decide(Decision::arena, 0, static_cast<std::uint64_t>(event), 0, after == 0 ? before : after);
}

// Take an arena while there is none; return true if it has all `bytes`. On a device with pages, reserve ample address
// space, so that a later plan can grow the arena in place.
bool Pool::take_new_arena(std::size_t bytes) noexcept {
  const bool paged = source_.traits().page != 0;
  const std::size_t roomy = std::max(bytes * 4, std::size_t{64} << 30);
  std::size_t space = paged ? roomy : bytes;
  Address base = source_.reserve(space, source_.traits().alignment);
  if (base == 0 && paged) base = source_.reserve(space = bytes, source_.traits().alignment);
  if (base == 0) return false;
  const bool there = !paged || source_.commit(base, bytes);
  arena_.take(base, space, there ? bytes : 0, boundaries());
  return there;
}

Refusal Pool::take_arena(std::size_t bytes) noexcept {
  const Refusal why = try_arena(bytes);
  if (why == Refusal::none || why == Refusal::pending) return why;
  flight::note(flight::arena, 0, static_cast<int>(why), arena_.bytes(), arena_.bytes());
  ++arena_refused_;
  if (why != Refusal::alive) arena_.unblock(boundaries());
  return why;
}

Refusal Pool::try_arena(std::size_t bytes) noexcept {
  if (bytes > kMostArena) return Refusal::insufficient_memory;
  const std::size_t wanted = source_.round_to_page(bytes);
  if (wanted <= arena_.bytes()) return Refusal::none;
  if (source_.held()) return Refusal::captured;
  // An arena that cannot grow in place is replaced, and only while empty: live buffers never move. If live
  // ranges prevent the replacement now, free memory is not given back.
  collect();
  const bool in_place = arena_.base() != 0 && wanted <= arena_.space();
  if (arena_.base() != 0 && !in_place && occupancy_.alive() != 0) {
    drain_for(wanted);
    return Refusal::alive;
  }
  if (!within_budget(wanted, in_place)) return Refusal::budget;
  if (!could_be_reserved(wanted, in_place)) return Refusal::insufficient_memory;
  trim();
  const std::size_t before = arena_.bytes();
  if (arena_.base() != 0 && !in_place && !release_arena()) return Refusal::device;
  if (HostedMemory* const hosted = device_->hosted(); hosted != nullptr && hosted->request(wanted)) return Refusal::pending;
  if (arena_.state() == ArenaState::none) {
    if (take_new_arena(wanted)) return Refusal::none;
    // Smaller plans continue in a new arena of the same size as the one released for this attempt.
    if (before != 0 && arena_.state() == ArenaState::none) take_new_arena(before);
    return Refusal::device;
  }
  if (!source_.commit(arena_.base() + arena_.bytes(), wanted - arena_.bytes())) return Refusal::device;
  arena_.resize(wanted);
  return Refusal::none;
}

void Pool::drain_for(std::size_t arena_bytes) noexcept try {
  if (source_.has_budget()) return;  // buffers without a slot would be offloaded
  const auto alive = occupancy_.live_ranges();
  std::size_t beside = 0;
  for (const auto& [begin, end] : alive) beside += end - begin;
  if (!could_be_reserved(arena_bytes + beside, false)) return arena_.unblock(boundaries());
  arena_.block(alive, boundaries());
} catch (...) {  // no host memory to remember the drained places
}

void Pool::end_drain_unless_needed() noexcept {
  if (arena_.state() == ArenaState::draining && planned_bytes() <= arena_.bytes()) arena_.unblock(boundaries());
}

bool Pool::within_budget(std::size_t arena_bytes, bool in_place) const noexcept {
  const std::size_t stays = source_.reserved().current - segments_.retained() - (in_place ? 0 : arena_.bytes());
  const std::size_t more = arena_bytes - (in_place ? arena_.bytes() : 0);
  return stays <= source_.budget() && more <= source_.budget() - stays;
}

std::ptrdiff_t Pool::room() const noexcept {
  // Both ends of an allocation may share a page with other memory.
  const std::size_t held = source_.reserved().current - segments_.retained() + 2 * source_.traits().page;
  const std::size_t budget = std::min(source_.budget(), std::size_t{1} << 62);
  const auto left = static_cast<std::ptrdiff_t>(budget) - static_cast<std::ptrdiff_t>(held);
  return arena_.bytes() == 0 ? left : std::max(left, static_cast<std::ptrdiff_t>(occupancy_.largest_hole(arena_.bytes())));
}

// Return true if limit and device seem to permit such an arena after the release of all free memory.
bool Pool::could_be_reserved(std::size_t arena_bytes, bool in_place) noexcept {
  const std::size_t stays = segments_.kept_bytes() + (in_place ? arena_.bytes() : 0);
  return fits_with(stays, arena_bytes - (in_place ? arena_.bytes() : 0));
}

// Return true if `more` bytes fit after all held memory except `stays` bytes is given back.
bool Pool::fits_with(std::size_t stays, std::size_t more) noexcept {
  const std::size_t limit = source_.limit_beside_others();
  if (stays > limit || more > limit - stays) return false;
  if (source_.traits().prefetches) return true;  // the device may be oversubscribed
  const DeviceMemory memory = device_->memory();
  return memory.total == 0 || more <= memory.free + (source_.reserved().current - stays);
}

bool Pool::fits_twice() noexcept { return could_be_reserved(2 * arena_.bytes(), true); }

bool Pool::fits_in_arena_pages(std::size_t bytes) noexcept {
  const std::size_t page = source_.traits().page;
  if (page == 0 || arena_.bytes() == 0) return false;
  std::size_t free = arena_.bytes();
  Offset until = 0;  // end of the pages counted as occupied so far
  occupancy_.each_live([&](Offset begin, Offset end) {
    const Offset first = std::max(until, begin / page * page), last = (end + page - 1) / page * page;
    if (last > first) free -= std::min<std::size_t>(free, last - first);
    until = std::max(until, last);
  });
  return fits_with(source_.reserved().current - free, bytes);
}

bool Pool::release_arena() noexcept {
  if (arena_.base() == 0) return true;
  collect();
  if (occupancy_.alive() != 0 || source_.held()) return false;
  if (!source_.release(arena_.base(), arena_.space(), arena_.bytes())) return false;
  arena_.release();
  streams_.clear();
  occupancy_.reset_stream_indices();
  return true;
}

bool Pool::convert_arena_to_segments(Stream stream) noexcept try {
  const auto ranges = occupancy_.live_ranges();
  std::vector<Segments::Living> living;
  living.reserve(ranges.size());
  for (const auto& [begin, end] : ranges) {
    const Occupancy::LiveRange lives = occupancy_.at(begin);
    const Address address = arena_.base() + begin;
    living.push_back({address, end - begin, streams_.stream_of(lives.stream_index), lives.owner, planned_offset_of(address)});
  }
  segments_.adopt(arena_.base(), arena_.space(), arena_.bytes(), living, stream);
  for (const auto& [begin, end] : ranges) occupancy_.release(begin);
  arena_.convert(boundaries());
  streams_.clear();
  occupancy_.reset_stream_indices();
  return true;
} catch (...) {  // no host memory for the records
  return false;
}

std::size_t Pool::planned_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Client* client : clients_) bytes = std::max(bytes, client->needed_bytes());
  return bytes;
}

void Pool::shrink_arena(std::size_t bytes) noexcept {
  const std::size_t needed = source_.round_to_page(std::max<std::size_t>(bytes, occupancy_.end_of_last()));
  if (needed >= arena_.bytes() || source_.held()) return;
  if (needed == 0) {
    release_arena();
    return;
  }
  if (source_.traits().page == 0) return;
  if (!source_.decommit(arena_.base() + needed, arena_.bytes() - needed)) return;
  arena_.resize(needed);
}

void Pool::rebuild_slots() {
  std::vector<Offset> starts;
  std::vector<ArenaStreams::Planned> planned;
  for (const Client* client : clients_) {
    for (Pattern* pattern : client->patterns()) {
      pattern->each_planned([&](const Table& table, const Slot& slot, std::uint64_t bytes) {
        starts.push_back(slot.offset);
        planned.push_back({slot.offset, slot.offset + bytes, table.stream});
      });
    }
  }
  streams_.set_plans(planned);
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  occupancy_.set_planned_slots(starts);
  for (const Client* client : clients_) {
    for (Pattern* pattern : client->patterns()) {
      pattern->each_planned([&](const Table&, Slot& slot, std::uint64_t bytes) {
        slot.index = occupancy_.slot_at(slot.offset);
        slot.slots_before_end = occupancy_.slots_before(slot.offset + bytes);
      });
    }
  }
}

}  // namespace mempool
