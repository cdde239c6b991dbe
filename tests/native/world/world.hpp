// A seeded world around the real core: host threads with programs that allocate like training loops and diverge from them,
// streams whose work is done late, plans good and bad, a device that refuses, graphs that are captured, forks.
//
// A run is a list of steps, each with a thread, a kind and a seed of its own from which all its choices follow. So a list
// with steps left out is a run too, and does the same in the steps that are left: that is how a failure is shrunk.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/client.hpp"
#include "program.hpp"
#include "world/async_device.hpp"
#include "world/fibers.hpp"
#include "world/host_memory.hpp"

namespace world {

struct Step {
  enum Kind : std::uint8_t {
    next, stray, release, resize, share, drop_shared, work, mark, other_program, abandon, scope, thread_ends,   // a program's
    install, load, drop_plans, record, look, tape, rest,                                                        // a planner's
    trim, give_back, limit, retain, statistics,                                                                 // a user's
    refuse, no_wait,                                                                                            // a device's
    no_host_memory,
    capture, replay, end_graph, fork, check, kinds
  };
  std::uint8_t kind;
  std::uint8_t thread;
  std::uint64_t seed;
};

// What kind of world a seed makes, and its steps.
struct Setting {
  std::uint64_t seed = 0;
  unsigned threads = 1;
  bool interleaved = false;  // threads are stopped inside calls
  unsigned one_in = 8;       // points at which they are
  bool marks = true;         // or every iteration must be detected
  bool lies = false;         // plans may be hostile
  bool forks = false;
  unsigned distinguished_streams = 0;   // streams of the arena
  bool apart = false;        // streams do not share the arena
  bool late_orders = false;  // what another stream does with a buffer is waited for after its free, before the next allocation
  MemoryOptions memory;
  std::vector<Step> steps;

  static Setting of(std::uint64_t seed, std::size_t steps, bool interleaved);
};

struct Counts {
  std::uint64_t events = 0;  // allocations, frees, uses, marks, and work queued and done
  std::uint64_t steps = 0, allocations = 0, refused = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(mempool::Outcome::count)> outcomes{};
};

// Runs it; ends the process where something that must hold does not.
Counts run(const Setting& setting);

}  // namespace world
