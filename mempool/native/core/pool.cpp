#include "core/pool.hpp"

#include <algorithm>
#include <utility>

#include "core/flight.hpp"
#include "core/client.hpp"

namespace mempool {
namespace {

#ifdef MEMPOOL_WORLD  // the simulated world's programs are small
constexpr std::size_t kLeastReassignedBytes = std::size_t{1} << 20;
#else
// bytes; less idle memory is not worth waiting for the device
constexpr std::size_t kLeastReassignedBytes = std::size_t{64} << 20;
#endif
constexpr std::size_t kMostReassignedStreams = 64;

}  // namespace

Pool::Pool(std::unique_ptr<Device> device, const PoolOptions& options)
    : options_(options),
      device_(std::move(device)),
      source_(*device_),
      small_(source_, options.small_bytes),
      segments_(source_),
      streams_(source_, options.share_streams, options.distinguished_streams),
      uses_(*device_),
      graphs_(source_) {
  flight::note(flight::pool_made, 0, 0, options.small_bytes, options.max_reserved, options.share_streams,
               reinterpret_cast<std::uintptr_t>(this));
  source_.set_limit(options.max_reserved);
  options_.small_bytes = small_.largest();
}

Pool::~Pool() {
  if (arena_.base() != 0) source_.release_anyway(arena_.base(), arena_.space(), arena_.bytes());
}

void Pool::read_traits() noexcept {
  if (source_.reserved().current != 0 || arena_.base() != 0) return;
  source_.read_traits();
  segments_.use_traits();
}

std::size_t Pool::table_bytes() const noexcept {
  std::size_t bytes = occupancy_.table_bytes();
  for (const Client* client : clients_) {
    for (const Pattern* pattern : client->patterns()) {
      for (const Table& table : pattern->tables) bytes += table.bytes();
    }
  }
  return bytes;
}

Address Pool::allocate_small(std::size_t bytes, Stream stream) noexcept try {
  if (const Address address = small_.allocate(bytes, stream)) return address;
  ++retries_;
  trim();
  return small_.allocate(bytes, stream);
} catch (...) {
  return 0;
}

Pool::Given Pool::from_segments(std::size_t bytes, Stream stream, Segments::Effort effort) {
  const Block* block = segments_.allocate(bytes, stream, effort);
  if (block == nullptr) return {};
  return {block->address, block->size, block->fresh && source_.traits().fresh_is_zero};
}

Pool::Given Pool::allocate_in_hole(std::size_t bytes, Stream stream) noexcept try {
  return from_hole(bytes, stream, true);
} catch (...) {  // no host memory for the record
  return {};
}

Pool::Given Pool::from_idle_hole(std::size_t bytes, Stream stream) {
  return arena_.state() == ArenaState::draining ? Given{} : from_hole(bytes, stream, false);
}

// `anywhere`: the range may lie where plans place buffers of another stream, which will then wait for this
// stream.
Pool::Given Pool::from_hole(std::size_t bytes, Stream stream, bool anywhere) {
  if (arena_.bytes() == 0 || forked_) return {};
  const Offset begin = occupancy_.find_hole(bytes, source_.traits().alignment, arena_.bytes());
  return begin == arena_.bytes() ? Given{} : claim(begin, bytes, stream, anywhere);
}

// Claim a range under the same guard as for planned addresses. `anywhere`: streams may share memory that no
// plan shares between them.
Pool::Given Pool::claim(Offset begin, std::size_t bytes, Stream stream, bool anywhere) {
  const Offset end = begin + std::max<std::size_t>(bytes, 1);
  const bool free = occupancy_.is_free(begin, end, occupancy_.slots_before(end)) || !MEMPOOL_GUARDED("hole");
  if (end > arena_.bytes() || !free || !(anywhere || streams_.plans_only(begin, end, stream))) return {};
  const StreamIndex stream_index = streams_.prepare(begin, end, stream);
  if (stream_index == ArenaStreams::kNone) return {};
  occupancy_.take(begin, end, stream_index);
  return {arena_.base() + begin, round_up(bytes), false};
}

void Pool::note_planned_offset(Address address, Offset place) noexcept {
  if (Block* const block = segments_.find(address)) block->place = place;
}

Offset Pool::planned_offset_of(Address address) noexcept {
  if (arena_holds(address)) {
    const Offset begin = address - arena_.base();
    return occupancy_.slot_at(begin) == BitSet::kNone ? kDynamic : begin;
  }
  static_assert(Block::kNoPlace == kDynamic);
  const Block* const block = segments_.find(address);
  return block == nullptr ? kDynamic : block->place;
}

Pool::Given Pool::take_place(Offset begin, std::size_t bytes, Stream stream) {
  return begin > arena_.bytes() || forked_ ? Given{} : claim(begin, bytes, stream, true);
}

Pool::Given Pool::last_resort(std::size_t bytes, Stream stream) {
  ++retries_;
  trim();
  Given given = from_segments(bytes, stream, Segments::Effort::last_resort);
  if (given.address == 0) given = from_hole(bytes, stream, true);
  if (given.address != 0 || source_.held()) return given;
  ++waits_;
  if (!synchronize()) return given;
  segments_.give_free_blocks_to(stream);
  trim();
  if (source_.traits().page != 0) {
    for (Client* client : clients_) client->forget_unused();
  }
  shrink_arena();
  given = from_segments(bytes, stream, Segments::Effort::last_resort);
  // Rather give up the plan than raise an out-of-memory error: the arena's free memory may suffice in total although no
  // single hole does.
  if (given.address != 0 || !fits_in_arena_pages(bytes) || !convert_arena_to_segments(stream)) return given;
  trim();
  return from_segments(bytes, stream, Segments::Effort::last_resort);
}

// Reassign idle memory of other streams. Destroyed streams are not reported, and memory freed on one stream serves no
// other. If more such memory is idle than was ever in use, the pool waits for the device and reassigns the idle memory
// to the requesting stream, instead of reserving more. If a stream that lost memory returns, the permitted share of
// idle memory doubles.
void Pool::reassign_idle_memory(std::size_t bytes, Stream stream) {
  const std::size_t used = source_.reserved().current - arena_.bytes() - segments_.retained();
  peak_outside_arena_ = std::max(peak_outside_arena_, used + bytes);
  const auto back = std::find(reassigned_streams_.begin(), reassigned_streams_.end(), stream);
  if (back != reassigned_streams_.end()) {
    reassigned_streams_.erase(back);
    idle_factor_ *= 2;
  }
  const std::size_t others = segments_.idle_of_others(stream);
  if (others < kLeastReassignedBytes || others / idle_factor_ <= peak_outside_arena_ || source_.held() || !synchronize()) return;
  ++waits_;
  segments_.each_idle_stream([&](Stream one) {
    if (one == stream) return;
    if (reassigned_streams_.size() == kMostReassignedStreams) reassigned_streams_.erase(reassigned_streams_.begin());
    reassigned_streams_.push_back(one);
  });
  segments_.give_free_blocks_to(stream);
}

Pool::Given Pool::allocate_dynamic(std::size_t bytes, Stream stream, bool holes) noexcept {
  try {
    Given given = from_segments(bytes, stream, Segments::Effort::reuse);
    // under a budget, holes are the last resort, since long-lived buffers would block plans
    const bool budget = source_.has_budget();
    if (given.address == 0 && holes && !budget) given = from_idle_hole(bytes, stream);
    if (given.address == 0) reassign_idle_memory(bytes, stream);
    if (given.address == 0 && budget && !source_.keep_budget(source_.round_to_page(bytes))) given = from_hole(bytes, stream, true);
    if (given.address == 0) given = from_segments(bytes, stream, Segments::Effort::normal);
    if (given.address == 0) given = last_resort(bytes, stream);
    return given;
  } catch (...) {
    return {};
  }
}

Pool::Freed Pool::at(Address address) noexcept {
  if (!uses_.empty() && uses_.waits(address)) return {Freed::dead};
  if (arena_holds(address)) {
    const Offset begin = address - arena_.base();
    const Occupancy::LiveRange lives = occupancy_.at(begin);
    if (lives.end == 0) return {Freed::dead};
    return {Freed::arena, lives.end - begin, round_up(lives.end - begin), streams_.stream_of(lives.stream_index), lives.owner};
  }
  if (const OutsideBuffers::Buffer* const buffer = outside_.find(address)) {
    return {Freed::outside, buffer->requested, round_up(buffer->requested), buffer->stream, buffer->owner};
  }
  if (const SmallBlocks::Place place = small_.find(address); place.in_a_region) return small_at(place);
  if (const Block* block = segments_.find(address)) {
    return {Freed::segment, block->requested, block->size, block->stream, block->owner};
  }
  Segments* in = nullptr;
  if (const Block* block = graphs_.find(address, in)) {
    return {Freed::graph, block->requested, block->size, block->stream, block->owner};
  }
  return {owns(address) ? Freed::dead : Freed::foreign};
}

Pool::Freed Pool::small_at(const SmallBlocks::Place& place) const noexcept {
  if (!place.is_live()) return {Freed::dead};
  const auto [requested, rounded, stream, owner] = small_.at(place);
  return {Freed::small, requested, rounded, stream, owner};
}

Pool::Freed Pool::free(Address address, Stream stream) noexcept {
  if (uses_.empty() || !uses_.has(address)) return free_now(address, stream);
  const Freed freed = at(address);
  if (!freed.is_live()) return freed;  // already freed, with the release deferred
  wait_for_uses(address, freed, freed.kind != Freed::arena && add_use(address, freed, stream) ? freed.stream : stream);
  return freed;
}

// Defer the release: the program has freed the buffer, and the memory becomes free on `stream` when the
// streams that use the buffer have completed.
void Pool::wait_for_uses(Address address, const Freed& freed, Stream stream) noexcept {
  deferred_.add(freed.rounded);
  if (is_small(freed)) deferred_small_.add(freed.rounded);
  uses_.free(address, stream);
  collect();
}

// Count the freeing stream as a user of the buffer. False: no host memory to remember the use.
bool Pool::add_use(Address address, const Freed& freed, Stream stream) noexcept try {
  if (stream != freed.stream) uses_.add(address, stream);
  return true;
} catch (...) {
  return false;
}

// Return memory freed by another stream to the own stream once the freeing stream has completed, so that
// neither stream waits for the other. False: the release is deferred, or, if the host has no memory and the driver
// orders no streams, the memory is lost.
bool Pool::hand_back(Address address, const Freed& freed, Stream stream) noexcept {
  if (stream == freed.stream) return true;
  if (add_use(address, freed, stream)) {
    wait_for_uses(address, freed, freed.stream);
    return false;
  }
  for (int attempt = 0; attempt < 8; ++attempt) {
    if (source_.order(stream, freed.stream)) return true;
  }
  return false;
}

Pool::Freed Pool::free_small(const SmallBlocks::Place& place, Address address, Stream stream) noexcept {
  const Freed freed = small_at(place);
  if (freed.is_live() && hand_back(address, freed, stream)) small_.free(place);
  return freed;
}

Pool::Freed Pool::free_now(Address address, Stream stream) noexcept {
  if (arena_holds(address)) {
    const Freed freed = at(address);
    if (freed.is_live()) release_in_arena(address, stream);
    return freed;
  }
  if (const SmallBlocks::Place place = small_.find(address); place.in_a_region) return free_small(place, address, stream);
  Segments* in = &segments_;
  Block* block = segments_.find(address);
  if (block == nullptr) block = graphs_.find(address, in);
  if (block == nullptr) return {owns(address) ? Freed::dead : Freed::foreign};
  const Freed freed{in == &segments_ ? Freed::segment : Freed::graph, block->requested, block->size, block->stream, block->owner};
  if (!hand_back(address, freed, stream)) return freed;
  in->free(block);
  if (freed.kind == Freed::graph) graphs_.trim();
  return freed;
}

Pool::Range Pool::reservation_of(Address address) noexcept {
  if (arena_holds(address)) return {arena_.base(), arena_.bytes()};
  if (small_.owns(address)) return {address / SmallBlocks::kRegion * SmallBlocks::kRegion, SmallBlocks::kRegion};
  Segments* in = nullptr;
  const Block* block = segments_.find(address);
  if (block == nullptr) block = graphs_.find(address, in);
  return block == nullptr ? Range{address, 0} : Range{block->segment->base, block->segment->size};
}

// --- more than one stream

bool Pool::use(Address address, Stream stream) {
  const Freed found = at(address);
  if (!found.is_live() || found.stream == stream) return false;
  if (found.kind != Freed::outside) uses_.add(address, stream);
  return true;
}

void Pool::collect_deferred() noexcept {
  for (ForeignUses::Freed through = uses_.next(true); through.address != 0; through = uses_.next(false)) {
    const Freed freed = free_now(through.address, through.stream);
    deferred_.sub(freed.rounded);
    if (is_small(freed)) deferred_small_.sub(freed.rounded);
  }
}

bool Pool::synchronize() noexcept {
  if (!device_->synchronize()) return false;
  streams_.synchronized();
  uses_.synchronized();
  collect();
  return true;
}

// --- graphs

void Pool::begin_graph(GraphPools::Id id, GraphPools::Filter filter) {
  flight::note(flight::begin_graph, 0, 0, id.first, id.second);
  graphs_.begin(id, std::move(filter));
  if (!graphs_.hold(id)) return;
  source_.hold();
  uses_.pause();
}

void Pool::end_graph(GraphPools::Id id, bool still) noexcept {
  flight::note(flight::end_graph, 0, 0, id.first, id.second);
  graphs_.end(id);
  if (still || !graphs_.let_go(id)) return;
  source_.end_hold();
  uses_.resume();
  collect();
  graphs_.trim();  // memory released during the capture
}

void Pool::release_graph(GraphPools::Id id) noexcept {
  flight::note(flight::release_graph, 0, 0, id.first, id.second);
  graphs_.release(id);
  graphs_.trim();
}

bool Pool::allocate_for_graph(std::size_t bytes, Stream stream, Given& given) noexcept {
  Segments* const segments = graphs_.of(stream);
  if (segments == nullptr || !MEMPOOL_GUARDED("graph")) return false;
  try {
    if (const Block* block = segments->allocate(bytes, stream, Segments::Effort::last_resort)) {
      given = {block->address, block->size, block->fresh && source_.traits().fresh_is_zero};
    }
  } catch (...) {  // no host memory for a block's record
  }
  return true;
}

void Pool::hold(bool held) noexcept {
  if (std::exchange(held_, held) == held) return;
  if (held) {
    source_.hold();
    uses_.pause();
  } else {
    source_.end_hold();
    uses_.resume();
    collect();
  }
}

Pool::Given Pool::resize(Address old, std::size_t bytes, Stream stream, Freed& before) noexcept {
  // another stream may still work on the present contents
  if (uses_.has(old) && MEMPOOL_GUARDED("resize_shared")) return {};
  Block* const block = segments_.find(old);
  if (block == nullptr) return {};
  before = {Freed::segment, block->requested, block->size, block->stream, block->owner};
  if (!segments_.resize(block, bytes, stream)) return {};
  return {block->address, block->size, false};
}

void Pool::trim() noexcept {
  collect();
  graphs_.trim();
  segments_.trim();
  small_.trim();
}

void Pool::return_idle() noexcept {
  if (source_.traits().slow_return) return;
  segments_.next_epoch();
  segments_.trim(segments_.epoch() - 2);
}

void Pool::return_idle_after(Client& client) noexcept {
  client.reached_boundary = true;
  for (const Client* one : clients_) {
    if (one->replaying() && !one->reached_boundary) return;
  }
  for (Client* one : clients_) one->reached_boundary = false;
  return_idle();
}

bool Pool::release_idle_outside_arena() noexcept {
  if (!source_.traits().slow_return) return false;
  bool held = false;
  segments_.each_idle_stream([&](Stream stream) { held = held || source_.held_for(stream); });
  if (held) return false;
  const std::size_t before = segments_.retained();
  segments_.next_epoch();
  segments_.trim(segments_.epoch() - 1);
  return segments_.retained() < before;
}

bool Pool::another_client_replays(const Client* but) const noexcept {
  return std::any_of(clients_.begin(), clients_.end(),
                     [&](const Client* client) { return client != but && client->plays(); });
}

std::uint64_t Pool::boundaries() const noexcept {
  std::uint64_t sum = past_boundaries_;
  for (const Client* client : clients_) sum += client->iterations();
  return sum;
}

void Pool::apply_retained_limits() noexcept {
  std::size_t most = 0;
  for (const Client* client : clients_) most = std::max(most, client->retained());
  segments_.set_retained_limit(most);
}

Owner Pool::adopt(Client* client) {
  clients_.push_back(client);
  return owners_.enlist(client, live_blocks() - uses_.waiting());
}

void Pool::set_owner(Address address, Owner owner) noexcept {
  Segments* in = nullptr;
  if (arena_holds(address)) {
    occupancy_.set_owner_at(address - arena_.base(), owner);
  } else if (OutsideBuffers::Buffer* const buffer = outside_.find(address)) {
    buffer->owner = owner;
  } else if (const SmallBlocks::Place place = small_.find(address); place.is_live()) {
    small_.set_owner(place, owner);
  } else if (Block* const block = segments_.find(address)) {
    block->owner = owner;
  } else if (Block* const block = graphs_.find(address, in)) {
    block->owner = owner;
  }
  owners_.begins(owner);
}

void Pool::part(Client* client) noexcept {
  owners_.strike(client, live_blocks() - uses_.waiting());
  past_boundaries_ += client->iterations();
  layout_changed();
  clients_.erase(std::remove(clients_.begin(), clients_.end(), client), clients_.end());
}

ArenaStats Pool::arena_stats() const noexcept {
  return {arena_.bytes(), occupancy_.alive(), arena_refused_, arena_.conversions()};
}

}  // namespace mempool
