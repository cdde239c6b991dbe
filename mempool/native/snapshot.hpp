// What a pool holds and what lies where in it, at one moment: plain columns, taken under the pool's lock, that nobody has
// to read under it.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.hpp"
#include "recorder.hpp"

namespace mempool {

class Client;

struct Snapshot {
  // Memory of the device in one piece. Where the device has pages, a reservation is as many of these as it has runs of
  // committed pages; so the sizes of all add up to what is reserved.
  struct Segment {
    enum Kind : std::uint32_t { arena, shared, large, small };

    std::uint64_t base;
    std::uint64_t size;   // bytes
    std::int64_t stream;  // of the first that lives in it, else of its first block
    std::uint32_t kind;
    std::uint32_t paged;  // 1: pages of a reservation, which come and go
    std::uint64_t graph_high, graph_low;  // the graph pool that it belongs to; zeros: none
  };
  // A part of a segment; those of a segment follow each other without gaps, so that their sizes add up to its own.
  struct Block {
    // waiting: given back, and another stream still uses it.
    enum State : std::uint32_t { free, live, waiting };

    std::uint64_t address;
    std::uint64_t size;       // bytes
    std::uint64_t requested;  // bytes asked for; 0 while it is free
    std::uint32_t segment;    // index
    std::uint32_t state;
  };

  std::vector<Segment> segments;       // by kind, and within a kind by address
  std::vector<Block> blocks;           // in the order of the segments, by address
  std::vector<RecordedEvent> history;  // of the same moment, oldest first
};

// `client` null: without a history. May throw std::bad_alloc. Takes the lock.
Snapshot take_snapshot(Pool& pool, const Client* client);

// Where its segments are. The lock is held.
DeviceLog::Runs runs_held(Pool& pool);

// The sums of a snapshot, made without it: for statistics that are asked for in every step.
struct Usage {
  struct Part {
    std::uint64_t segments = 0;
    std::uint64_t bytes = 0;         // of these
    std::uint64_t idle_blocks = 0;   // free ones in segments in which something lives
    std::uint64_t idle_bytes = 0;    // of these
  };
  Part small, large;                 // size-class pages; everything else
  std::uint64_t reserved_total = 0;  // bytes ever taken from the device
  std::uint64_t recent_peak = 0;     // bytes reserved at most since the last reset
  std::uint64_t times_took = 0, times_gave = 0;  // from and to the device
  std::uint64_t retries = 0, waits = 0;
};
Usage take_usage(Pool& pool);

}  // namespace mempool
