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
// boundaries; an arena that served longer resets the backoff of conversions to segments
constexpr std::uint64_t kServedLong = 64;

}  // namespace

// On a device with pages, reserve ample address space so that a later plan can grow the arena in place.
bool Pool::reserve_arena(std::size_t bytes) noexcept {
  const std::size_t roomy = std::max(bytes * 4, std::size_t{64} << 30);
  for (const std::size_t space : {source_.traits().page == 0 ? bytes : roomy, bytes}) {
    arena_base_ = source_.reserve(space, source_.traits().alignment);
    arena_space_ = space;
    if (arena_base_ != 0 || space == bytes) break;
  }
  arena_bytes_ = 0;
  if (arena_base_ != 0 && source_.traits().page == 0) arena_bytes_ = bytes;
  if (arena_base_ != 0) live_arena_.emplace();
  arena_since_ = boundaries();
  return arena_base_ != 0;
}

Refusal Pool::take_arena(std::size_t bytes) noexcept {
  const std::size_t before = arena_bytes_;
  const Refusal why = try_arena(bytes);
  if (why != Refusal::none || arena_bytes_ != before) flight::note(flight::arena, 0, static_cast<int>(why), before, arena_bytes_);
  if (why != Refusal::none && why != Refusal::pending) ++arena_refused_;
  if (why != Refusal::none && why != Refusal::pending && why != Refusal::alive) drain_.cancel(boundaries());
  return why;
}

Refusal Pool::try_arena(std::size_t bytes) noexcept {
  if (bytes > kMostArena) return Refusal::insufficient_memory;
  const std::size_t wanted = source_.round_to_page(bytes);
  if (wanted <= arena_bytes_) return Refusal::none;
  if (source_.held()) return Refusal::captured;
  // An arena that cannot grow in place is replaced, and only while empty: live buffers never move. If live
  // ranges prevent the replacement now, free memory is not given back.
  collect();
  const bool in_place = arena_base_ != 0 && wanted <= arena_space_;
  if (arena_base_ != 0 && !in_place && occupancy_.alive() != 0) {
    drain_for(wanted);
    return Refusal::alive;
  }
  if (!within_budget(wanted, in_place)) return Refusal::budget;
  if (!could_be_reserved(wanted, in_place)) return Refusal::insufficient_memory;
  trim();
  const std::size_t before = arena_bytes_;
  if (arena_base_ != 0 && !in_place && !release_arena()) return Refusal::device;
  if (HostedMemory* const hosted = device_->hosted(); hosted != nullptr && hosted->request(wanted)) return Refusal::pending;
  if (arena_base_ == 0 && !reserve_arena(wanted)) {
    // Smaller plans continue in a new arena of the same size as the one released for this attempt.
    if (before != 0 && reserve_arena(before) && source_.commit(arena_base_, before)) arena_bytes_ = before;
    return Refusal::device;
  }
  if (wanted > arena_bytes_ && !source_.commit(arena_base_ + arena_bytes_, wanted - arena_bytes_)) return Refusal::device;
  arena_bytes_ = std::max(arena_bytes_, wanted);
  return Refusal::none;
}

void Pool::drain_for(std::size_t arena_bytes) noexcept try {
  if (source_.has_budget()) return;  // buffers without a slot would be offloaded
  const auto alive = occupancy_.live_ranges();
  std::size_t beside = 0;
  for (const auto& [begin, end] : alive) beside += end - begin;
  if (!could_be_reserved(arena_bytes + beside, false)) return drain_.cancel(boundaries());
  drain_.add(alive, boundaries());
} catch (...) {  // no host memory to remember the drained places
}

void Pool::end_drain_unless_needed() noexcept {
  if (drain_.any() && planned_bytes() <= arena_bytes_) drain_.cancel(boundaries());
}

bool Pool::within_budget(std::size_t arena_bytes, bool in_place) const noexcept {
  const std::size_t stays = source_.reserved().current - segments_.retained() - (in_place ? 0 : arena_bytes_);
  const std::size_t more = arena_bytes - (in_place ? arena_bytes_ : 0);
  return stays <= source_.budget() && more <= source_.budget() - stays;
}

std::ptrdiff_t Pool::room() const noexcept {
  // Both ends of an allocation may share a page with other memory.
  const std::size_t held = source_.reserved().current - segments_.retained() + 2 * source_.traits().page;
  const std::size_t budget = std::min(source_.budget(), std::size_t{1} << 62);
  const auto left = static_cast<std::ptrdiff_t>(budget) - static_cast<std::ptrdiff_t>(held);
  return arena_bytes_ == 0 ? left : std::max(left, static_cast<std::ptrdiff_t>(occupancy_.largest_hole(arena_bytes_)));
}

// Return true if, as far as known, the limit and the device allow such an arena once all free memory is given
// back.
bool Pool::could_be_reserved(std::size_t arena_bytes, bool in_place) noexcept {
  const std::size_t stays = segments_.kept_bytes() + (in_place ? arena_bytes_ : 0);
  return fits_with(stays, arena_bytes - (in_place ? arena_bytes_ : 0));
}

// Return true if `more` bytes fit after all held memory except `stays` bytes is given back.
bool Pool::fits_with(std::size_t stays, std::size_t more) noexcept {
  const std::size_t limit = source_.limit_beside_others();
  if (stays > limit || more > limit - stays) return false;
  if (source_.traits().prefetches) return true;  // the device may be oversubscribed
  const DeviceMemory memory = device_->memory();
  return memory.total == 0 || more <= memory.free + (source_.reserved().current - stays);
}

bool Pool::fits_twice() noexcept {
  HostedMemory* const hosted = device_->hosted();
  return hosted != nullptr ? arena_bytes_ <= hosted->room() : could_be_reserved(2 * arena_bytes_, true);
}

bool Pool::fits_in_arena_pages(std::size_t bytes) noexcept {
  const std::size_t page = source_.traits().page;
  if (page == 0 || arena_bytes_ == 0) return false;
  std::size_t free = arena_bytes_;
  Offset until = 0;  // end of the pages counted as occupied so far
  occupancy_.each_live([&](Offset begin, Offset end) {
    const Offset first = std::max(until, begin / page * page), last = (end + page - 1) / page * page;
    if (last > first) free -= std::min<std::size_t>(free, last - first);
    until = std::max(until, last);
  });
  return fits_with(source_.reserved().current - free, bytes);
}

bool Pool::release_arena() noexcept {
  if (arena_base_ == 0) return true;
  collect();
  if (occupancy_.alive() != 0 || source_.held()) return false;
  if (!source_.release(arena_base_, arena_space_, arena_bytes_)) return false;
  forget_arena();
  return true;
}

void Pool::forget_arena() noexcept {
  flight::note(flight::arena, 0, 0, arena_bytes_, 0);
  arena_base_ = arena_bytes_ = arena_space_ = 0;
  live_arena_.reset();
  drain_.done();
  streams_.clear();
  occupancy_.reset_stream_indices();
}

bool Pool::convert_arena_to_segments(Stream stream) noexcept try {
  const auto ranges = occupancy_.live_ranges();
  std::vector<Segments::Living> living;
  living.reserve(ranges.size());
  for (const auto& [begin, end] : ranges) {
    const Occupancy::LiveRange lives = occupancy_.at(begin);
    const Address address = arena_base_ + begin;
    living.push_back({address, end - begin, streams_.stream_of(lives.stream_index), lives.owner, planned_offset_of(address)});
  }
  segments_.adopt(arena_base_, arena_space_, arena_bytes_, living, stream);
  for (const auto& [begin, end] : ranges) occupancy_.release(begin);
  for (Client* const client : clients_) client->decide(Decision::converted, 0, 0, 0, arena_bytes_);
  forget_arena();
  if (boundaries() - arena_since_ > kServedLong) conversion_backoff_.start_over();
  conversion_backoff_.done(boundaries());
  ++conversions_;
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
  if (needed >= arena_bytes_ || source_.held()) return;
  if (needed == 0) {
    release_arena();
    return;
  }
  if (source_.traits().page == 0) return;
  if (!source_.decommit(arena_base_ + needed, arena_bytes_ - needed)) return;
  flight::note(flight::arena, 0, 0, arena_bytes_, needed);
  arena_bytes_ = needed;
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
