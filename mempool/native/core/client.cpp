// The hot path of a client, and queries of the client's state.
#include "core/client.hpp"

#include <algorithm>
#include <utility>


namespace mempool {
namespace {

constexpr std::size_t kMostDivergences = 64;
#ifdef MEMPOOL_WORLD  // the simulated world's programs are small
constexpr std::size_t kFewSequences = 4;
#else
constexpr std::size_t kFewSequences = 64;  // sequences; fewer new ones are not worth a sweep
#endif

}  // namespace

Client::Client(std::shared_ptr<Pool> pool, std::string name)
    : pool_(std::move(pool)), name_(std::move(name)), uid_(0), ring_(pool_->options().recorded_events) {
  uid_ = ThreadCache::enlist(this);
  caches_ = ThreadCache::fresh_number();
  try {
    const Guarded guard(pool_->lock);
    owner_ = pool_->adopt(this);
    flight::note(flight::client_made, uid_, 0, reinterpret_cast<std::uintptr_t>(pool_.get()));
  } catch (...) {
    ThreadCache::strike(uid_);
    throw;
  }
}

Client::~Client() {
  ThreadCache::strike(uid_);
  const Guarded guard(pool_->lock);
  flight::note(flight::client_gone, uid_, 0);
  pool_->part(this);
  if (pool_->source().log().history() == &history_) pool_->source().log().end();
  try {
    pool_->rebuild_slots();  // without this client's plans
  } catch (...) {            // keep the old slots, which are correct but more than needed
  }
  pool_->shrink_arena();
  if (retained_ != 0) pool_->apply_retained_limits();
}

// --- coordination with other clients

bool Client::plays() const noexcept {
  return replaying_ && std::any_of(sequences_.begin(), sequences_.end(), [](const Sequence& one) {
           return (one.follower.plays() && one.follower.expected() != 0) || one.follower.warms_up();
         });
}

bool Client::is_alone() const noexcept {
  const Guarded guard(pool_->lock);
  return pool_->clients().size() == 1;
}

void Client::inherit(Client& former) noexcept {
  pool_->owners().hand_over(&former, this);
  const auto move = [](Gauge& from, Gauge& to) {
    to.current += from.current;
    to.peak = std::max(to.peak, to.current);
    from.current = 0;
  };
  move(former.stats_.requested, stats_.requested);
  move(former.stats_.live, stats_.live);
  move(former.stats_.blocks, stats_.blocks);
  move(former.stats_.small, stats_.small);
  move(former.stats_.small_requested, stats_.small_requested);
  move(former.stats_.small_live, stats_.small_live);
}

void Client::set_retained_limit(std::size_t bytes) noexcept {
  const Guarded guard(pool_->lock);
  retained_ = bytes;
  pool_->apply_retained_limits();
}

// --- sequences

Client::Sequence& Client::find_sequence(Stream stream, const void* thread) {
  Sequence* idle = nullptr;
  for (Sequence& sequence : sequences_) {
    if (sequence.follower.stream() != stream) continue;
    if (sequence.thread == thread) return sequence;
    if (sequence.thread == nullptr && idle == nullptr) idle = &sequence;
  }
  if (idle != nullptr) {
    idle->thread = thread;
    idle->follower.set_idle(false);
    return *idle;
  }
  Sequence& fresh = new_sequence(stream, thread);
  name_streams(fresh.follower.sequence());
  // A new thread begins where the recorded thread began, in the current iteration of the other threads.
  if (current_ != nullptr || warmup_only_) begin(fresh, ~std::uint64_t{0});
  return fresh;
}

void Client::begin(Sequence& sequence, std::uint64_t mark) noexcept {
  sequence.follower.begin(current_, mark, turn_);
  if (warmup_only_ && current_ == nullptr) sequence.follower.warmup_only();
}

Client::Sequence& Client::new_sequence(Stream stream, const void* thread) {
  if (++begun_ > std::max(kFewSequences, sequences_.size() / 4)) sweep_sequences();
  if (spare_.empty()) {
    sequences_.emplace_back(static_cast<std::uint32_t>(sequences_.size()), stream, thread);
    return sequences_.back();
  }
  Sequence& fresh = *spare_.back();
  spare_.pop_back();
  fresh.follower.pass_on(stream);
  fresh.lookahead = {};
  fresh.thread = thread;
  return fresh;
}

// Reuse sequences of destroyed streams, which are not reported. A sequence becomes spare if no plan has a table for it,
// and it made no allocation since the last sweep, some new sequences ago.
void Client::sweep_sequences() {
  begun_ = 0;
  spare_.reserve(sequences_.size());
  for (Sequence& sequence : sequences_) {
    const Follower& one = sequence.follower;
    const bool used = std::exchange(sequence.looked_at, one.count()) != one.count();
    const auto has = [&](const Pattern* pattern) { return pattern->table_of(one.sequence(), one.stream()) != nullptr; };
    if (used || sequence.is_spare() || std::any_of(known_.begin(), known_.end(), has)) continue;
    sequence.follower.pass_on(kNoStream);
    sequence.follower.set_idle(true);
    sequence.thread = nullptr;
    spare_.push_back(&sequence);
  }
  caches_ = ThreadCache::fresh_number();
}

Client::Sequence& Client::sequence(Stream stream) {
  ThreadCache& cache = ThreadCache::mine();
  if (cache.client == caches_ && cache.stream == stream) return *cache.sequence;
  Sequence& found = find_sequence(stream, &cache);
  cache.client = caches_;
  cache.stream = stream;
  cache.sequence = &found;
  return found;
}

void Client::retire(const void* thread) noexcept {
  const Guarded guard(pool_->lock);
  flight::note(flight::thread_ends, uid_, 0);
  for (Sequence& sequence : sequences_) {
    if (sequence.thread != thread) continue;
    sequence.thread = nullptr;
    sequence.follower.set_idle(true);
  }
}

// --- the hot path

void Client::note(const Follower& follower, std::size_t bytes, Outcome outcome) noexcept {
  // If the size was the expected one, the follower has already advanced to the next position.
  const bool expected =
      outcome == Outcome::slot_occupied || outcome == Outcome::no_arena || outcome == Outcome::other_stream;
  const std::uint32_t position = follower.position() - (expected && follower.position() != 0 ? 1 : 0);
  if (!divergences_.empty()) {
    Divergence& last = divergences_.back();
    if (last.position == position && last.actual == bytes && last.outcome == outcome &&
        last.sequence == follower.sequence()) {
      ++last.repeats;
      return;
    }
  }
  if (divergences_.size() == kMostDivergences) return;  // the first divergences explain the later ones
  try {
    divergences_.push_back({iterations_, follower.sequence(), position, expected ? bytes : follower.expected(), bytes,
                            follower.stream(), outcome, 1});
  } catch (...) {  // one explanation fewer
  }
}

// Serve a request from the plan. `place`: receives the planned offset if only the arena is missing.
Address Client::serve_planned(Sequence& sequence, std::size_t bytes, Outcome& outcome, Offset& place) {
  const Follower::Due due = replaying_ && marked_ ? sequence.follower.early(known_) : Follower::Due{};
  Follower::Match match = sequence.follower.next(bytes, known_, marked_);
  if (match.boundary) boundary(sequence.follower.finished());
  if (matches_awaited_ != 0) confirm_loaded(sequence.follower, match);
  if (growth_deferred_ && match.slot != nullptr && sequence.follower.at_low_water()) grow_at_low_water(sequence.follower.stream());
  if (due.size != 0 && bytes > due.size && outgrows(due, bytes, match)) {
    match = Follower::Match::none(Outcome::size_mismatch);
  }
  outcome = match.outcome;
  if (bypass_.active && replaying_) {
    bypass_plan(sequence.follower.stream());
    outcome = match.slot != nullptr ? Outcome::no_arena : match.outcome;
    return 0;
  }
  if (!replaying_) {
    if (match.slot != nullptr && bytes <= match.size) place = match.slot->offset;
    const bool planned = match.slot != nullptr && match.slot->offset != kDynamic;
    if (matches_awaited_ == 0 || planned) {
      outcome = refusal_ != Refusal::none ? Outcome::no_arena : Outcome::unplanned;
    } else if (match.slot != nullptr) {
      outcome = Outcome::dynamic;
    }
    return 0;
  }
  if (match.slot == nullptr) return 0;
  if (bytes > match.size && MEMPOOL_GUARDED("own_size")) {  // the guard examines the planned range only
    outcome = Outcome::size_mismatch;
    return 0;
  }
  if (match.slot->offset == kDynamic) {
    outcome = Outcome::dynamic;
  } else if (const Address address = pool_->take_planned(*match.slot, bytes, sequence.follower.stream())) {
    if (pool_->foresees()) prefetch_upcoming(sequence);
    return address;
  } else if (match.slot->offset + bytes > pool_->arena_bytes() || pool_->arena().is_drained(match.slot->offset)) {
    outcome = Outcome::no_arena;
  } else {
    const Occupancy::Range range = pool_->occupancy().overlapping(match.slot->offset, match.slot->offset + bytes);
    outcome = range.end == 0 ? Outcome::other_stream : Outcome::slot_occupied;
    note_pinned(range);
  }
  return 0;
}

// Prefetch upcoming buffers on an oversubscribed device: the plan knows the next buffers in advance, unlike page
// faults.
void Client::prefetch_upcoming(Sequence& sequence) noexcept {
  Device& device = pool_->source().device();
  const std::size_t window = device.foresight();
  if (window == 0 || pool_->source().held()) return;
  sequence.lookahead.go_on(sequence.follower, window, [&](Offset offset, std::size_t bytes) {
    const bool there = offset + bytes <= pool_->arena_bytes() || !MEMPOOL_GUARDED("prefetch_end");
    if (there) device.prefetch(pool_->arena_base() + offset, bytes);
  });
}

Pool::Given Client::serve_large(Sequence& sequence, std::size_t bytes, Stream stream, Resized* resized) {
  Outcome outcome = Outcome::out_of_iteration;
  Pool::Given given;
  Offset place = kDynamic;
  if (next_offset_ != kDynamic && dynamic_ != 0) given = pool_->take_place(std::exchange(next_offset_, kDynamic), bytes, stream);
  if (!outside() && !pool_->forked()) {
    given.address = serve_planned(sequence, bytes, outcome, place);
    given.rounded = pool_->round_up(bytes);
    if (given.address == 0 && replaying_ && outcome != Outcome::dynamic) note(sequence.follower, bytes, outcome);
  }
  if (given.address == 0 && resized != nullptr) {
    given = pool_->resize(resized->address, bytes, stream, resized->before);
    resized->done = given.address != 0;
  }
  if (given.address == 0) {
    const std::size_t before = pool_->source().reserved().current;
    given = pool_->allocate_dynamic(bytes, stream, may_use_holes(sequence));
    const std::size_t after = pool_->source().reserved().current;
    if (after > before) taken_outside_arena_ += after - before;
    if (place != kDynamic && given.address != 0) pool_->note_planned_offset(given.address, place);
  }
  if (given.address != 0) {
    ++stats_.outcomes[static_cast<std::size_t>(outcome)];
  }
  return given;
}

// Return true if the arena's holes may serve this sequence's unplanned requests: not while a plan is followed, which
// needs the holes, and not during warm-up, whose buffers may stay.
bool Client::may_use_holes(const Sequence& asks) const noexcept {
  if (replaying_ && asks.follower.in_step()) return false;
  if (pool_->another_client_replays(this)) return false;
  return !replaying_ || std::none_of(sequences_.begin(), sequences_.end(), [&](const Sequence& one) {
    return one.follower.warms_up() || (&one != &asks && one.follower.plays());
  });
}

// The lock is held, here and below.
void Client::count_allocation(const Pool::Given& given, std::size_t bytes) noexcept {
  stats_.requested.add(bytes);
  stats_.live.add(given.rounded);
  stats_.blocks.add(1);
  if (pool_->owners().several()) pool_->set_owner(given.address, owner_);
}

// Small means requested as small, no matter where the request was served.
void Client::count_small_allocation(const Pool::Given& given, std::size_t bytes) noexcept {
  stats_.small.add(1);
  stats_.small_requested.add(bytes);
  stats_.small_live.add(given.rounded);
}

void Client::count_small_free(std::size_t requested, std::size_t rounded) noexcept {
  stats_.small.sub(1);
  stats_.small_requested.sub(requested);
  stats_.small_live.sub(rounded);
}

void Client::count_free(std::size_t requested, std::size_t rounded) noexcept {
  stats_.requested.sub(requested);
  stats_.live.sub(rounded);
  stats_.blocks.sub(1);
  if (is_small(requested)) count_small_free(requested, rounded);
}

// Fill `given` field by field: a copy of the struct would stall on the values just written.
void Client::serve_small(std::size_t bytes, Stream stream, Pool::Given& given) noexcept try {
  const std::uint32_t recorded_as = trace_.on() ? sequence(stream).follower.sequence() : 0;
  given.address = pool_->allocate_small(bytes, stream);
  given.rounded = pool_->small().rounded(bytes);
  if (given.address == 0) given = pool_->allocate_dynamic(bytes, stream, true);
  if (given.address == 0) return report_out_of_memory(bytes, stream);
  count_small_allocation(given, bytes);
  count_allocation(given, bytes);
  if (trace_.on()) trace_.add(RecordedEvent::alloc, given.address, bytes, stream, recorded_as);
  if (history_.on()) history_.add(RecordedEvent::alloc, given.address, bytes, stream, recorded_as);
} catch (...) {  // no host memory for a new thread's sequence
  given = {};
  report_out_of_memory(bytes, stream);
}

// Serve a request during a graph capture; false: the request does not belong to the graph.
bool Client::serve_for_graph(std::size_t bytes, Stream stream, Pool::Given& given) noexcept try {
  const std::uint32_t recorded_as = trace_.on() ? sequence(stream).follower.sequence() : 0;
  if (!pool_->allocate_for_graph(bytes, stream, given)) return false;
  if (given.address == 0) {
    report_out_of_memory(bytes, stream);
    return true;
  }
  count_allocation(given, bytes);
  if (is_small(bytes)) {
    count_small_allocation(given, bytes);
  } else {
    ++stats_.outcomes[static_cast<std::size_t>(Outcome::out_of_iteration)];
  }
  if (trace_.on()) trace_.add(RecordedEvent::alloc, given.address, bytes, stream, recorded_as);
  if (history_.on()) history_.add(RecordedEvent::alloc, given.address, bytes, stream, recorded_as);
  return true;
} catch (...) {  // no host memory for a new thread's sequence
  report_out_of_memory(bytes, stream);
  return true;
}

Pool::Given Client::serve(std::size_t bytes, Stream stream, Resized* resized) noexcept try {
  pool_->collect();
  Sequence& mine = sequence(stream);
  const Pool::Given given = serve_large(mine, bytes, stream, resized);
  if (given.address == 0) {
    report_out_of_memory(bytes, stream);
    return given;
  }
  if (resized != nullptr && resized->done) {
    pool_->owners().ends(resized->before.owner, this);
    count_free(resized->before.requested, resized->before.rounded);
    if (ring_.on()) ring_.add(outside() ? RecordedEvent::free : RecordedEvent::handover, resized->address, 0, stream, 0);
    if (trace_.on()) trace_.add(RecordedEvent::handover, resized->address, 0, stream, 0);
    if (history_.on()) {
      history_.add(RecordedEvent::handover, resized->address, resized->before.requested, stream, 0);
    }
  }
  count_allocation(given, bytes);
  record_large(mine, given.address, bytes, stream);
  return given;
} catch (...) {
  report_out_of_memory(bytes, stream);
  return {};
}

void Client::record_large(const Sequence& sequence, Address address, std::size_t bytes, Stream stream) noexcept {
  const std::uint32_t number = sequence.follower.sequence();
  if (ring_.on() && !outside()) {
    ring_.add(RecordedEvent::alloc, address, bytes, stream, number);
    if (!marked_ && ring_.seen() >= check_at_) signal_work();
  }
  if (trace_.on()) trace_.add(RecordedEvent::alloc, address, bytes, stream, number);
  if (history_.on()) history_.add(RecordedEvent::alloc, address, bytes, stream, number);
}

// Fast path of the steady state; 0: recording, a decision or another source of memory is required.
Address Client::serve_hit(Sequence& sequence, std::size_t bytes) noexcept {
  if (!replaying_ || growth_deferred_ || bypass_.active || outside() || recorded() || pool_->forked() || pool_->foresees()) return 0;
  if (bypass_.larger != 0 && sequence.follower.is_early()) return 0;
  const Slot* slot = sequence.follower.expected_slot(bytes);
  if (slot == nullptr || slot->offset == kDynamic) return 0;
  const Address address = pool_->take_planned(*slot, bytes, sequence.follower.stream());
  if (address == 0) return 0;
  sequence.follower.advance(bytes);
  ++stats_.outcomes[static_cast<std::size_t>(Outcome::hit)];
  stats_.requested.add(bytes);
  stats_.live.add(pool_->round_up(bytes));
  stats_.blocks.add(1);
  if (pool_->owners().several()) pool_->set_owner(*slot, owner_);
  return address;
}

// In a flight recorder, the last argument of a request is the reserved memory afterwards.
void Client::note_call(flight::Call call, bool done, std::uint64_t first, Stream stream, Address address) noexcept {
  const std::uint64_t reserved = pool_->source().reserved().current;
  flight::add(call, uid_, done ? 0 : 1, {first, static_cast<std::uint64_t>(stream), address, reserved});
}

Address Client::allocate(std::size_t bytes, Stream stream, bool zeroed) noexcept {
  if (bytes == 0) bytes = 1;
  const ThreadCache& cache = ThreadCache::mine();
  Pool::Given given;
  void (*departed)() = nullptr;
  {
    const Guarded guard(pool_->lock);
    Sequence* const cached = cache.client == caches_ && cache.stream == stream ? cache.sequence : nullptr;
    if (pool_->capturing() && serve_for_graph(bytes, stream, given)) {
      // served from the graph's own memory
    } else if (is_small(bytes)) {
      serve_small(bytes, stream, given);
      departed = departure();
    } else {
      if (cached != nullptr) given.address = serve_hit(*cached, bytes);
      if (given.address == 0) {
        given = serve(bytes, stream);
        departed = departure();
      }
    }
    if (flight::on()) note_call(flight::allocate, given.address != 0, bytes, stream, given.address);
  }
  if (departed != nullptr) departed();
  if (zeroed && given.address != 0 && !given.fresh) pool_->source().device().zero(given.address, bytes, stream);
  return given.address;
}

void Client::watch_departures(void (*hook)(), std::size_t most_reserved, std::uint64_t most_misses) noexcept {
  const Guarded guard(pool_->lock);
  departures_ = {hook, most_reserved, most_misses};
}

void (*Client::departure() const noexcept)() {
  if (departures_.hook == nullptr) return nullptr;
  const bool departs = pool_->source().reserved().current > departures_.most_reserved || misses() > departures_.most_misses;
  return departs ? departures_.hook : nullptr;
}

// --- in front of another allocator

Address Client::allocate_planned(std::size_t bytes, Stream stream, bool& recorded) noexcept try {
  recorded = is_small(bytes) && is_concerned_with(bytes);
  if (is_small(bytes)) return 0;
  const ThreadCache& cache = ThreadCache::mine();
  const Guarded guard(pool_->lock);
  const bool cached = cache.client == caches_ && cache.stream == stream;
  if (cached) {
    if (const Address address = serve_hit(*cache.sequence, bytes)) return address;
  }
  pool_->collect();
  Sequence& mine = cached ? *cache.sequence : sequence(stream);
  Outcome outcome = Outcome::out_of_iteration;
  Offset place = kDynamic;
  Address address = 0;
  if (!outside() && !pool_->forked()) {
    address = serve_planned(mine, bytes, outcome, place);
    if (address == 0 && replaying_ && outcome != Outcome::dynamic) note(mine.follower, bytes, outcome);
  }
  ++stats_.outcomes[static_cast<std::size_t>(outcome)];
  recorded = this->recorded();
  // An iteration of an unknown variant would need as much memory again beside the arena, which it leaves idle. For a larger
  // iteration, an empty arena is released instead.
  const Follower::Begun begun = mine.follower.begun();
  const bool unlike = begun == Follower::Begun::smaller || (begun == Follower::Begun::larger && pool_->occupancy().alive() != 0);
  const bool may_fit = replaying_ && pool_->occupancy().may_have_hole(bytes, pool_->arena_bytes());
  const bool uses_hole = may_fit && (unlike || may_use_holes(mine)) && !pool_->source().held();
  if (address == 0 && uses_hole) address = pool_->from_idle_hole(bytes, stream).address;
  if (address == 0) return 0;
  count_allocation({address, pool_->round_up(bytes), false}, bytes);
  record_large(mine, address, bytes, stream);
  return address;
} catch (...) {  // no host memory for a new thread's sequence
  recorded = false;
  return 0;
}

void Client::record_outside(Address address, std::size_t bytes, Stream stream) noexcept try {
  const Guarded guard(pool_->lock);
  free_outside(address);  // its end was not seen
  const Pool::Given given{address, pool_->round_up(bytes), false};
  Sequence& mine = sequence(stream);
  pool_->outside().add(address, bytes, stream);
  count_allocation(given, bytes);
  if (!is_small(bytes)) return record_large(mine, address, bytes, stream);
  count_small_allocation(given, bytes);
  if (trace_.on()) trace_.add(RecordedEvent::alloc, address, bytes, stream, mine.follower.sequence());
  if (history_.on()) history_.add(RecordedEvent::alloc, address, bytes, stream, mine.follower.sequence());
} catch (...) {  // no host memory for the record: the buffer is not recorded
}

Address Client::allocate_in_hole(std::size_t bytes, Stream stream) noexcept try {
  const Guarded guard(pool_->lock);
  Sequence& mine = sequence(stream);
  const Pool::Given given = pool_->allocate_in_hole(bytes, stream);
  if (given.address == 0) return 0;
  count_allocation(given, bytes);
  if (is_small(bytes)) count_small_allocation(given, bytes);
  else record_large(mine, given.address, bytes, stream);
  return given.address;
} catch (...) {  // no host memory for a new thread's sequence
  return 0;
}

Client::Found Client::free_planned(Address address, std::size_t* bytes) noexcept {
  const Guarded guard(pool_->lock);
  if (!pool_->arena_holds(address)) return free_outside(address) ? Found::outside : Found::unknown;
  const Stream stream = pool_->stream_in_arena(address);
  *bytes = free_in_arena(address, stream);
  if (*bytes == 0) {
    const Pool::Freed buffer = pool_->at(address);
    *bytes = buffer.requested;
    if (buffer.is_live()) free_locked(address, stream, nullptr);
  }
  if (pool_->arena().state() == ArenaState::draining && pool_->occupancy().alive() == 0 && pool_->release_arena()) {
    for (Client* const client : pool_->clients()) client->replaying_ = false;  // until the larger arena is there
  }
  return Found::planned;
}

bool Client::free_outside(Address address) noexcept {
  const OutsideBuffers::Buffer buffer = pool_->outside().take(address);
  if (buffer.requested == 0) return false;
  Client* const owner = pool_->owners().ends(buffer.owner, this);
  if (owner != nullptr) owner->freed(address, buffer.requested, pool_->round_up(buffer.requested), buffer.stream);
  return true;
}

void Client::forget_outside() noexcept {
  const Guarded guard(pool_->lock);
  pool_->outside() = {};
}

// Serve planned buffers of this stream only, because any other request may need the device.
Address Client::allocate_at_once(std::size_t bytes, Stream stream) noexcept {
  const ThreadCache& cache = ThreadCache::mine();
  if (cache.stream != stream || is_small(bytes) || !pool_->lock.try_lock()) return 0;
  const bool plain = cache.client == caches_ && !pool_->capturing() && pool_->arena_streams().is_sole(stream);
  const Address address = plain ? serve_hit(*cache.sequence, bytes) : 0;
  if (address != 0 && flight::on()) note_call(flight::allocate, true, bytes, stream, address);
  pool_->lock.unlock();
  return address;
}

bool Client::free_at_once(Address address, Stream stream) noexcept {
  if (!pool_->lock.try_lock()) return false;
  const bool at_once = pool_->frees_at_once(address);
  if (at_once) free_locked(address, stream, nullptr);
  if (at_once && flight::on()) note_call(flight::free, true, address, stream);
  pool_->lock.unlock();
  return at_once;
}

bool Client::free(Address address, Stream stream, bool* dead) noexcept {
  const Guarded guard(pool_->lock);
  const bool freed = free_locked(address, stream, dead);
  if (flight::on()) note_call(flight::free, freed, address, stream);
  return freed;
}

// Free a buffer in the arena. Return the requested size; 0: no live buffer at the address, or the slow path is required.
std::size_t Client::free_in_arena(Address address, Stream stream) noexcept {
  const Owner whose = pool_->owners().several() ? pool_->owner_in_arena(address) : Owners::kWhoever;
  const std::size_t bytes = pool_->free_in_arena(address, stream);
  if (bytes == 0) return 0;
  Client* const owner = pool_->owners().ends(whose, this);
  if (owner != nullptr) owner->freed(address, bytes, pool_->round_up(bytes), stream);
  return bytes;
}

bool Client::free_locked(Address address, Stream stream, bool* dead) noexcept {
  if (dead != nullptr) *dead = false;
  if (free_in_arena(address, stream) != 0) return true;
  const Pool::Freed freed = pool_->free(address, stream);
  if (dead != nullptr) *dead = freed.kind == Pool::Freed::dead;
  if (freed.kind == Pool::Freed::foreign || freed.kind == Pool::Freed::dead) {
    ++(freed.kind == Pool::Freed::dead ? stats_.double_frees : stats_.foreign_frees);
    return false;
  }
  Client* const owner = pool_->owners().ends(freed.owner, this);
  if (owner != nullptr) owner->freed(address, freed.requested, freed.rounded, stream);
  return true;
}

// Count the end of a buffer of this client, whichever client frees the buffer.
void Client::freed(Address address, std::size_t requested, std::size_t rounded, Stream stream) noexcept {
  count_free(requested, rounded);
  if (!recorded()) return;
  if (!is_small(requested) && ring_.on()) ring_.add(RecordedEvent::free, address, 0, stream, 0);
  if (trace_.on()) trace_.add(RecordedEvent::free, address, 0, stream, 0);
  if (history_.on()) history_.add(RecordedEvent::free, address, requested, stream, 0);
}

bool Client::use(Address address, Stream stream) {
  const Guarded guard(pool_->lock);
  const bool used = pool_->use(address, stream);
  flight::note(flight::use, uid_, used ? 0 : 1, address, stream);
  if (!used) return false;
  Client* const owner = pool_->owners().several() ? pool_->owners().of(pool_->at(address).owner, this) : this;
  if (owner == nullptr) return true;
  if (owner->ring_.on()) owner->ring_.add(RecordedEvent::use, address, static_cast<std::size_t>(stream), stream, 0);
  if (owner->trace_.on()) owner->trace_.add(RecordedEvent::use, address, 0, stream, 0);
  return true;
}

Address Client::reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept {
  if (bytes == 0) bytes = 1;
  std::size_t old = 0;
  Resized resized{address};
  Pool::Given given;
  {
    const Guarded guard(pool_->lock);
    const Pool::Freed found = pool_->at(address);
    old = found.requested;
    *foreign = !found.is_live();
    if (*foreign) return 0;
    const bool mine = pool_->owners().of(found.owner, this) == this;
    if (is_small(bytes)) serve_small(bytes, stream, given);
    else given = serve(bytes, stream, mine ? &resized : nullptr);
    flight::note(flight::reallocate, uid_, given.address != 0 ? 0 : 1, address, bytes, stream, given.address);
  }
  if (given.address == 0 || resized.done) return given.address;
  pool_->source().device().copy(given.address, address, std::min(old, bytes), stream);
  free(address, stream);
  return given.address;
}

void Client::report_out_of_memory(std::size_t bytes, Stream stream) noexcept {
  ++stats_.out_of_memory;
  if (!ThreadCache::mine().first_attempt) {
    if (trace_.on()) trace_.add(RecordedEvent::refused, 0, bytes, stream, 0);
    if (history_.on()) history_.add(RecordedEvent::refused, 0, bytes, 0, 0);
  }
  std::size_t requested = 0, live = 0;
  for (const Client* client : pool_->clients()) {
    requested += client->stats_.requested.current;
    live += client->stats_.live.current;
  }
  ThreadCache::mine().out_of_memory = {bytes,
                                       requested,
                                       live,
                                       pool_->source().reserved().current,
                                       pool_->arena_stats().bytes,
                                       pool_->source().limit()};
}

Client::FirstAttempt::FirstAttempt() noexcept { ThreadCache::mine().first_attempt = true; }

Client::FirstAttempt::~FirstAttempt() { ThreadCache::mine().first_attempt = false; }

OutOfMemory Client::last_out_of_memory() noexcept { return ThreadCache::mine().out_of_memory; }

// --- queries

Client::State Client::state() {
  const Guarded guard(pool_->lock);
  return {recording_.state(), recording_due(), recording_.began(), recording_.miss_rate(counts()),
          trace_.on(),  marked_,           replays(),   iterations_, marks_,
          active_at_, latest_at_, settled(),   miss_score_,           large_allocations(), sequences_.size(), ring_.seen(), ring_.dropped(),
          ring_.kept(), trace_.lost(), trace_.spilt(), pool_->layouts() - layouts_, needed_bytes(), refusal_};
}

ClientStats Client::stats() {
  const Guarded guard(pool_->lock);
  ClientStats stats = stats_;
  stats.live.peak = std::max(stats.live.peak, earlier_live_peak_);
  stats.deferred_bytes = pool_->deferred().current;
  stats.deferred_blocks = pool_->uses().waiting();
  stats.deferred_small_blocks = pool_->deferred_small().blocks;
  stats.deferred_small_bytes = pool_->deferred_small().bytes;
  for (std::size_t i = 0; active_at_ != 0 && i < stats.steady.size(); ++i) {
    stats.steady[i] = stats.outcomes[i] - before_steady_[i];
    stats.latest[i] = stats.outcomes[i] - before_latest_[i];
  }
  return stats;
}

void Client::reset_peaks() noexcept {
  const Guarded guard(pool_->lock);
  for (Gauge* gauge : {&stats_.requested, &stats_.live, &stats_.blocks, &stats_.small, &stats_.small_requested,
                       &stats_.small_live}) {
    gauge->peak = gauge->current;
  }
  earlier_live_peak_ = 0;
  pool_->source().reset_peak();
}

std::size_t Client::take_live_peak() noexcept {
  const Guarded guard(pool_->lock);
  const std::size_t peak = std::exchange(stats_.live.peak, stats_.live.current);
  earlier_live_peak_ = std::max(earlier_live_peak_, peak);
  return peak;
}

std::vector<Divergence> Client::divergences() {
  const Guarded guard(pool_->lock);
  return divergences_;
}

std::vector<DecisionLog::Entry> Client::decisions() {
  const Guarded guard(pool_->lock);
  return {decisions_.entries().begin(), decisions_.entries().end()};
}

}  // namespace mempool
