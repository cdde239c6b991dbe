// One adapter's view of a pool: sequences, recording, patterns and statistics. The project's state machine.
//
// `RecordingSchedule` says whether requests are recorded, and `Arena` (of the pool) whether planned addresses exist.
// Every state serves every request: from the planned address if the request follows a pattern and the overlap
// guard agrees, else from the fallback. Of the framework, entry points receive only the size and the stream; the device
// belongs to the pool.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/backoff.hpp"
#include "core/decision_log.hpp"
#include "core/flight.hpp"
#include "core/follower.hpp"
#include "core/iteration_results.hpp"
#include "core/live.hpp"
#include "core/pattern.hpp"
#include "core/pool.hpp"
#include "core/recorder.hpp"
#include "core/recording_state.hpp"
#include "core/stats.hpp"
#include "core/threads.hpp"

namespace mempool {

inline constexpr std::size_t kMostPatterns = 16;  // of a client; more are evicted, the least recently used first

// A difference between plan and program, for pool.explain().
struct Divergence {
  std::uint64_t iteration = 0;
  std::uint32_t sequence = 0;
  std::uint32_t position = 0;   // in the table of the sequence
  std::uint64_t expected = 0;   // bytes
  std::uint64_t actual = 0;     // bytes
  Stream stream = 0;
  Outcome outcome = Outcome::desynchronized;
  std::uint64_t repeats = 1;    // consecutive occurrences at this position with these sizes
};

// State of the pool, in bytes over all clients, when this thread's last request failed.
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
  // Allocate a buffer. 0: out of memory; last_out_of_memory() has the details. `zeroed`: filled with zeros;
  // memory that is known to be zero stays untouched.
  Address allocate(std::size_t bytes, Stream stream, bool zeroed = false) noexcept;
  // Call `hook` after each request once the pool reserves more than `most_reserved` bytes or the client has more than
  // `most_misses` misses: in the requesting thread, without a lock. Null ends the calls.
  void watch_departures(void (*hook)(), std::size_t most_reserved, std::uint64_t most_misses) noexcept;
  // Free a buffer. False, without effect: the address is not the pool's, or (`dead`) is the pool's and already free.
  bool free(Address address, Stream stream, bool* dead = nullptr) noexcept;
  // Variants of allocate() and free() for callers that hold a shared resource, such as an interpreter's lock: they wait
  // neither for the pool's lock nor for the device. 0 or false, without effect: a wait would be needed.
  Address allocate_at_once(std::size_t bytes, Stream stream) noexcept;
  bool free_at_once(Address address, Stream stream) noexcept;
  // Move a buffer to a new buffer of `bytes`. 0: out of memory; the old buffer is unchanged. `foreign`: the
  // old address is not the pool's.
  Address reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept;

  // --- the hot path in front of another allocator, which serves all unplanned requests; any thread
  // Return the planned address of a request, or 0: the other allocator serves the request, and if `recorded`,
  // record_outside() follows.
  Address allocate_planned(std::size_t bytes, Stream stream, bool& recorded) noexcept;
  void record_outside(Address address, std::size_t bytes, Stream stream) noexcept;
  // Return false if only the other allocator is concerned: for a small request without a trace and a history.
  bool is_concerned_with(std::size_t bytes) const noexcept {
    return !is_small(bytes) || records_small_.load(std::memory_order_relaxed);
  }
  // Serve a request that the other allocator refused from a hole of the arena; 0: no hole suffices.
  Address allocate_in_hole(std::size_t bytes, Stream stream) noexcept;
  // Free a buffer on the stream of its allocation. planned: in the arena, and freed, with the requested size in
  // `bytes`; outside: the other allocator frees the buffer; unknown: nothing happened.
  enum class Found : std::uint8_t { unknown, outside, planned };
  Found free_planned(Address address, std::size_t* bytes) noexcept;
  // Forget the other allocator's buffers, before the client stops serving.
  void forget_outside() noexcept;

  // Record a use of a live buffer by `stream`. False: no such buffer, or the stream owns the buffer. May
  // throw std::bad_alloc.
  bool use(Address address, Stream stream);

  // --- marks and scopes; any thread
  // found: detected by the pool, not set by the program; the trace records the difference
  void mark(Mark mark, bool found = false);
  void record_detected_step();                         // writes a detected step to the trace only
  void enter_dynamic() noexcept;  // no planning or recording until leave_dynamic()
  void leave_dynamic() noexcept;

  // --- recording and planning; the planner's thread
  // Begin or end recording in the planner's ring.
  void set_recording(bool on) noexcept { advance_recording(on ? RecordingEvent::begin : RecordingEvent::end); }
  // Tell the recording's state machine of an event.
  void advance_recording(RecordingEvent event) noexcept;
  // Record again if the pause is over; return true if so.
  bool resume_recording() noexcept;
  // Double the capacity of the recording if full, and small compared to the memory described. May throw
  // std::bad_alloc.
  bool grow_recording();
  // Record all events for a trace file. Events that exceed the memory for them go to a file in `folder`, if
  // given (see TraceBuffer). May throw std::bad_alloc.
  void set_tracing(bool on, const std::string& folder = {}, std::size_t piece = TraceBuffer::kPiece);
  struct Recording {
    std::vector<BriefEvent> events;     // oldest first
    std::vector<Stream> streams;        // by sequence
    std::vector<std::uint64_t> counts;  // by sequence: total allocations at the time of the copy
    bool whole = true;                  // no event was lost or left out since the client began
  };
  // the last `allocations` allocations and the events between them
  Recording recording(std::size_t allocations = ~std::size_t{0});
  // Return the oldest events of the trace not yet taken; empty: none are left. One thread at a time. May throw
  // std::bad_alloc.
  std::vector<RecordedEvent> take_trace();
  // Keep the last `events` allocations, frees and device calls for later questions; 0: keep none and forget
  // the kept events. An unchanged number continues the history; another number starts a new history. A free
  // event holds the requested bytes. May throw std::bad_alloc.
  void set_history(std::size_t events);
  // call with the pool's lock held
  const Recorder<RecordedEvent>& history() const noexcept { return history_; }
  // Install a cyclic pattern recorded by this client, in which `iterations_seen` iterations were observed.
  // `instead`: install only as a replacement of a known pattern with the same sizes; 0: no such pattern is
  // known any more, and the new pattern is discarded. Returns the pattern's id. May throw std::bad_alloc, or std::invalid_argument
  // for a pattern that this pool cannot replay; then nothing has changed.
  std::uint64_t install(std::unique_ptr<Pattern> pattern, std::uint64_t iterations_seen, bool instead = false);
  // Load a pattern from a file, preceded by a warm-up if the file has one. Replay starts with the next
  // allocation. `unsure`: the pattern may belong to another program, so its arena is taken only after some allocations
  // that followed the pattern. Returns the id of `steady`. Throws like install().
  std::uint64_t load(std::unique_ptr<Pattern> warmup, std::unique_ptr<Pattern> steady, bool unsure = false);
  void drop_patterns() noexcept;
  // Begin loaded patterns as soon as the device of the arena is known, for all clients of the pool.
  void device_is_bound() noexcept;
  // Release free memory. An arena without live ranges is released, too, with `force` or if no iteration of any client
  // ran since the last call (so that a call in each step does not thrash). With `force`, an arena with live ranges and
  // with pages releases as much of its end as possible. The next boundary allocates the arena again. True: no arena
  // remains.
  bool give_back(bool force) noexcept;
  // Allocate the arena now, after the caller made room for it, instead of at the next boundary, and regardless of
  // earlier refusals. Under a budget, only this call allocates an arena, unless set_arena_allowed() permits boundaries
  // to do so. False: the arena is smaller than the patterns need.
  bool request_arena() noexcept;
  // Allocate the arena from hosted memory that was requested and is now offered or refused.
  void take_offered_arena() noexcept;
  // Under a budget, allow arena allocation at boundaries too, as long as the caller makes sure that there is
  // room.
  void set_arena_allowed(bool takes) noexcept;
  // Return the planned offset of a live buffer, even if the buffer is outside the arena only because there is none;
  // kDynamic: none.
  Offset planned_offset_of(Address address) noexcept;
  // Serve the next request inside a dynamic scope at this offset of the arena if free, to restore a buffer's former
  // address.
  void allocate_next_at(Offset place) noexcept;
  bool is_alone() const noexcept;  // true: no other client uses this memory

  // --- waiting for planning work; the planner's thread
  // Recurring part of the recording, found by a brief search.
  struct Recurrence {
    std::size_t begin;        // the earliest relevant allocation in the ring; 0 if there are marks
    std::size_t allocations;  // in the ring
  };
  // Search the recording for a recurring iteration. None: nothing recurs. May throw std::bad_alloc.
  std::optional<Recurrence> find_recurrence();
  // Conditions that end a wait, besides news in the recording.
  struct Wait {
    double seconds;             // longest wait
    double search_seconds;               // seconds of processor time for unsuccessful looks, which do not end the wait
    std::uint64_t allocations;  // State::allocations to reach
    std::uint64_t replan_at_iteration = 0;   // State::iterations before which no replanning around blocking ranges starts
    // ends the wait if State::other_layouts differs; the default: ignored
    std::uint64_t other_layouts = ~std::uint64_t{0};
  };
  struct WaitResult {
    bool news;      // true: there may be something to plan
    double search_seconds;  // seconds of processor time
  };
  // Wait until one of the conditions holds. Also ends when the pause of the recording is over, a range keeps blocking a plan, or the arena was
  // refused, and by wake(). Meanwhile releases free memory that has been idle for one to two seconds.
  WaitResult wait_for_work(const Wait& wait) noexcept;
  // Return true if the bell rang since the last call, for callers that inspect the recording without waiting.
  bool take_work_signal() noexcept;
  void wake() noexcept;
  // Do not judge plans by the time of this thread's present iteration, in which the planner has worked.
  void ignore_time() noexcept;
  void check_again_after(std::uint64_t events) noexcept;  // in events of the ring, from now

  // --- coordination with other clients of the pool; call with the pool's lock held
  bool replaying() const noexcept { return replaying_; }
  // true: in the middle of a plan, so that holes of the arena are about to be used
  bool plays() const noexcept;
  std::uint64_t iterations() const noexcept { return iterations_; }
  std::size_t retained() const noexcept { return retained_; }
  // Return the size of the largest arena that a pattern needs, dormant patterns excepted.
  std::size_t needed_bytes() const noexcept { return largest() == nullptr ? 0 : largest()->arena_bytes; }
  std::size_t live() const noexcept { return stats_.live.current; }
  bool nothing_alive() const noexcept { return stats_.blocks.current == 0; }
  // Take over the live buffers of `former`, which served the same framework before: they are freed and counted here.
  void inherit(Client& former) noexcept;
  bool reached_boundary = false;  // since idle memory was last released: see Pool::return_idle_after

  // Set the bytes of free memory that the pool should keep for this client; takes the lock. The largest wish
  // of all clients counts.
  void set_retained_limit(std::size_t bytes) noexcept;

  // Handlers for fork. A forked child has no planned addresses, no recording and no planner.
  static void prepare_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

  const std::vector<Pattern*>& patterns() const noexcept { return known_; }
  // Mark patterns as dormant if no sequence has followed them for long, or while only other clients of the memory work.
  // The arena releases the memory that only dormant patterns need. Call about once a second. A pattern that is followed
  // again has its whole arena from the second iteration on.
  void retire_unused_patterns() noexcept;
  // Forget unused patterns that need a larger arena than the patterns in use. Call with the pool's lock held.
  void forget_unused() noexcept;
  struct State {
    RecordingState recording = RecordingState::idle;
    bool recording_due = false;          // the pause of the recording is over
    std::uint64_t recording_began = 0;   // number of allocations when the last recording began
    double miss_rate = 0;                // since recording last began or ended, or since the latest plan
    bool tracing = false, marked = false, replaying = false;
    std::uint64_t iterations = 0;        // boundaries seen
    std::uint64_t marks = 0;
    std::uint64_t plan_active_at_iteration = 0;  // the first iteration with a plan; 0: none yet
    std::uint64_t latest_plan_active_at_iteration = 0;
    bool settled = false;  // so many iterations without a miss that a longer period is unlikely
    std::uint64_t miss_score = 0;  // score: raised by every iteration with a miss, lowered by every clean one
    std::uint64_t allocations = 0;       // above the small-size threshold
    std::size_t sequences = 0;
    std::uint64_t seen = 0, dropped = 0, kept = 0;  // events of the ring
    std::uint64_t lost = 0;              // events of the trace dropped for lack of room
    std::uint64_t in_file = 0;           // events waiting in the trace's file
    std::uint64_t other_layouts = 0;    // changes of the arena layout of other clients' plans
    std::size_t needed = 0;              // bytes of arena that patterns need
    Refusal refusal = Refusal::none;     // why no arena of that size exists
  };
  State state();
  struct Results {
    IterationResults unplanned, planned;  // without a plan in effect; since the latest plan took effect
  };
  Results results();
  ClientStats stats();
  // Return the number of requests so far that missed the plan. The caller holds the pool's lock.
  std::uint64_t misses() const noexcept;
  // Return the known unplanned part of this thread's next requests, of `bytes` in total.
  std::uint64_t unplanned_bytes(std::uint64_t bytes) noexcept;
  void reset_peaks() noexcept;
  // Return the largest number of live bytes since the last call.
  std::size_t take_live_peak() noexcept;
  // Return the ranges of the arena that repeatedly block a plan, with all live ranges that blocked plans before; empty
  // if no range blocks a plan at present.
  std::vector<std::pair<Offset, Offset>> pinned_ranges();
  // Return the ranges of the arena used by plans of the pool's other clients, dormant patterns excepted:
  // disjoint and in order.
  std::vector<std::pair<Offset, Offset>> other_plans_ranges();
  std::vector<Divergence> divergences();
  std::vector<DecisionLog::Entry> decisions();
  // Add to the decision log.
  void decide(Decision decision, std::uint64_t pattern = 0, std::uint64_t count = 0, std::uint64_t times = 0,
              std::uint64_t bytes = 0) noexcept {
    decisions_.add({iterations_, decision, pattern, count, times, bytes});
  }
  static OutOfMemory last_out_of_memory() noexcept;
  const std::string& name() const noexcept { return name_; }
  Pool& pool() noexcept { return *pool_; }

  // While active, this thread's allocations bypass the adapters: the pool must not record itself.
  class Bypass {
   public:
    void enter() noexcept;
    void leave() noexcept;
    static bool active() noexcept;
  };

  // While an object exists, the thread will retry a failed request, so recordings omit the failure.
  class FirstAttempt {
   public:
    FirstAttempt() noexcept;
    ~FirstAttempt();
    FirstAttempt(const FirstAttempt&) = delete;
    FirstAttempt& operator=(const FirstAttempt&) = delete;
  };

 private:
  struct Sequence {
    Sequence(std::uint32_t id, Stream stream, const void* thread) : follower(id, stream), thread(thread) {}
    Follower follower;
    Lookahead lookahead;
    const void* thread;  // null: the thread has ended, and the next new thread takes over the sequence
    std::uint64_t looked_at = 0;  // allocation count at the last sweep
    bool is_spare() const noexcept { return follower.stream() == kNoStream; }
  };
  static constexpr Stream kNoStream = std::numeric_limits<Stream>::min();
  friend class ThreadCache;
  struct PlanBypass {  // state of bypassing the plan in an iteration that outgrows the plan
    unsigned larger = 0;    // buffers at the iteration's beginning that are larger than planned
    double excess = 0;      // of the last such buffer: (size - planned size) / planned size
    bool decided = false;  // the decision for this iteration has been made
    bool active = false;  // true: the plan is bypassed in this iteration
    // allocations until the iteration returns to the plan; 0: the arena has been released
    unsigned patience = 0;
  };
  // a live range that blocks a planned slot, and the first and last iteration of the blocking
  struct Pinned {
    Occupancy::Range range;
    std::uint64_t first, last;
  };

  [[gnu::noinline, gnu::cold]] void note_call(flight::Call call, bool done, std::uint64_t first, Stream stream,
                                              Address address = 0) noexcept;
  Sequence& sequence(Stream stream);
  Sequence& find_sequence(Stream stream, const void* thread);
  Sequence& new_sequence(Stream stream, const void* thread);
  void sweep_sequences();
  void retire(const void* thread) noexcept;
  Address serve_hit(Sequence& sequence, std::size_t bytes) noexcept;
  void count_allocation(const Pool::Given& given, std::size_t bytes) noexcept;
  void record_large(const Sequence& sequence, Address address, std::size_t bytes, Stream stream) noexcept;
  bool is_small(std::size_t bytes) const noexcept { return bytes <= pool_->options().small_bytes; }
  void count_small_allocation(const Pool::Given& given, std::size_t bytes) noexcept;
  void count_small_free(std::size_t requested, std::size_t rounded) noexcept;
  void serve_small(std::size_t bytes, Stream stream, Pool::Given& given) noexcept;
  void (*departure() const noexcept)();  // the hook if a request departs; see watch_departures()
  bool serve_for_graph(std::size_t bytes, Stream stream, Pool::Given& given) noexcept;
  struct Resized {  // the buffer that a new one replaces
    Address address = 0;
    Pool::Freed before{};
    bool done = false;  // the new buffer has taken over memory and contents
  };
  Pool::Given serve(std::size_t bytes, Stream stream, Resized* resized = nullptr) noexcept;
  Pool::Given serve_large(Sequence& sequence, std::size_t bytes, Stream stream, Resized* resized);
  void count_free(std::size_t requested, std::size_t rounded) noexcept;
  void freed(Address address, std::size_t requested, std::size_t rounded, Stream stream) noexcept;
  std::size_t free_in_arena(Address address, Stream stream) noexcept;
  bool free_outside(Address address) noexcept;
  bool free_locked(Address address, Stream stream, bool* dead) noexcept;
  Address serve_planned(Sequence& sequence, std::size_t bytes, Outcome& outcome, Offset& place);
  void prefetch_upcoming(Sequence& sequence) noexcept;
  bool outside() const noexcept { return dynamic_ != 0 || between_; }
  bool replays() const noexcept { return replaying_ || matches_awaited_ != 0; }
  RecordingSchedule::Counts counts() const noexcept { return {large_allocations(), misses()}; }
  void apply(RecordingEvent event) noexcept;
  bool recording_due() const noexcept { return recording_.is_due(counts(), replays(), miss_score_); }
  // call after the trace or the history is switched
  void note_small_recorded() noexcept { records_small_.store(trace_.on() || history_.on(), std::memory_order_relaxed); }
  bool recorded() const noexcept { return ring_.on() | trace_.on() | history_.on(); }  // as one branch
  void note(const Follower& follower, std::size_t bytes, Outcome outcome) noexcept;
  void boundary(Pattern* ended) noexcept;
  void note_pinned(const Occupancy::Range& range) noexcept;
  void forget_freed_pinned() noexcept;
  std::uint64_t large_allocations() const noexcept;
  std::uint64_t latest_misses() const noexcept;  // since the latest plan took effect
  void begin_latest() noexcept;
  void begin_latest_if_followed() noexcept;
  bool settled() const noexcept;
  void judge_iteration() noexcept;
  void keep_result() noexcept;
  double seconds_since_mark() noexcept;
  void release_idle_outside_arena() noexcept;
  bool may_use_holes(const Sequence& asks) const noexcept;
  void begin(Sequence& sequence, std::uint64_t mark) noexcept;
  void begin_everywhere(std::uint64_t mark) noexcept;  // `mark`: number of the mark
  Pattern* largest(std::size_t most = ~std::size_t{0}) const noexcept;
  void have_arena() noexcept;
  bool has_arena_of_use() noexcept;
  void set_loaded_aside(const Pattern* fresh) noexcept;
  void confirm_loaded(const Follower& follower, const Follower::Match& match) noexcept;
  std::uint32_t matches_to_confirm(const Pattern& pattern) const noexcept;
  void take_arena() noexcept;
  bool defer_growth_to_low_water() noexcept;
  void grow_at_low_water(Stream stream) noexcept;
  bool outgrows(const Follower::Due& due, std::size_t bytes, const Follower::Match& match) noexcept;
  bool may_bypass_plan() noexcept;
  void bypass_plan(Stream stream) noexcept;
  bool needs_request() const noexcept { return pool_->source().has_budget() && !arena_allowed_; }
  void refused(Pattern& pattern, Refusal why) noexcept;
  void signal_work() noexcept;
  bool take_signal() noexcept;
  std::size_t events_kept() noexcept;
  bool is_news(const Wait& wait, double looked, std::uint64_t dropped) noexcept;
  bool is_due(const Wait& wait) noexcept;
  std::vector<std::pair<Offset, Offset>> lasting_pinned() const;
  void report_out_of_memory(std::size_t bytes, Stream stream) noexcept;
  void check(const Pattern& pattern, bool cyclic) const;
  void note_pattern(const Pattern& pattern) const noexcept;
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
  Owner owner_ = 0;  // this client's number in the pool
  std::deque<Sequence> sequences_;    // by number; a spare sequence keeps the number
  std::vector<Sequence*> spare_;      // unused for long; their streams or threads may no longer exist
  std::size_t begun_ = 0;             // new sequences since the last sweep for unused ones
  std::uint64_t caches_ = 0;          // thread caches are valid only if they hold this number
  Recorder<BriefEvent> ring_;
  RecordingSchedule recording_;
  TraceBuffer trace_;
  Recorder<RecordedEvent> history_{0};
  Atomic<bool> records_small_{false};  // see note_small_recorded()
  std::vector<std::unique_ptr<Pattern>> patterns_;
  std::uint64_t patterns_admitted_ = 0;
  std::vector<Pattern*> known_;       // the same patterns, most recently used first
  std::uint64_t unused_checked_at_ = 0;       // iteration of the last retire_unused_patterns()
  // at that time: own allocations, and boundaries of other clients
  std::uint64_t allocations_seen_ = 0, others_seen_ = 0;
  std::uint64_t layouts_ = 0;         // the pool's layout changes caused by this client
  Pattern* current_ = nullptr;        // the pattern with which a new iteration or thread begins
  // An envelope was loaded, and the first iteration has not ended. The envelope has slots for all buffers, even for
  // parameters, so replay must wait.
  bool warmup_only_ = false;
  bool growth_deferred_ = false;          // growth of the arena is deferred to this iteration's low-water mark
  // Schedule for releasing idle memory outside the arena on devices where releasing waits for the device,
  // with backoff.
  ExponentialBackoff idle_backoff_{1, 1024};            // in iterations
  // Number of allocations that must still follow a loaded plan before its arena is taken; 0: the plan is confirmed.
  std::uint32_t matches_awaited_ = 0;
  PlanBypass bypass_;
  // in iterations; backoff of bypasses when memory would suffice for arena and iteration
  ExponentialBackoff bypass_backoff_{1, 1024};
  // bytes taken from the device in this iteration for buffers without a slot in the arena
  std::size_t taken_outside_arena_ = 0;
  struct {
    void (*hook)() = nullptr;
    std::size_t most_reserved = 0;
    std::uint64_t most_misses = 0;
  } departures_;
  Pattern* ended_ = nullptr;          // pattern of the last iteration that ended
  PatternHistory history_of_patterns_;             // history of ended iterations
  Results results_;
  std::uint64_t hits_before_ = 0, all_misses_before_ = 0;  // when this iteration began
  const void* marked_by_ = nullptr;   // the thread of the last mark
  double marked_at_ = 0;              // in seconds
  double iteration_seconds_ = 0;      // of the iteration that a mark ends
  Pattern* coming_ = nullptr;  // installed; takes effect when a sequence begins an iteration of the pattern
  ClientStats stats_;
  std::vector<Divergence> divergences_;
  DecisionLog decisions_;
  std::vector<Pinned> pinned_;     // live at every boundary since they first blocked a slot
  unsigned dynamic_ = 0;              // nesting depth of dynamic scopes
  bool arena_allowed_ = false;          // under a budget: see set_arena_allowed()
  Offset next_offset_ = kDynamic;      // see allocate_next_at()
  bool between_ = false;              // between the end of a marked region and the beginning of the next
  bool marked_ = false, replaying_ = false;
  std::size_t earlier_live_peak_ = 0;  // before the last `take_live_peak`
  std::uint64_t iterations_ = 0, marks_ = 0, active_at_ = 0, latest_at_ = 0, miss_score_ = 0;
  std::uint64_t clean_ = 0;  // consecutive iterations without a miss since the latest plan took effect
  std::uint64_t longest_clean_ = 0;   // longest such run that ended with a miss
  decltype(ClientStats::outcomes) before_steady_{};  // outcomes when the first plan took effect
  decltype(ClientStats::outcomes) before_latest_{};  // outcomes when the latest plan took effect
  std::uint64_t misses_before_ = 0;   // misses when this iteration began
  std::uint64_t turn_ = 0;            // number of the last iteration that all followers began together
  std::uint64_t gave_back_at_ = ~std::uint64_t{0};  // sum of all clients' iterations
  Refusal refusal_ = Refusal::none;   // for the largest arena that a pattern needs
  std::uint64_t refusals_ = 0;        // times that refusal_ has changed
  std::uint64_t check_at_ = 64;       // ring event number
  WakeSignal wake_signal_;
  bool work_ = false;
  bool woken_ = false;                // wake() was called, perhaps before the wait
  bool interrupted_ = false;          // the ring was off for a while
  std::uint64_t misses_looked_at_ = ~std::uint64_t{0};
  std::uint64_t refusals_heard_ = 0;
  std::size_t retained_ = 0;
  std::chrono::steady_clock::time_point unused_checked_{};  // time of the last retire_unused_patterns() by the clock
};

// Per-thread state: the sequence used last, and whether the thread bypasses the pool. Destroyed with the
// thread.
class ThreadCache {
 public:
  static ThreadCache& mine() noexcept { return per_thread<ThreadCache>(); }
  ~ThreadCache();

  // Numbers of registered clients, by which an ending thread finds the clients that still exist.
  static std::uint64_t enlist(Client* client);
  static void strike(std::uint64_t uid) noexcept;
  static std::uint64_t fresh_number() noexcept;  // a number that no cache holds

  std::uint64_t client = 0;  // the client's Client::caches_; 0: none
  Stream stream = 0;
  Client::Sequence* sequence = nullptr;
  unsigned bypass = 0;
  bool first_attempt = false;  // Client::FirstAttempt
  OutOfMemory out_of_memory;
};

inline bool Client::Bypass::active() noexcept { return ThreadCache::mine().bypass != 0; }

}  // namespace mempool
