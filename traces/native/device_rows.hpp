// The trace rows of one device's events, and of the memory from before these events.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunked.hpp"
#include "held.hpp"
#include "event_types.hpp"
#include "living.hpp"
#include "places.hpp"

namespace traces {

struct Row {
  enum Range : uint8_t { kNoRange, kBegins, kEnds };
  int64_t buffer, size, stream, time_us, address;  // `address` of a refused request: bytes free on the device, or -1
  Place place{};
  int32_t module = -1, pool = 0;
  uint8_t kind = 0;
  Range range = kNoRange;  // of a mark
};

class DeviceRows {
 public:
  explicit DeviceRows(Budget& budget) : rows(budget), before(budget), marks(budget) {}

  Chunked<Row> rows, before;  // `before`: allocs from before the recording
  Chunked<Row> marks;         // of the program's ranges and steps, sorted by time
  Held held;                  // segments, at the end
  int64_t buffers = 0;

  void alloc(Row row) {
    living_.alloc(row.address, row.size, buffers);
    row.buffer = buffers++;
    row.kind = kAlloc;
    rows.push(row);
  }
  // Frees a buffer. A buffer without an alloc is older than the recording, with the size and stream of its
  // free.
  void free(Row row) {
    row.buffer = living_.free(row.address, row.size, buffers);
    row.place = {};
    row.module = -1;
    row.kind = kAlloc;
    if (row.buffer == buffers) before.push(row), ++buffers;
    row.kind = kFree;
    row.pool = 0;
    row.size = 0;
    row.address = -1;
    rows.push(row);
  }
  // Adds a row of no buffer: a segment or a refused request.
  void other(Row row) {
    row.buffer = -1;
    rows.push(row);
  }
  // Registers a buffer that is alive at the end; older than the recording unless an event allocated the
  // buffer.
  void alive(Row row) {
    if (!living_.alive(row.address, row.size, buffers)) return;
    row.buffer = buffers++;
    row.kind = kAlloc;
    before.push(row);
  }
  // Sets the pools of all buffers and segments from the segments held at the end: events of earlier releases
  // lack pools.
  void place_in_pools() {
    for (auto* const table : {&before, &rows})
      for (size_t i = 0; i < table->size(); ++i) {
        Row& row = (*table)[i];
        if (row.kind == kAlloc || row.kind == kReserve || row.kind == kRelease) row.pool = held.pool_at(row.address);
      }
  }
  // Returns the segments held when the recording began, reconstructed backwards from the end. Segments that
  // were reserved and are not held at the end are ignored.
  Held segments_before() const {
    Held result = held;
    for (size_t i = rows.size(); i > 0; --i) {
      const Row& row = rows[i - 1];
      if (row.kind != kReserve && row.kind != kRelease) continue;
      result.cut(row.address, row.size);
      if (row.kind == kRelease) result.add(row.address, row.size, row.stream, row.pool);
    }
    return result;
  }
  // Returns the earliest time of an event.
  int64_t begin_us() const {
    int64_t begin = rows.size() == 0 ? 0 : rows[0].time_us;
    for (size_t i = 0; i < rows.size(); ++i) begin = std::min(begin, rows[i].time_us);
    return begin;
  }

 private:
  Living living_;
};

}  // namespace traces
