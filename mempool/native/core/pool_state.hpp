// Snapshot of a pool's memory and buffers: plain columns, taken under the pool's lock and read without it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/pool.hpp"
#include "core/recorder.hpp"

namespace mempool {

class Client;

struct Snapshot {
  // A contiguous piece of device memory. On a device with pages, a reservation yields one segment per run of
  // committed pages, so that all sizes add up to the reserved bytes.
  struct Segment {
    enum Kind : std::uint32_t { arena, shared, large, small };

    std::uint64_t base;
    std::uint64_t size;   // bytes
    std::int64_t stream;  // of the first live block in the segment, else of the first block
    std::uint32_t kind;
    std::uint32_t paged;  // 1: pages of a reservation, which are committed and returned
    std::uint64_t graph_high, graph_low;  // the graph pool of the segment; zeros: none
  };
  // A part of a segment; the blocks of a segment follow each other without gaps, so that their sizes add up
  // to the segment's size.
  struct Block {
    // waiting: freed, but still used by another stream.
    enum State : std::uint32_t { free, live, waiting };

    std::uint64_t address;
    std::uint64_t size;       // bytes
    std::uint64_t requested;  // bytes asked for; 0 while the block is free
    std::uint32_t segment;    // index
    std::uint32_t state;
  };

  std::vector<Segment> segments;       // by kind, and within a kind by address
  std::vector<Block> blocks;           // in the order of the segments, by address
  std::vector<RecordedEvent> history;  // at the same moment, oldest first
};

// Take a snapshot. `client` null: without a history. May throw std::bad_alloc. Takes the lock.
Snapshot take_snapshot(Pool& pool, const Client* client);

// Return the ranges of the pool's segments. Call with the lock held.
DeviceLog::Runs runs_held(Pool& pool);

// Sums over a snapshot, computed without making one: for statistics that are requested in every step.
struct Usage {
  struct Part {
    std::uint64_t segments = 0;
    std::uint64_t bytes = 0;         // of the segments
    std::uint64_t idle_blocks = 0;   // free blocks in segments with a live block
    std::uint64_t idle_bytes = 0;    // of the idle blocks
  };
  Part small, large;                 // size-class pages; all other segments
  std::uint64_t reserved_total = 0;  // total bytes ever taken from the device
  std::uint64_t recent_peak = 0;     // largest reserved bytes since the last reset
  std::uint64_t times_took = 0, times_gave = 0;  // times memory was taken from and returned to the device
  std::uint64_t retries = 0, waits = 0;
};
Usage take_usage(Pool& pool);

}  // namespace mempool
