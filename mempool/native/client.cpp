#include "client.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "thread_cache.hpp"

namespace mempool {
namespace {

constexpr std::size_t kMostPatterns = 8;
constexpr std::size_t kMostDivergences = 64;
constexpr std::uint64_t kCleanIterations = 32;  // after which, at the earliest, the planner stops recording

// Clients by number, so that a thread that ends can find those that still exist. Never destroyed: threads may outlive
// every static.
struct Registry {
  Lock lock;
  std::map<std::uint64_t, Client*> clients;
  std::uint64_t next = 1;
};
Registry& registry() {
  static Registry* registry = new Registry;
  return *registry;
}

// One bell for all planners: rung rarely, so that it may be a heavy one.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
};
Bell*& bell_slot() {
  static Bell* bell = new Bell;
  return bell;
}
Bell& bell() { return *bell_slot(); }

// The pools of all clients, each once. The registry's lock is held.
std::vector<Pool*> all_pools() {
  std::vector<Pool*> pools;
  for (const auto& [uid, client] : registry().clients) {
    if (std::find(pools.begin(), pools.end(), &client->pool()) == pools.end()) pools.push_back(&client->pool());
  }
  return pools;
}

}  // namespace

std::uint64_t ThreadCache::enlist(Client* client) {
  Registry& all = registry();
  const Guarded guard(all.lock);
  all.clients[all.next] = client;
  return all.next++;
}

void ThreadCache::strike(std::uint64_t uid) noexcept {
  const Guarded guard(registry().lock);
  registry().clients.erase(uid);
}

ThreadCache::~ThreadCache() {
  if (client == 0) return;
  const Guarded guard(registry().lock);
  for (const auto& [uid, client] : registry().clients) client->retire(this);
}

void Client::Bypass::enter() noexcept { ++ThreadCache::mine().bypass; }
void Client::Bypass::leave() noexcept { --ThreadCache::mine().bypass; }
bool Client::Bypass::active() noexcept { return ThreadCache::mine().bypass != 0; }

Client::Client(std::shared_ptr<Pool> pool, std::string name)
    : pool_(std::move(pool)), name_(std::move(name)), uid_(0), ring_(pool_->options().recorded_events) {
  uid_ = ThreadCache::enlist(this);
  try {
    const Guarded guard(pool_->lock);
    pool_->adopt(this);
  } catch (...) {
    ThreadCache::strike(uid_);
    throw;
  }
}

Client::~Client() {
  ThreadCache::strike(uid_);
  const Guarded guard(pool_->lock);
  pool_->part(this);
  pool_->shrink_arena();
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
    return *idle;
  }
  sequences_.emplace_back(static_cast<std::uint32_t>(sequences_.size()), stream, thread);
  Sequence& fresh = sequences_.back();
  // A new thread begins where the recorded one began, in the iteration of the others.
  if (current_ != nullptr) fresh.follower.begin(current_, ~std::uint64_t{0}, turn_);
  return fresh;
}

Client::Sequence& Client::sequence(Stream stream) {
  ThreadCache& cache = ThreadCache::mine();
  if (cache.client == uid_ && cache.stream == stream) return *cache.sequence;
  Sequence& found = find_sequence(stream, &cache);
  cache.client = uid_;
  cache.stream = stream;
  cache.sequence = &found;
  return found;
}

void Client::retire(const void* thread) noexcept {
  const Guarded guard(pool_->lock);
  for (Sequence& sequence : sequences_) {
    if (sequence.thread == thread) sequence.thread = nullptr;
  }
}

// --- the hot path

void Client::note(const Follower& follower, std::size_t bytes, Outcome outcome) noexcept {
  // Where the size was the expected one, the follower has gone on to the next position.
  const bool expected =
      outcome == Outcome::occupied || outcome == Outcome::no_arena || outcome == Outcome::other_stream;
  const std::uint32_t position = follower.position() - (expected && follower.position() != 0 ? 1 : 0);
  if (!divergences_.empty()) {
    Divergence& last = divergences_.back();
    if (last.position == position && last.actual == bytes && last.outcome == outcome &&
        last.sequence == follower.sequence()) {
      ++last.repeats;
      return;
    }
  }
  if (divergences_.size() == kMostDivergences) return;  // the first ones explain; later ones follow from them
  try {
    divergences_.push_back({iterations_, follower.sequence(), position, expected ? bytes : follower.expected(), bytes,
                            follower.stream(), outcome, 1});
  } catch (...) {  // an explanation less
  }
}

Address Client::serve_planned(Sequence& sequence, std::size_t bytes, Outcome& outcome) {
  const Follower::Match match = sequence.follower.next(bytes, known_, marked_);
  outcome = match.outcome;
  if (match.boundary) boundary(sequence.follower.finished());
  if (!replaying_) {
    outcome = arena_retry_at_ != 0 ? Outcome::no_arena : Outcome::unplanned;
    return 0;
  }
  if (match.slot == nullptr) return 0;
  if (match.slot->offset == kDynamic) {
    outcome = Outcome::dynamic;
  } else if (sequence.follower.stream() != pool_->arena_stream() && MEMPOOL_GUARDED("stream")) {
    outcome = Outcome::other_stream;
  } else if (const Address address = pool_->take_planned(*match.slot, bytes)) {
    return address;
  } else {
    outcome = match.slot->offset + bytes > pool_->arena_bytes() ? Outcome::no_arena : Outcome::occupied;
  }
  return 0;
}

Pool::Given Client::serve_large(Sequence& sequence, std::size_t bytes, Stream stream) {
  Outcome outcome = Outcome::outside;
  Pool::Given given;
  if (!outside() && !pool_->forked()) {
    given.address = serve_planned(sequence, bytes, outcome);
    given.rounded = pool_->round_up(bytes);
    if (given.address == 0 && replaying_ && outcome != Outcome::dynamic) note(sequence.follower, bytes, outcome);
  }
  if (given.address == 0) {
    const bool in_step = replaying_ && outcome != Outcome::exhausted && sequence.follower.in_step();
    given = pool_->allocate_dynamic(bytes, stream, in_step);
  }
  if (given.address != 0) {
    ++stats_.outcomes[static_cast<std::size_t>(outcome)];
  }
  return given;
}

// The lock is held.
Pool::Given Client::serve(std::size_t bytes, Stream stream) noexcept try {
  Sequence& mine = sequence(stream);
  const bool small = bytes <= pool_->options().small_bytes;
  const Pool::Given given = small ? pool_->allocate_small(bytes, stream) : serve_large(mine, bytes, stream);
  if (given.address == 0) {
    refuse(bytes);
    return given;
  }
  if (small) stats_.small.add(1);
  stats_.requested.add(bytes);
  stats_.live.add(given.rounded);
  stats_.blocks.add(1);
  if (!small && ring_.on() && !outside()) {
    ring_.add(RecordedEvent::alloc, given.address, bytes, stream, mine.follower.sequence());
    if (!marked_ && ring_.seen() >= check_at_) signal_work();
  }
  if (tape_.on()) tape_.add(RecordedEvent::alloc, given.address, bytes, stream, mine.follower.sequence());
  return given;
} catch (...) {  // the host has no memory for a new thread's sequence
  refuse(bytes);
  return {};
}

// The steady state in a straight line; 0: something is to be recorded, decided or taken from elsewhere. The lock is held.
Address Client::serve_hit(Sequence& sequence, std::size_t bytes) noexcept {
  if (!replaying_ || outside() || recorded() || pool_->forked()) return 0;
  const Slot* slot = sequence.follower.expected_slot(bytes);
  if (slot == nullptr || slot->offset == kDynamic) return 0;
  if (sequence.follower.stream() != pool_->arena_stream() && MEMPOOL_GUARDED("stream")) return 0;
  const Address address = pool_->take_planned(*slot, bytes);
  if (address == 0) return 0;
  sequence.follower.advance(bytes);
  ++stats_.outcomes[static_cast<std::size_t>(Outcome::hit)];
  stats_.requested.add(bytes);
  stats_.live.add(pool_->round_up(bytes));
  stats_.blocks.add(1);
  return address;
}

Address Client::allocate(std::size_t bytes, Stream stream, bool zeroed) noexcept {
  if (bytes == 0) bytes = 1;
  const ThreadCache& cache = ThreadCache::mine();
  Sequence* const cached = cache.client == uid_ && cache.stream == stream ? cache.sequence : nullptr;
  Pool::Given given;
  {
    const Guarded guard(pool_->lock);
    if (cached != nullptr) given.address = serve_hit(*cached, bytes);
    if (given.address == 0) given = serve(bytes, stream);
  }
  if (zeroed && given.address != 0 && !given.fresh) pool_->source().device().zero(given.address, bytes, stream);
  return given.address;
}

bool Client::free(Address address, Stream stream, bool* dead) noexcept {
  if (dead != nullptr) *dead = false;
  const Guarded guard(pool_->lock);
  if (const std::size_t bytes = recorded() ? 0 : pool_->free_in_arena(address, stream)) {
    stats_.requested.sub(bytes);
    stats_.live.sub(pool_->round_up(bytes));
    stats_.blocks.sub(1);
    return true;
  }
  const Pool::Freed freed = pool_->free(address, stream);
  if (dead != nullptr) *dead = freed.kind == Pool::Freed::dead;
  if (freed.kind == Pool::Freed::foreign || freed.kind == Pool::Freed::dead) {
    ++(freed.kind == Pool::Freed::dead ? stats_.double_frees : stats_.foreign_frees);
    return false;
  }
  stats_.requested.sub(freed.requested);
  stats_.live.sub(freed.rounded);
  stats_.blocks.sub(1);
  const bool small = freed.kind == Pool::Freed::small;
  if (small) stats_.small.sub(1);
  if (!small && ring_.on()) ring_.add(RecordedEvent::free, address, 0, stream, 0);
  if (tape_.on()) tape_.add(RecordedEvent::free, address, 0, stream, 0);
  return true;
}

Address Client::reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept {
  bool ours = false;
  std::size_t old = 0;
  {
    const Guarded guard(pool_->lock);
    old = pool_->size_of(address, ours);
  }
  *foreign = !ours;
  if (!ours) return 0;
  const Address moved = allocate(bytes, stream);
  if (moved == 0) return 0;
  pool_->source().device().copy(moved, address, std::min(old, bytes), stream);
  free(address, stream);
  return moved;
}

void Client::refuse(std::size_t bytes) noexcept {
  ++stats_.out_of_memory;
  ThreadCache::mine().out_of_memory = {bytes,
                                       stats_.requested.current,
                                       stats_.live.current,
                                       pool_->source().reserved().current,
                                       pool_->arena_stats().bytes,
                                       pool_->source().limit()};
}

OutOfMemory Client::last_out_of_memory() noexcept { return ThreadCache::mine().out_of_memory; }

// --- marks and iterations

// Sees to the arena that the patterns need, at a boundary. Where it cannot be had, or not so large, the pool goes on with
// what there is, and tries again some iterations later.
void Client::have_arena() noexcept {
  if (known_.empty() || pool_->forked()) return;
  std::size_t bytes = 0;
  for (const Pattern* pattern : known_) bytes = std::max(bytes, pattern->arena_bytes);
  const Stream stream = known_.front()->tables.front().stream;
  if (pool_->arena_bytes() < bytes || pool_->arena_stream() != stream) {
    if (iterations_ < arena_retry_at_) return;
    if (!pool_->take_arena(bytes, stream)) {
      arena_retry_at_ = iterations_ + 4;
      replaying_ = replaying_ && pool_->arena_bytes() != 0;
      return;
    }
  }
  arena_retry_at_ = 0;
  if (replaying_) return;
  replaying_ = true;
  if (active_at_ == 0) active_at_ = iterations_ + 1;
  begin_steady();
}

std::uint64_t Client::large_allocations() const noexcept {
  return std::accumulate(stats_.outcomes.begin(), stats_.outcomes.end(), std::uint64_t{0});
}

// Counting the steady state begins here. It is a difference, so that a hit pays for one counter.
void Client::begin_steady() noexcept {
  coming_ = nullptr;
  clean_ = longest_clean_ = spoilt_ = 0;
  before_steady_ = stats_.outcomes;
  misses_before_ = 0;
  divergences_.clear();  // they belonged to another plan
}

// At a boundary: whether the pattern installed last is followed from here on.
void Client::perhaps_in_effect() noexcept {
  if (coming_ == nullptr || !replaying_) return;
  for (const Sequence& sequence : sequences_) {
    if (sequence.follower.pattern() == coming_) return begin_steady();
  }
}

// A difference at every hundredth iteration is part of a period of a hundred, and shows when it has come several times.
bool Client::settled() const noexcept { return clean_ >= std::max(kCleanIterations, 4 * longest_clean_); }

void Client::judge_iteration() noexcept {
  std::uint64_t misses = 0;
  for (std::size_t i = 1; i < stats_.outcomes.size(); ++i) {
    const auto outcome = static_cast<Outcome>(i);
    if (outcome == Outcome::dynamic || outcome == Outcome::outside) continue;
    misses += stats_.outcomes[i] - before_steady_[i];
  }
  if (replaying_) {
    const bool clean = misses == misses_before_;
    if (!clean) longest_clean_ = std::max(longest_clean_, clean_);
    clean_ = clean ? clean_ + 1 : 0;
    // One iteration in six may miss a little for ever (a log, a checkpoint); more than that is a change.
    if (!clean) spoilt_ += 6;
    if (clean && spoilt_ > 0) --spoilt_;
    if (ring_.on() ? settled() && clean_ % kCleanIterations == 0 : !clean) signal_work();
  }
  misses_before_ = misses;
}

void Client::boundary(Pattern* ended) noexcept {
  judge_iteration();
  ++iterations_;
  if (ended != nullptr) {
    // What follows what is learned one iteration at a time; a warm-up is always followed by its steady pattern.
    if (ended_ != nullptr && ended_->cyclic && ended->cyclic) ended_->next = ended;
    ended_ = ended;
    ++ended->iterations;
    ended->last_used = iterations_;
  }
  have_arena();
  perhaps_in_effect();
  // Without a plan nobody knows what the next iteration takes.
  if (replaying_) pool_->return_idle();
}

void Client::begin_everywhere(std::uint64_t mark) noexcept {
  Pattern* const ended = ended_;
  const bool warming = current_ != nullptr && !current_->cyclic && mark < current_->tables.front().marks.size();
  if (!warming && ended != nullptr) current_ = ended->next != nullptr ? ended->next : ended;
  if (!warming && ended == nullptr && current_ != nullptr && !current_->cyclic) current_ = current_->next;
  if (current_ == nullptr && !known_.empty()) current_ = known_.front();
  ++turn_;
  for (Sequence& sequence : sequences_) sequence.follower.begin(current_, mark, turn_);
  perhaps_in_effect();
}

// The pattern of whichever sequence came furthest in its iteration; null if none came anywhere.
Pattern* Client::followed() const noexcept {
  const Follower* furthest = nullptr;
  for (const Sequence& sequence : sequences_) {
    const Follower& one = sequence.follower;
    if (one.pattern() == nullptr || one.position() == 0) continue;
    if (furthest == nullptr || one.position() > furthest->position()) furthest = &one;
  }
  return furthest == nullptr ? nullptr : furthest->pattern();
}

void Client::mark(Mark kind) {
  const Guarded guard(pool_->lock);
  Sequence& mine = sequence(0);
  marked_ = true;
  between_ = kind == Mark::end;
  const RecordedEvent::Kind event = kind == Mark::step    ? RecordedEvent::step
                                    : kind == Mark::begin ? RecordedEvent::begin
                                                          : RecordedEvent::end;
  if (ring_.on()) ring_.add(event, 0, 0, 0, mine.follower.sequence());
  if (tape_.on()) tape_.add(event, 0, 0, 0, mine.follower.sequence());
  if (kind != Mark::end) {
    boundary(followed());
    begin_everywhere(marks_++);
  }
  if (ring_.on() && kind != Mark::begin) signal_work();
}

void Client::enter_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  ++dynamic_;
}

void Client::leave_dynamic() noexcept {
  const Guarded guard(pool_->lock);
  if (dynamic_ != 0) --dynamic_;
}

// --- recording and planning

void Client::set_recording(bool on) noexcept {
  const Guarded guard(pool_->lock);
  if (on && !ring_.on()) {
    interrupted_ = interrupted_ || large_allocations() != 0;
    ring_.clear();
    check_at_ = ring_.seen() + 64;
  }
  if (!on) ring_.clear();
  ring_.set_on(on);
}

void Client::set_tape(bool on) noexcept {
  const Guarded guard(pool_->lock);
  tape_.set_on(on);
}

Client::Recording Client::recording() {
  const Guarded guard(pool_->lock);
  Recording recording{ring_.take(false), {}, ring_.dropped() == 0 && !interrupted_};
  for (const Sequence& sequence : sequences_) recording.counts.push_back(sequence.follower.count());
  return recording;
}

Client::Outline Client::outline() {
  Outline outline;
  const Guarded guard(pool_->lock);
  ring_.each([&](const RecordedEvent& event) {
    outline.marks = outline.marks || event.kind > RecordedEvent::free;
    if (event.kind != RecordedEvent::alloc) return;
    outline.sequences.push_back(event.sequence);
    outline.sizes.push_back(event.size);
  });
  return outline;
}

std::vector<RecordedEvent> Client::take_tape() {
  const Guarded guard(pool_->lock);
  return tape_.take(true);
}

bool Client::in_use(const Pattern* pattern) const noexcept {
  if (pattern == current_ || pattern == ended_ || pattern == coming_) return true;
  if (current_ != nullptr && pattern == current_->next) return true;
  return std::any_of(sequences_.begin(), sequences_.end(), [&](const Sequence& sequence) {
    const Follower& one = sequence.follower;
    return one.pattern() == pattern || one.finished() == pattern || one.upcoming() == pattern;
  });
}

void Client::forget(Pattern* pattern) noexcept {
  for (const auto& other : patterns_) {
    if (other->next == pattern) other->next = nullptr;
  }
  known_.erase(std::remove(known_.begin(), known_.end(), pattern), known_.end());
  patterns_.erase(std::find_if(patterns_.begin(), patterns_.end(), [&](const auto& p) { return p.get() == pattern; }));
}

void Client::keep_patterns_bounded() noexcept {
  while (known_.size() > kMostPatterns) {
    Pattern* oldest = nullptr;
    for (Pattern* pattern : known_) {
      if (in_use(pattern) || pattern == known_.front()) continue;
      if (oldest == nullptr || pattern->last_used < oldest->last_used) oldest = pattern;
    }
    if (oldest == nullptr) return;
    forget(oldest);
  }
}

void Client::forget_unused() noexcept {
  std::size_t needed = 0;
  for (const Pattern* pattern : known_) {
    if (in_use(pattern)) needed = std::max(needed, pattern->arena_bytes);
  }
  for (std::size_t i = known_.size(); i-- > 0;) {
    if (!in_use(known_[i]) && known_[i]->arena_bytes > needed) forget(known_[i]);
  }
}

// Patterns come from files too; what the hot path takes for granted is made sure here.
void Client::check(const Pattern& pattern, bool cyclic) const {
  if (pattern.cyclic != cyclic) throw std::invalid_argument("a steady pattern is cyclic and a warm-up is not");
  if (pattern.tables.empty()) throw std::invalid_argument("a pattern needs at least one table");
  const std::size_t alignment = pool_->source().traits().alignment;
  for (const Table& table : pattern.tables) {
    if (table.sizes.empty() || table.slots.size() != table.sizes.size() * pattern.unroll) {
      throw std::invalid_argument("a table needs at least one position, and a slot for each unrolled iteration");
    }
    for (const Slot& slot : table.slots) {
      if (slot.offset != kDynamic && slot.offset % alignment != 0) {
        throw std::invalid_argument("an offset is not a multiple of the device's alignment");
      }
    }
  }
}

// Makes patterns known, all of them or none.
void Client::admit(std::vector<std::unique_ptr<Pattern>> fresh) {
  patterns_.reserve(patterns_.size() + fresh.size());
  std::vector<Pattern*> known;
  known.reserve(known_.size() + fresh.size());
  for (const auto& pattern : fresh) known.push_back(pattern.get());
  known.insert(known.end(), known_.begin(), known_.end());
  known_.swap(known);
  try {
    pool_->rebuild_cells();
  } catch (...) {
    known_.swap(known);
    throw;
  }
  for (auto& pattern : fresh) patterns_.push_back(std::move(pattern));
}

// An older plan of the same sizes has had its day: whoever follows it goes on in the fresh one, where it stood.
void Client::supersede(Pattern* fresh) noexcept {
  for (auto it = patterns_.begin(); it != patterns_.end();) {
    Pattern* const old = it->get();
    if (old == fresh || !old->same_sizes(*fresh)) {
      ++it;
      continue;
    }
    for (Sequence& sequence : sequences_) sequence.follower.replace(old, fresh);
    for (const auto& pattern : patterns_) {
      if (pattern->next == old) pattern->next = fresh;
    }
    if (fresh->next == nullptr && old->next != old) fresh->next = old->next;
    if (ended_ == old) ended_ = fresh;
    if (current_ == old) current_ = fresh;
    if (coming_ == old) coming_ = fresh;
    known_.erase(std::remove(known_.begin(), known_.end(), old), known_.end());
    it = patterns_.erase(it);
  }
}

void Client::install(std::unique_ptr<Pattern> pattern, std::uint64_t iterations_seen) {
  check(*pattern, true);
  for (Table& table : pattern->tables) table.build_index(true);
  Pattern* const fresh = pattern.get();
  std::vector<std::unique_ptr<Pattern>> one;
  one.push_back(std::move(pattern));
  const Guarded guard(pool_->lock);
  admit(std::move(one));
  supersede(fresh);
  keep_patterns_bounded();
  if (replaying_) have_arena();
  coming_ = fresh;
  if (current_ == nullptr || !marked_) current_ = fresh;
  if (marked_) return;
  if (active_at_ == 0) iterations_ = std::max(iterations_, iterations_seen);
  for (Sequence& sequence : sequences_) sequence.follower.take_up(fresh);
}

void Client::load(std::unique_ptr<Pattern> warmup, std::unique_ptr<Pattern> steady) {
  if (warmup != nullptr) check(*warmup, false);
  check(*steady, true);
  steady->next = steady.get();
  std::vector<std::unique_ptr<Pattern>> both;
  if (warmup != nullptr) {
    warmup->next = steady.get();
    both.push_back(std::move(warmup));
  }
  both.push_back(std::move(steady));
  for (const auto& pattern : both) {
    for (Table& table : pattern->tables) table.build_index(pattern->cyclic);
  }
  const Guarded guard(pool_->lock);
  Pattern* const first = both.front().get();
  admit(std::move(both));
  current_ = first;
  ended_ = nullptr;
  have_arena();
  turn_ = 1;
  for (Sequence& sequence : sequences_) sequence.follower.begin(first, ~std::uint64_t{0}, turn_);
}

void Client::drop_patterns() noexcept {
  const Guarded guard(pool_->lock);
  for (Sequence& sequence : sequences_) sequence.follower.leave();
  current_ = ended_ = coming_ = nullptr;
  replaying_ = false;
  known_.clear();
  patterns_.clear();
  try {
    pool_->rebuild_cells();
  } catch (...) {  // the old cells stay: right, and a little larger than needed
  }
  pool_->shrink_arena();
}

bool Client::give_back(bool force) noexcept {
  const Guarded guard(pool_->lock);
  pool_->trim();
  const bool quiet = gave_back_at_ == iterations_;
  gave_back_at_ = iterations_;
  if (!force && !quiet) return pool_->arena_bytes() == 0;
  if (!pool_->release_arena()) return false;
  replaying_ = false;
  return true;
}

void Client::signal_work() noexcept {
  check_at_ = ~std::uint64_t{0};
  if (work_) return;
  work_ = true;
  bell().rung.notify_all();
}

bool Client::wait_for_work(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const Clock::time_point deadline = Clock::now() + patience;
  std::unique_lock<std::mutex> waiting(bell().mutex);
  for (;;) {
    {
      const Guarded guard(pool_->lock);
      if (std::exchange(woken_, false)) return false;
      if (std::exchange(work_, false)) return true;
    }
    // A bell rung between the look and the wait is missed, so no wait is long.
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return false;
    const Clock::time_point slice = std::min<Clock::time_point>(deadline, now + std::chrono::milliseconds(20));
    bell().rung.wait_until(waiting, slice);
  }
}

void Client::wake() noexcept {
  {
    const Guarded guard(pool_->lock);
    woken_ = true;
  }
  bell().rung.notify_all();
}

void Client::check_again_after(std::uint64_t events) noexcept {
  const Guarded guard(pool_->lock);
  check_at_ = ring_.seen() + events;
}

// --- fork: the child inherits every lock in a known state, and no thread but its own

void Client::prepare_fork() noexcept {
  registry().lock.lock();
  for (Pool* pool : all_pools()) pool->lock.lock();
}

void Client::after_fork_in_parent() noexcept {
  for (Pool* pool : all_pools()) pool->lock.unlock();
  registry().lock.unlock();
}

void Client::after_fork_in_child() noexcept {
  if (!MEMPOOL_GUARDED("fork")) return;
  bell_slot() = new Bell;  // the old one may be held by a thread that no longer exists
  for (Pool* pool : all_pools()) pool->set_forked();
  for (const auto& [uid, client] : registry().clients) {
    client->replaying_ = false;
    client->ring_.set_on(false);
    client->ring_.clear();
    client->tape_.set_on(false);
    client->tape_.clear();
  }
  after_fork_in_parent();
}

// --- what is known

Client::State Client::state() {
  const Guarded guard(pool_->lock);
  return {ring_.on(), tape_.on(),  marked_,           replaying_,   iterations_, marks_,
          active_at_, settled(),   spoilt_,           large_allocations(), sequences_.size(), ring_.seen(), ring_.dropped(),
          ring_.kept()};
}

ClientStats Client::stats() {
  const Guarded guard(pool_->lock);
  ClientStats stats = stats_;
  for (std::size_t i = 0; replaying_ && i < stats.steady.size(); ++i) {
    stats.steady[i] = stats.outcomes[i] - before_steady_[i];
  }
  return stats;
}

void Client::reset_peaks() noexcept {
  const Guarded guard(pool_->lock);
  for (Gauge* gauge : {&stats_.requested, &stats_.live, &stats_.blocks, &stats_.small}) gauge->peak = gauge->current;
  pool_->source().reset_peak();
}

std::vector<Divergence> Client::divergences() {
  const Guarded guard(pool_->lock);
  return {divergences_.begin(), divergences_.end()};
}

}  // namespace mempool
