// Bindings of clients and of the patterns that they replay.
#include <unistd.h>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "core/client.hpp"
#include "core/follower.hpp"
#include "core/pattern.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

using Sizes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void add_table(Pattern& pattern, std::uint32_t sequence, Stream stream, const Sizes& sizes, const Offsets& offsets,
               std::uint64_t phase, std::vector<std::uint32_t> marks, const std::optional<Sizes>& least) {
  const std::size_t count = sizes.shape(0);
  if (count == 0 || count > (1u << 30)) throw nb::value_error("a table has between 1 and 2**30 positions");
  if (offsets.shape(0) != count || offsets.shape(1) != pattern.unroll) {
    throw nb::value_error("offsets must have one row a position and one column an iteration of the unrolled plan");
  }
  Table table;
  table.sequence = sequence;
  table.stream = stream;
  table.phase = phase;
  table.marks = std::move(marks);
  for (const std::uint32_t mark : table.marks) {
    if (mark > count) throw nb::value_error("a mark lies behind the last position");
  }
  table.sizes.assign(sizes.data(), sizes.data() + count);
  if (least) {
    if (least->shape(0) != count) throw nb::value_error("there must be one least size a position");
    for (std::size_t i = 0; i < count; ++i) {
      if (least->data()[i] <= 0 || least->data()[i] > sizes.data()[i]) throw nb::value_error("a least size lies between 1 and the size");
    }
    table.least.assign(least->data(), least->data() + count);
  }
  table.slots.resize(count * pattern.unroll);
  for (std::size_t i = 0; i < table.slots.size(); ++i) {
    const std::int64_t offset = offsets.data()[i];
    const std::int64_t size = sizes.data()[i / pattern.unroll];
    if (size <= 0) throw nb::value_error("a size must be positive");
    if (offset < 0) continue;
    const auto end = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(size);
    if (end > pattern.arena_bytes) throw nb::value_error("an offset lies outside the arena");
    table.slots[i].offset = static_cast<Offset>(offset);
  }
  pattern.tables.push_back(std::move(table));
}

}  // namespace

void bind_pattern(nb::module_& m) {
  nb::class_<Pattern>(m, "Pattern", "One recurring iteration: expected sizes in order, and their planned offsets.")
      .def(
          "__init__",
          [](Pattern* self, bool cyclic, bool marked, std::uint32_t unroll, std::size_t arena_bytes, std::uint32_t low_water) {
            if (unroll == 0 || unroll > 4096) throw nb::value_error("unroll must lie between 1 and 4096");
            new (self) Pattern;
            self->cyclic = cyclic;
            self->marked = marked;
            self->unroll = unroll;
            self->arena_bytes = arena_bytes;
            self->low_water = low_water;
          },
          nb::kw_only(), "cyclic"_a = true, "marked"_a = false, "unroll"_a = 1, "arena_bytes"_a, "low_water"_a = 0,
          "low_water: low-water mark, the position in the first table before which the fewest bytes are live; "
          "the arena is best taken there.")
      .def("add_table", &add_table, nb::kw_only(), "sequence"_a, "stream"_a, "sizes"_a, "offsets"_a,
           "phase"_a = 0, "marks"_a = std::vector<std::uint32_t>{}, "least"_a = nb::none(),
           "Add the positions of one sequence: sizes int64[n] in bytes, offsets int64[n, unroll] in bytes (-1: "
           "dynamic). phase: the sequence's allocation count when position 0 was due. The end of the first table "
           "is the end of the iteration. least: for an envelope, int64[n], lower bounds of the sizes in bytes.")
      .def("leads_through",
           [](const Pattern& p, std::uint32_t sequence, const Sizes& sizes) {
             const std::vector<std::uint64_t> asked(sizes.data(), sizes.data() + sizes.shape(0));
             return leads_through(p, sequence, asked.data(), asked.size());
           }, "sequence"_a, "sizes"_a,
           "Return true if a marked iteration of the sequence, with sizes int64[n] in bytes, follows the pattern "
           "without a miss.")
      .def_ro("arena_bytes", &Pattern::arena_bytes);
}

namespace {

using Items = nb::typed<nb::dict, nb::str, nb::any>;

template <class Counts>
nb::dict outcomes(const Counts& counts) {
  nb::dict d;
  for (std::size_t i = 0; i < counts.size(); ++i) d[kOutcomeNames[i]] = counts[i];
  return d;
}

Items client_stats(Client& client) {
  const ClientStats s = patiently(client.pool(), [&] { return client.stats(); });
  Items d;
  d["requested"] = gauge(s.requested);
  d["live"] = gauge(s.live);
  d["blocks"] = gauge(s.blocks);
  d["small"] = gauge(s.small);
  d["small_requested"] = gauge(s.small_requested);
  d["small_live"] = gauge(s.small_live);
  d["outcomes"] = outcomes(s.outcomes);
  d["steady"] = outcomes(s.steady);
  d["latest"] = outcomes(s.latest);
  d["deferred_bytes"] = s.deferred_bytes;
  d["deferred_blocks"] = s.deferred_blocks;
  d["deferred_small_blocks"] = s.deferred_small_blocks;
  d["deferred_small_bytes"] = s.deferred_small_bytes;
  d["foreign_frees"] = s.foreign_frees;
  d["double_frees"] = s.double_frees;
  d["out_of_memory"] = s.out_of_memory;
  return d;
}

Items client_state(Client& client) {
  const Client::State s = patiently(client.pool(), [&] { return client.state(); });
  Items d;
  d["recording"] = s.recording == RecordingState::recording;
  d["recording_state"] = kRecordingStateNames[static_cast<std::size_t>(s.recording)];
  d["recording_due"] = s.recording_due;
  d["recording_began"] = s.recording_began;
  d["miss_rate"] = s.miss_rate;
  d["tracing"] = s.tracing;
  d["marked"] = s.marked;
  d["replaying"] = s.replaying;
  d["iterations"] = s.iterations;
  d["marks"] = s.marks;
  d["plan_active_at_iteration"] = s.plan_active_at_iteration;
  d["latest_plan_active_at_iteration"] = s.latest_plan_active_at_iteration;
  d["settled"] = s.settled;
  d["miss_score"] = s.miss_score;
  d["allocations"] = s.allocations;
  d["sequences"] = s.sequences;
  d["events_seen"] = s.seen;
  d["events_dropped"] = s.dropped;
  d["events_kept"] = s.kept;
  d["trace_lost"] = s.lost;
  d["trace_in_file"] = s.in_file;
  d["other_layouts"] = s.other_layouts;
  d["needed_bytes"] = s.needed;
  d["refusal"] = kRefusalNames[static_cast<std::size_t>(s.refusal)];
  return d;
}

nb::typed<nb::list, Items> divergences(Client& client) {
  nb::typed<nb::list, Items> list;
  for (const Divergence& one : patiently(client.pool(), [&] { return client.divergences(); })) {
    nb::dict d;
    d["iteration"] = one.iteration;
    d["sequence"] = one.sequence;
    d["position"] = one.position;
    d["expected_bytes"] = one.expected;
    d["actual_bytes"] = one.actual;
    d["stream"] = one.stream;
    d["outcome"] = kOutcomeNames[static_cast<std::size_t>(one.outcome)];
    d["repeats"] = one.repeats;
    list.append(d);
  }
  return list;
}

nb::typed<nb::list, Items> decisions(Client& client) {
  nb::typed<nb::list, Items> list;
  for (const DecisionLog::Entry& one : patiently(client.pool(), [&] { return client.decisions(); })) {
    nb::dict d;
    d["iteration"] = one.iteration;
    d["decision"] = kDecisionNames[static_cast<std::size_t>(one.decision)];
    d["pattern"] = one.pattern;
    d["count"] = one.count;
    d["times"] = one.times;
    d["bytes"] = one.bytes;
    d["reason"] = one.decision == Decision::refused  ? kRefusalNames[one.count]
                  : one.decision == Decision::arena  ? kArenaEventNames[one.count]
                  : one.decision == Decision::paused ? kRecordingEventNames[one.count]
                                                     : "";
    list.append(d);
  }
  return list;
}

using Results = std::vector<std::tuple<std::uint64_t, std::uint64_t, double>>;

Results all_results(const IterationResults& results) {
  Results all;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const IterationResult& one = results.latest(i);
    all.emplace_back(one.hits, one.misses, one.seconds);
  }
  return all;
}

std::pair<Results, Results> iteration_results(Client& client) {
  const Client::Results results = patiently(client.pool(), [&] { return client.results(); });
  return {all_results(results.unplanned), all_results(results.planned)};
}

void note_decision(Client& client, const std::string& name, std::uint64_t count, std::uint64_t times, std::uint64_t bytes) {
  const auto found = std::find(kDecisionNames.begin(), kDecisionNames.end(), name);
  if (found == kDecisionNames.end()) throw std::invalid_argument("no decision of this name");
  patiently(client.pool(), [&] {
    const Guarded guard(client.pool().lock);
    client.decide(static_cast<Decision>(found - kDecisionNames.begin()), 0, count, times, bytes);
  });
}

RecordingEvent recording_event(const std::string& name) {
  const auto found = std::find(kRecordingEventNames.begin(), kRecordingEventNames.end(), name);
  if (found == kRecordingEventNames.end()) throw std::invalid_argument("no event of this name");
  return static_cast<RecordingEvent>(found - kRecordingEventNames.begin());
}

std::vector<std::tuple<const char*, const char*, const char*>> arena_transitions() {
  std::vector<std::tuple<const char*, const char*, const char*>> all;
  for (const auto& [before, event, after] : kArenaTransitions) {
    all.emplace_back(kArenaStateNames[static_cast<std::size_t>(before)], kArenaEventNames[static_cast<std::size_t>(event)],
                     kArenaStateNames[static_cast<std::size_t>(after)]);
  }
  return all;
}

// Return (state, event, next state) for each state and event.
std::vector<std::tuple<const char*, const char*, const char*>> recording_transitions() {
  std::vector<std::tuple<const char*, const char*, const char*>> all;
  for (std::size_t state = 0; state < kRecordingTransitions.size(); ++state) {
    for (std::size_t event = 0; event < kRecordingEventNames.size(); ++event) {
      const auto next = static_cast<std::size_t>(kRecordingTransitions[state][event]);
      all.emplace_back(kRecordingStateNames[state], kRecordingEventNames[event], kRecordingStateNames[next]);
    }
  }
  return all;
}

// Return true while the interpreter is finalizing, and after the interpreter has ended.
bool is_over() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// Wait without the interpreter's lock. After the interpreter's end, the lock is not taken again: Python would unwind
// this thread, which noexcept functions on its stack forbid.
std::pair<bool, double> wait_for_work(Client& client, double seconds, double search_seconds, std::uint64_t allocations,
                                      std::uint64_t replan_at_iteration, std::uint64_t other_layouts) {
  PyThreadState* const state = PyEval_SaveThread();
  const Client::WaitResult result = client.wait_for_work({seconds, search_seconds, allocations, replan_at_iteration, other_layouts});
  while (is_over()) pause();
  PyEval_RestoreThread(state);
  return {result.news, result.search_seconds};
}

nb::bytes take_trace(Client& client) {
  std::vector<RecordedEvent> events;
  {
    const nb::gil_scoped_release released;  // part of the trace may be in a file
    events = client.take_trace();
  }
  return nb::bytes(events.data(), events.size() * sizeof(RecordedEvent));
}

std::unique_ptr<Pattern> owned(Pattern* pattern) {
  return pattern == nullptr ? nullptr : std::make_unique<Pattern>(*pattern);
}

}  // namespace

void bind_client(nb::module_& m) {
  nb::enum_<Mark>(m, "Mark", "Marks of the beginning and the end of an iteration.")
      .value("STEP", Mark::step)
      .value("BEGIN", Mark::begin)
      .value("END", Mark::end);
  m.attr("MOST_PATTERNS") = kMostPatterns;
  m.attr("ARENA_TRANSITIONS") = arena_transitions();
  nb::class_<RecordingSchedule>(m, "RecordingSchedule", "State machine of a client's recording.")
      .def(nb::init<>())
      .def_prop_ro("state", [](const RecordingSchedule& s) { return kRecordingStateNames[static_cast<std::size_t>(s.state())]; })
      .def("apply",
           [](RecordingSchedule& s, const std::string& event, std::uint64_t allocations, std::uint64_t misses, bool replaying) {
             return s.apply(recording_event(event), {allocations, misses}, replaying);
           }, "event"_a, "allocations"_a, "misses"_a, nb::kw_only(), "replaying"_a = false,
           "Tell of an event, with the client's counters; return true if the state changed.")
      .def("is_due",
           [](const RecordingSchedule& s, std::uint64_t allocations, std::uint64_t misses, bool replaying, std::uint64_t miss_score) {
             return s.is_due({allocations, misses}, replaying, miss_score);
           }, "allocations"_a, "misses"_a, nb::kw_only(), "replaying"_a = false, "miss_score"_a = 0,
           "Return true if the pause is over.")
      .def_static("transitions", &recording_transitions, "Return (state, event, next state) for each state and event.");
  m.attr("CHANGED_SCORE") = kRecording.changed_score;
  m.attr("MIN_PAUSE") = kRecording.min_pause;
  m.attr("MAX_PAUSE") = kRecording.max_pause;
  m.attr("JUDGED_ITERATIONS") = IterationResults::kJudged;
  m.attr("KEPT_ITERATIONS") = IterationResults::kKept;
  m.attr("LEARNING_ITERATIONS") = IterationResults::kLearning;
  m.attr("LEAST_HIT_RATE") = IterationResults::kLeastHitRate;

  const auto released = nb::call_guard<nb::gil_scoped_release>();  // see bind_pool.cpp
  nb::class_<Client>(m, "Client", "One adapter's view of a pool: sequences, recording, patterns, statistics.")
      .def(nb::init<std::shared_ptr<Pool>, std::string>(), "pool"_a, "name"_a)
      .def_prop_ro("handle", [](Client& c) { return reinterpret_cast<std::uintptr_t>(&c); },
                   "Address of the client for the plain C entry points mempool_alloc and mempool_free.")
      .def("allocate", &Client::allocate, released, "bytes"_a, "stream"_a = 0, "zeroed"_a = false,
            "Return an address; 0: out of memory.")
      .def_prop_ro("pool", [](Client& c) -> Pool& { return c.pool(); }, nb::rv_policy::reference_internal)
      .def("use", &Client::use, released, "address"_a, "stream"_a,
           "Record a use of a live buffer by another stream; once freed, the memory waits until that stream has "
           "completed. False: no live buffer of this pool, or the stream owns the buffer.")
      .def("free", [](Client& c, Address address, Stream stream) { return c.free(address, stream); }, released, "address"_a,
           "stream"_a = 0, "Free a buffer. False: no live buffer of this pool.")
      .def("reallocate",
           [](Client& c, Address address, std::size_t bytes, Stream stream) -> nb::typed<nb::tuple, Address, bool> {
             bool foreign = false;
             const Address moved = unlocked([&] { return c.reallocate(address, bytes, stream, &foreign); });
             return nb::make_tuple(moved, foreign);
           }, "address"_a, "bytes"_a, "stream"_a = 0, "Return (new address or 0, true if the old address is not "
                                                      "the pool's).")
      .def("mark", &Client::mark, released, "mark"_a, nb::kw_only(), "detected"_a = false,
            "detected: the pool found the step, not the program.")
      .def("record_detected_step", &Client::record_detected_step, released,
            "Record a detected step in the trace only; no iteration begins or ends.")
      .def("enter_dynamic", &Client::enter_dynamic, released)
      .def("leave_dynamic", &Client::leave_dynamic, released)
      .def("set_recording", [](Client& c, bool on) { patiently(c.pool(), [&] { c.set_recording(on); }); }, "on"_a)
      .def("advance_recording",
           [](Client& c, const std::string& event) {
             const RecordingEvent which = recording_event(event);
             patiently(c.pool(), [&] { c.advance_recording(which); });
           }, "event"_a, "Tell the recording's state machine of an event, by its name in `RecordingSchedule.transitions`.")
      .def("resume_recording", [](Client& c) { return patiently(c.pool(), [&] { return c.resume_recording(); }); },
           "Record again if the pause is over; return true if so.")
      .def("set_tracing", &Client::set_tracing, "on"_a, nb::kw_only(), "folder"_a = "", "piece"_a = TraceBuffer::kPiece,
           "Record all events for a trace. Events beyond `piece` events in memory go to a file in `folder`, if given.")
      .def("recording",
           [](Client& c, std::size_t allocations)
               -> nb::typed<nb::tuple, Array<std::uint8_t>, std::vector<Stream>, std::vector<std::uint64_t>, bool> {
             Client::Recording r = unlocked([&] { return c.recording(allocations); });
             return nb::make_tuple(viewed_as<std::uint8_t>(std::move(r.events)), r.streams, r.counts, r.whole);
           }, "allocations"_a = ~std::size_t{0},
           "Return the planner's ring, or its last `allocations` allocations and the events between: (packed "
           "records for `TraceNames`; streams by sequence; total allocations by sequence; true if no event was "
           "lost or left out).")
      .def("find_recurrence",
           [](Client& c) -> std::optional<std::pair<std::size_t, std::size_t>> {
             const auto found = unlocked([&] { return c.find_recurrence(); });
             if (!found) return std::nullopt;
             return std::make_pair(found->begin, found->allocations);
           },
           "Search the planner's ring for a recurring iteration: (earliest relevant allocation, 0 with marks; "
           "number of allocations). None: nothing recurs; the next signal comes after a quarter more events.")
      .def("take_trace", &take_trace, "Return the oldest packed records of the trace not yet taken; empty: none "
                                      "are left.")
      .def("install",
           [](Client& c, Pattern& p, std::uint64_t seen, bool instead) {
             return unlocked([&] { return c.install(owned(&p), seen, instead); });
           }, "pattern"_a, "iterations_seen"_a = 0, "instead"_a = false,
           "Install a pattern that was recorded here and return its id; it takes effect at the next boundary. "
           "`instead`: only as a replacement of a known pattern with the same sizes; 0: none is known.")
      .def("load",
           [](Client& c, Pattern* warmup, Pattern& steady, bool unsure) {
             return unlocked([&] { return c.load(owned(warmup), owned(&steady), unsure); });
           },
           "warmup"_a.none(), "steady"_a, nb::kw_only(), "unsure"_a = false,
           "Replay a pattern from a file, from the next allocation on; return the id of ``steady``. ``unsure``: the arena is allocated once the "
           "program has followed the pattern for some allocations.")
      .def("drop_patterns", &Client::drop_patterns, released)
      .def("results", &iteration_results,
           "Return the (hits, misses, seconds or 0) of the last 8 iterations without a plan in effect, and of as many since "
           "the latest plan took effect; the latest first.")
      .def("device_is_bound", &Client::device_is_bound, released,
            "Begin the loaded patterns of all clients of the pool.")
      .def("give_back", &Client::give_back, released, "force"_a = false,
           "Give free memory back, and the arena if no range is live and no iteration ran since the last call, "
           "or by force. True: no arena is left.")
      .def("request_arena", &Client::request_arena, released,
           "Allocate the arena that patterns need now rather than at the next boundary. False: the arena is smaller.")
      .def("watch_departures",
           [](Client& c, std::uintptr_t hook, std::size_t most_reserved, std::uint64_t most_misses) {
             c.watch_departures(reinterpret_cast<void (*)()>(hook), most_reserved, most_misses);
           }, "hook"_a, "most_reserved"_a = 0, "most_misses"_a = 0, released,
           "Call the C function at the address `hook` after each request with which the pool holds more than `most_reserved` "
           "bytes, or the client has had more than `most_misses` misses; 0 ends this.")
      .def("set_arena_allowed", &Client::set_arena_allowed, "takes"_a, released,
           "Allow arena allocation at boundaries under a budget too, and not only by `request_arena`.")
      .def("planned_offset_of",
           [](Client& c, Address address) -> std::optional<Offset> {
             const Offset place = patiently(c.pool(), [&] { return c.planned_offset_of(address); });
             return place == kDynamic ? std::nullopt : std::make_optional(place);
           }, "address"_a,
           "Return the offset of a live buffer in the followed plan, also while no arena exists; None: no offset.")
      .def("allocate_next_at", &Client::allocate_next_at, released, "place"_a,
           "Give the next request inside a dynamic scope this offset in the arena, if that range is free.")
      .def("wait_for_work", &wait_for_work, "seconds"_a, "search_seconds"_a = 0.0, "allocations"_a = ~std::uint64_t{0},
           "replan_at_iteration"_a = 0, "other_layouts"_a = ~std::uint64_t{0},
           "Wait for planning work; return (there may be work, processor seconds of searches in vain). Searches "
           "in vain end no wait until they took `search_seconds`. The wait also ends after `seconds`, at "
           "`allocations`, when recording is due again, at a refused arena, with a pinned range that keeps blocking a "
           "plan from iteration `replan_at_iteration` on, and, if `other_layouts` is given, when that number of the "
           "state changes.")
      .def("grow_recording", &Client::grow_recording, released,
           "Double the capacity of the ring. False: the ring is not full, or would exceed a sixteenth of the "
           "memory held.")
      .def("retire_unused_patterns", &Client::retire_unused_patterns, released,
           "Mark patterns that were unused for long as dormant, so that no arena is kept for them. Call once a "
           "second; waiting for work does so too.")
      .def("wake", [](Client& c) { patiently(c.pool(), [&] { c.wake(); }); })
      .def("ignore_time", [](Client& c) { patiently(c.pool(), [&] { c.ignore_time(); }); },
           "Do not judge plans by the time of this thread's present iteration, in which the planner has worked.")
      .def("check_again_after",
           [](Client& c, std::uint64_t events) { patiently(c.pool(), [&] { c.check_again_after(events); }); }, "events"_a)
      .def("patterns",
           [](Client& c) {
             return patiently(c.pool(), [&] {
               const Guarded guard(c.pool().lock);
               std::vector<std::pair<std::uint64_t, std::uint64_t>> known;
               for (const Pattern* pattern : c.patterns()) known.emplace_back(pattern->id, pattern->iterations);
               return known;
             });
           }, "Return the (id, iterations begun) of each known pattern, warm-ups included, the latest first.")
      .def("state", &client_state)
      .def("stats", &client_stats)
      .def("misses", [](Client& c) { const Guarded guard(c.pool().lock); return c.misses(); }, released,
           "Return the number of requests so far that missed the plan.")
      .def("unplanned_bytes", &Client::unplanned_bytes, released, "bytes"_a,
           "Return the part of this thread's next requests, of `bytes` together, for which the plan has no places, as far as known.")
      .def("reset_peaks", &Client::reset_peaks, released)
      .def("take_live_peak", &Client::take_live_peak, released, "Return the largest number of live bytes since the last call.")
      .def("set_retained_limit", &Client::set_retained_limit, released, "bytes"_a,
           "Set the bytes of free memory that the pool should keep for this client; the largest wish of all "
           "clients counts.")
      .def("pinned_ranges", [](Client& c) { return patiently(c.pool(), [&] { return c.pinned_ranges(); }); },
           "Return the (begin, end) arena offsets of pinned ranges while one of them blocks a plan in iteration "
           "after iteration; else none.")
      .def("other_plans_ranges", [](Client& c) { return unlocked([&] { return c.other_plans_ranges(); }); },
           "Return the (begin, end) arena offsets of other clients' plans, dormant ones excepted; disjoint and "
           "in order.")
      .def("divergences", &divergences)
      .def("decisions", &decisions, "Return the latest decisions about plans and arena, the oldest first.")
      .def("note_decision", &note_decision, "decision"_a, nb::kw_only(), "count"_a = 0, "times"_a = 0, "bytes"_a = 0,
           "Add a decision of the planner.")
      .def_static("last_out_of_memory", []() -> nb::typed<nb::dict, nb::str, std::size_t> {
        const OutOfMemory o = Client::last_out_of_memory();
        nb::typed<nb::dict, nb::str, std::size_t> d;
        d["asked_bytes"] = o.asked;
        d["requested_bytes"] = o.requested;
        d["live_bytes"] = o.live;
        d["reserved_bytes"] = o.reserved;
        d["arena_bytes"] = o.arena;
        d["limit_bytes"] = o.limit;
        return d;
      });

  nb::class_<Client::Bypass>(m, "Bypass", "While entered, this thread's allocations bypass the adapters: the pool must not record itself.")
      .def(nb::init<>())
      .def("__enter__", [](Client::Bypass& b) -> Client::Bypass& { b.enter(); return b; }, nb::rv_policy::reference)
      .def("__exit__", [](Client::Bypass& b, nb::args) { b.leave(); },
           nb::sig("def __exit__(self, *args: object) -> None"));
}
