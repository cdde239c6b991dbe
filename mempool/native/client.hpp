// One adapter's view of a pool: its sequences, recording, patterns and statistics. The state machine of the project.
//
//   pass-through --set_active(true)--> recording --install()--> armed --boundary, arena had--> replaying
//                                         ^                                                      |
//                                         +---- the pattern changed for good (planner decides) --+
//
// In every state a request is served: from its planned address if it follows a pattern and the guard agrees, else from
// the fallback. Entry points take the size, the stream and nothing else of the framework; the device is the pool's.
#pragma once

#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bell.hpp"
#include "follower.hpp"
#include "live.hpp"
#include "lookahead.hpp"
#include "pool.hpp"
#include "rarely.hpp"
#include "recorder.hpp"
#include "stats.hpp"
#include "succession.hpp"
#include "tape.hpp"

namespace mempool {

// A difference between plan and program, for pool.explain().
struct Divergence {
  std::uint64_t iteration = 0;
  std::uint32_t sequence = 0;
  std::uint32_t position = 0;   // in its sequence's table
  std::uint64_t expected = 0;   // bytes
  std::uint64_t actual = 0;     // bytes
  Stream stream = 0;
  Outcome outcome = Outcome::lost;
  std::uint64_t repeats = 1;    // times in a row at this position with these sizes
};

// Why the last request of this thread could not be served: bytes, of all clients of its pool.
struct OutOfMemory {
  std::size_t asked = 0, requested = 0, live = 0, reserved = 0, arena = 0, limit = 0;
};

enum class Mark : std::uint8_t { step, begin, end };

class Client : private Live<Client> {
 public:
  using Live<Client>::count;
  Client(std::shared_ptr<Pool> pool, std::string name);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // --- the hot path; any thread, with or without an interpreter lock
  // 0: out of memory, and last_out_of_memory() says more. `zeroed`: filled with zeros, untouched where it can be.
  Address allocate(std::size_t bytes, Stream stream, bool zeroed = false) noexcept;
  // False: not ours, or (`dead`) ours and already free; nothing happened.
  bool free(Address address, Stream stream, bool* dead = nullptr) noexcept;
  // The same for a caller who holds what others need meanwhile, as an interpreter's lock: they wait neither for the pool's
  // lock nor for the device. 0 or false: not at once, and nothing happened.
  Address allocate_at_once(std::size_t bytes, Stream stream) noexcept;
  bool free_at_once(Address address, Stream stream) noexcept;
  // Moves to a new buffer of `bytes`; 0: not served, the old one is as it was. `foreign`: the old one is not ours.
  Address reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept;

  // A live buffer is used by this stream too. False: no such buffer, or the stream is its own. May throw std::bad_alloc.
  bool use(Address address, Stream stream);

  // --- marks and scopes; any thread
  void mark(Mark mark, bool found = false);  // found: not by the program, which the tape tells
  void show_found();                         // a step that is on the tape alone
  void enter_dynamic() noexcept;  // until leave_dynamic(), nothing is planned or recorded
  void leave_dynamic() noexcept;

  // --- recording and planning; the planner's thread
  void set_recording(bool on) noexcept;       // the planner's ring
  // Room for twice as many events, if the recording is full and small beside what is recorded. May throw std::bad_alloc.
  bool grow_recording();
  // Everything, for a trace file. What is too much for memory goes to a file in `folder`, if there is one; see tape.hpp. May
  // throw std::bad_alloc.
  void set_tape(bool on, const std::string& folder = {}, std::size_t piece = Tape::kPiece);
  struct Recording {
    std::vector<BriefEvent> events;     // oldest first
    std::vector<Stream> streams;        // by sequence
    std::vector<std::uint64_t> counts;  // by sequence: allocations ever, at the same moment
    bool whole = true;                  // nothing was lost or left out since the client began
  };
  Recording recording(std::size_t allocations = ~std::size_t{0});  // the last so many, and what came between
  // The oldest events of it that nobody has taken; empty: there are none. One thread at a time. May throw std::bad_alloc.
  std::vector<RecordedEvent> take_tape();
  // The last so many allocations, frees and dealings with the device, for who asks later; 0: none, and those kept are
  // forgotten. The same number again goes on; another one begins anew. A free has the bytes that were requested. May throw
  // std::bad_alloc.
  void set_history(std::size_t events);
  const Recorder<RecordedEvent>& history() const noexcept { return history_; }  // the pool's lock is held
  // A cyclic pattern that was recorded here, in which so many iterations were seen. `instead`: only in place of one of the same
  // sizes; false: that is forgotten by now, and so is this. May throw std::bad_alloc, or std::invalid_argument for one that
  // this pool cannot replay; then nothing has changed.
  bool install(std::unique_ptr<Pattern> pattern, std::uint64_t iterations_seen, bool instead = false);
  // A pattern from a file: its warm-up first, if there is one. Replays from the next allocation on. Throws as install.
  void load(std::unique_ptr<Pattern> warmup, std::unique_ptr<Pattern> steady);
  void drop_patterns() noexcept;
  // A loaded pattern begins as soon as it is known which device has its arena; those of the pool's other clients too.
  void device_is_bound() noexcept;
  // Gives free memory back. The arena goes too if nothing in it is alive and either no client's iteration ran since the last
  // call (so that a loop that asks each time does not thrash) or `force`, and by force as much of its end as can be where
  // something is alive and it has pages; the next boundary takes it again. True: no arena left.
  bool give_back(bool force) noexcept;
  // The arena now, rather than at the next boundary, and whatever was refused before: room was made for it. Where there is a budget
  // it comes only so. False: not as large as the patterns need it.
  bool ask_for_arena() noexcept;
  // Or at boundaries, as without a budget, as long as somebody sees to it that there is room.
  void set_takes_arena(bool takes) noexcept;
  // Where the plan that is followed has the live buffer, or would have it if there were an arena; kDynamic: nowhere.
  Offset place_of(Address address) noexcept;
  // The next request inside of a dynamic scope gets this place in the arena if it is free: what was there before comes back.
  void place_next(Offset place) noexcept;
  bool is_alone() const noexcept;  // no other client uses this memory

  // --- waiting for something to plan; the planner's thread
  // What recurs in the recording, as far as a brief look tells.
  struct Recurs {
    std::size_t begin;        // the earliest allocation of the ring that says anything; 0 where there are marks
    std::size_t allocations;  // in the ring
  };
  // None: nothing recurs. May throw std::bad_alloc.
  std::optional<Recurs> look();
  // What ends a wait beside news in the recording.
  struct Wait {
    double seconds;             // at most
    double looks;               // seconds of processor time for looks in vain, which end no wait
    std::uint64_t allocations;  // of State: so many
    std::uint64_t misses;       // while nothing is recorded: so many, ever
    std::uint64_t spoilt;       // of State: so much while nothing is recorded
    std::uint64_t around = 0;   // iterations of State, before which nobody plans around what stays in the way
    std::uint64_t others_layouts = ~std::uint64_t{0};  // ends it where State has another number; this one: nobody cares
  };
  struct Heard {
    bool news;      // there may be something to plan
    double looked;  // seconds of processor time
  };
  // Also ends when something stays in the way of a plan, when the arena was refused, and by wake(). Meanwhile free memory
  // goes back that was idle for one to two seconds.
  Heard wait_for_work(const Wait& wait) noexcept;
  // Whether the bell rang since it was heard last: for who looks at the recording without waiting.
  bool heard() noexcept;
  void wake() noexcept;
  void check_again_after(std::uint64_t events) noexcept;  // of the ring, from now

  // --- beside other clients of the pool; its lock is held
  bool replaying() const noexcept { return replaying_; }
  bool plays() const noexcept;  // in the middle of its plan: holes of the arena are about to be used
  std::uint64_t iterations() const noexcept { return iterations_; }
  std::size_t retained() const noexcept { return retained_; }
  // The largest arena that a pattern needs which does not rest.
  std::size_t needed_bytes() const noexcept { return largest() == nullptr ? 0 : largest()->arena_bytes; }
  std::size_t live() const noexcept { return stats_.live.current; }
  bool nothing_alive() const noexcept { return stats_.blocks.current == 0; }
  // What the other one left alive is from now on freed and counted here. Both serve the same framework, one after the other.
  void inherit(Client& former) noexcept;
  bool came_to_boundary = false;  // since idle memory went back last: Pool::return_idle_after

  // Bytes of free memory that this client would have the pool keep; takes the lock. The largest wish counts.
  void set_retained_limit(std::size_t bytes) noexcept;

  // In a forked child: no planned addresses, no recording, no planner.
  static void prepare_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

  const std::vector<Pattern*>& patterns() const noexcept { return known_; }
  // To be called about once a second: what nobody has followed for long rests, and so does all while only others of the memory
  // are at work; the arena gives back what only such patterns need. One that is followed again has the whole arena from its second iteration on.
  void rest_unused() noexcept;
  // Forgets patterns that nobody follows and that need a larger arena than the others. The pool's lock is held.
  void forget_unused() noexcept;
  struct State {
    bool recording = false, tape = false, marked = false, replaying = false;
    std::uint64_t iterations = 0;        // boundaries seen
    std::uint64_t marks = 0;
    std::uint64_t plan_active_at_iteration = 0;  // the first one; 0: not yet
    std::uint64_t latest_plan_active_at_iteration = 0;
    bool settled = false;                // so many iterations without a miss that no longer period is to be expected
    std::uint64_t spoilt = 0;            // a score: up with every iteration that missed, down with every clean one
    std::uint64_t allocations = 0;       // of at least the small-size threshold
    std::size_t sequences = 0;
    std::uint64_t seen = 0, dropped = 0, kept = 0;  // events of the ring
    std::uint64_t lost = 0;              // events of the tape for which there was no room
    std::uint64_t in_file = 0;           // events of the tape that wait there
    std::uint64_t others_layouts = 0;    // times that where other clients' plans lie has changed
    std::size_t needed = 0;              // bytes of the arena that patterns need
    Refusal refusal = Refusal::none;     // why there is none so large
  };
  State state();
  ClientStats stats();
  void reset_peaks() noexcept;
  // Where something is in the way of a plan iteration after iteration: its range of the arena, and all that were in the
  // way before and are still there.
  std::vector<std::pair<Offset, Offset>> blockers();
  // Where in the arena the plans of the pool's other clients lie, but those that rest: disjoint ranges in order.
  std::vector<std::pair<Offset, Offset>> others_reach();
  std::vector<Divergence> divergences();
  static OutOfMemory last_out_of_memory() noexcept;
  const std::string& name() const noexcept { return name_; }
  Pool& pool() noexcept { return *pool_; }

  // Between enter and leave the allocations of this thread bypass the adapters: the pool must not record itself.
  class Bypass {
   public:
    void enter() noexcept;
    void leave() noexcept;
    static bool active() noexcept;
  };

 private:
  struct Sequence {
    Sequence(std::uint32_t id, Stream stream, const void* thread) : follower(id, stream), thread(thread) {}
    Follower follower;
    Lookahead lookahead;
    const void* thread;  // null: its thread has ended; the next new thread takes it over
    std::uint64_t looked_at = 0;  // its count when that was last looked at
    bool is_spare() const noexcept { return follower.stream() == kNoStream; }
  };
  static constexpr Stream kNoStream = std::numeric_limits<Stream>::min();
  friend class ThreadCache;
  struct Aside {  // whether this iteration, which has outgrown the plan, goes without it
    unsigned larger = 0;    // buffers at its beginning than is due there
    double excess = 0;      // how much larger the last of them was, as a share of what is due
    bool decided = false;
    bool stands = false;
    unsigned patience = 0;  // allocations, until it goes on with the plan; 0: the arena has gone back
  };
  struct Blocker {  // what lies where a plan has another buffer, and the iterations in which it was in the way
    Occupancy::Range range;
    std::uint64_t first, last;
  };

  Sequence& sequence(Stream stream);
  Sequence& find_sequence(Stream stream, const void* thread);
  Sequence& new_sequence(Stream stream, const void* thread);
  void sweep_sequences();
  void retire(const void* thread) noexcept;
  Address serve_hit(Sequence& sequence, std::size_t bytes) noexcept;
  void served(const Pool::Given& given, std::size_t bytes) noexcept;
  bool is_small(std::size_t bytes) const noexcept { return bytes <= pool_->options().small_bytes; }
  void served_small(const Pool::Given& given, std::size_t bytes) noexcept;
  void ended_small(std::size_t requested, std::size_t rounded) noexcept;
  void serve_small(std::size_t bytes, Stream stream, Pool::Given& given) noexcept;
  bool serve_for_graph(std::size_t bytes, Stream stream, Pool::Given& given) noexcept;
  struct Resized {  // of the buffer that a new one replaces
    Address address = 0;
    Pool::Freed before{};
    bool done = false;  // the new one has its memory and contents
  };
  Pool::Given serve(std::size_t bytes, Stream stream, Resized* resized = nullptr) noexcept;
  Pool::Given serve_large(Sequence& sequence, std::size_t bytes, Stream stream, Resized* resized);
  void ended(std::size_t requested, std::size_t rounded) noexcept;
  void freed(Address address, std::size_t requested, std::size_t rounded, Stream stream) noexcept;
  bool free_locked(Address address, Stream stream, bool* dead) noexcept;
  Address serve_planned(Sequence& sequence, std::size_t bytes, Outcome& outcome, Offset& place);
  void look_ahead(Sequence& sequence) noexcept;
  bool outside() const noexcept { return dynamic_ != 0 || between_; }
  bool recorded() const noexcept { return ring_.on() | tape_.on() | history_.on(); }  // in one branch
  void note(const Follower& follower, std::size_t bytes, Outcome outcome) noexcept;
  void boundary(Pattern* ended) noexcept;
  void note_blocker(const Occupancy::Range& range) noexcept;
  void watch_blockers() noexcept;
  std::uint64_t large_allocations() const noexcept;
  std::uint64_t misses() const noexcept;         // ever
  std::uint64_t latest_misses() const noexcept;  // since the latest plan took effect
  void begin_latest() noexcept;
  void perhaps_in_effect() noexcept;
  bool settled() const noexcept;
  void judge_iteration() noexcept;
  void look_beside() noexcept;
  Pool::Holes holes_for(const Sequence& asks) const noexcept;
  void begin(Sequence& sequence, std::uint64_t mark) noexcept;
  void begin_everywhere(std::uint64_t mark) noexcept;  // the mark's number
  Pattern* largest(std::size_t most = ~std::size_t{0}) const noexcept;
  void have_arena() noexcept;
  void take_arena() noexcept;
  bool awaits_calm() noexcept;
  void come_to_calm(Stream stream) noexcept;
  bool outgrows(const Follower::Due& due, std::size_t bytes, const Follower::Match& match) noexcept;
  bool may_stand_aside() noexcept;
  void stand_aside(Stream stream) noexcept;
  bool has_to_ask() const noexcept { return pool_->source().has_budget() && !takes_arena_; }
  void refused(Pattern& pattern, Refusal why) noexcept;
  void have_arena_for_others() noexcept;
  void signal_work() noexcept;
  bool hear() noexcept;
  std::size_t events_kept() noexcept;
  bool is_news(const Wait& wait, double looked, std::uint64_t dropped) noexcept;
  bool is_due(const Wait& wait) noexcept;
  std::vector<std::pair<Offset, Offset>> lasting_blockers() const;
  void refuse(std::size_t bytes) noexcept;
  void check(const Pattern& pattern, bool cyclic) const;
  void admit(std::vector<std::unique_ptr<Pattern>> fresh);
  bool supersede(Pattern* fresh) noexcept;
  bool in_use(const Pattern* pattern) const noexcept;
  bool is_idle() noexcept;
  void forget(Pattern* pattern) noexcept;
  void name_streams(std::uint32_t sequence) noexcept;
  void keep_patterns_bounded() noexcept;
  void layout_changed() noexcept;
  Pattern* followed() const noexcept;

  std::shared_ptr<Pool> pool_;
  std::string name_;
  std::uint64_t uid_;
  Owner owner_ = 0;  // its number in the pool
  std::deque<Sequence> sequences_;    // by number, which a spare one keeps
  std::vector<Sequence*> spare_;      // unused for long, by streams and threads that may be no more
  std::size_t begun_ = 0;             // sequences since it was last looked which are unused
  std::uint64_t caches_ = 0;          // what threads remember of them is right if it has this number
  Recorder<BriefEvent> ring_;
  Tape tape_;
  Recorder<RecordedEvent> history_{0};
  std::vector<std::unique_ptr<Pattern>> patterns_;
  std::vector<Pattern*> known_;       // the same, most recently used first
  std::uint64_t rested_at_ = 0;       // iteration of the last rest_unused()
  std::uint64_t allocations_seen_ = 0, others_seen_ = 0;  // then: its own, and others' boundaries
  std::uint64_t layouts_ = 0;         // of the pool's, those that came from here
  Pattern* current_ = nullptr;        // where a new iteration or thread begins
  // An envelope was loaded, and the first iteration is not over: it has places for anything, parameters too.
  bool holds_back_ = false;
  bool awaits_calm_ = false;          // for a larger arena, until least is alive in this iteration
  // When to give back what lies idle beside the arena, on a device where that has to be waited for: ever more rarely.
  unsigned looks_beside_ = 0;         // to come
  Rarely beside_{1, 1024};            // iterations
  Aside aside_;
  Rarely asides_{1, 1024};            // iterations; of those for which there was room
  std::size_t taken_beside_ = 0;      // bytes from the device for what had no place in the arena, in this iteration
  Pattern* ended_ = nullptr;          // of the last iteration that ended
  Succession succession_;             // of the iterations that ended
  Pattern* coming_ = nullptr;         // installed, and not in effect before a sequence begins an iteration in it
  ClientStats stats_;
  std::deque<Divergence> divergences_;
  std::vector<Blocker> blockers_;     // alive at every boundary since they were first in the way
  unsigned dynamic_ = 0;              // depth of dynamic scopes
  bool takes_arena_ = false;          // within a budget
  Offset place_next_ = kDynamic;      // see place_next()
  bool between_ = false;              // between the end of a marked region and the next one's beginning
  bool marked_ = false, replaying_ = false;
  std::uint64_t iterations_ = 0, marks_ = 0, active_at_ = 0, latest_at_ = 0, spoilt_ = 0;
  std::uint64_t clean_ = 0;           // iterations in a row without a miss, since the latest plan took effect
  std::uint64_t longest_clean_ = 0;   // of those before a miss
  decltype(ClientStats::outcomes) before_steady_{};  // when the first plan took effect
  decltype(ClientStats::outcomes) before_latest_{};  // and when the latest did
  std::uint64_t misses_before_ = 0;   // when this iteration began
  std::uint64_t turn_ = 0;            // the number of the iteration in which all followers began together last
  std::uint64_t gave_back_at_ = ~std::uint64_t{0};  // iterations of all clients
  Rarely for_others_{32, 1024};       // iterations; an arena that others need
  Refusal refusal_ = Refusal::none;   // of the largest arena that a pattern needs
  std::uint64_t refusals_ = 0;        // times that this has become another one
  std::uint64_t check_at_ = 64;       // ring event
  Bell bell_;
  bool work_ = false;
  bool woken_ = false;                // wake() came, perhaps before the wait
  bool interrupted_ = false;          // the ring was off for a while
  std::uint64_t misses_looked_at_ = ~std::uint64_t{0};
  std::uint64_t refusals_heard_ = 0;
  std::size_t retained_ = 0;
  std::chrono::steady_clock::time_point rested_{};  // rest_unused() by the clock
};

}  // namespace mempool
