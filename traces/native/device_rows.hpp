// The rows of a trace that one device's events make, and what was there before them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunked.hpp"
#include "held.hpp"
#include "kinds.hpp"
#include "living.hpp"
#include "places.hpp"

namespace traces {

struct Row {
  int64_t buffer, size, stream, time_us, address;
  Place place;
  uint8_t kind;
};

class DeviceRows {
 public:
  explicit DeviceRows(Budget& budget) : rows(budget), before(budget) {}

  Chunked<Row> rows, before;  // `before`: allocs of what was there already
  Held held;                  // segments, at the end
  int64_t buffers = 0;

  void alloc(Row row) {
    living_.alloc(row.address, row.size, buffers);
    row.buffer = buffers++;
    row.kind = kAlloc;
    rows.push(row);
  }
  // What was never seen was there before, with what the free says of it.
  void free(Row row) {
    row.buffer = living_.free(row.address, row.size, buffers);
    row.place = {};
    row.kind = kAlloc;
    if (row.buffer == buffers) before.push(row), ++buffers;
    row.kind = kFree;
    row.size = 0;
    row.address = -1;
    rows.push(row);
  }
  void segment(Row row, uint8_t kind) {
    row.kind = kind;
    row.buffer = -1;
    row.place = {};
    rows.push(row);
  }
  // Alive at the end; was there before unless an event allocated it.
  void alive(int64_t address, int64_t size, int64_t stream) {
    if (living_.alive(address, size, buffers)) before.push({buffers++, size, stream, 0, address, {}, kAlloc});
  }
  // The segments that were there when the recording began, told from the end backwards. What was reserved and is not
  // held at the end is passed over.
  Held segments_before() const {
    Held result = held;
    for (size_t i = rows.size(); i > 0; --i) {
      const Row& row = rows[i - 1];
      if (row.kind < kReserve) continue;
      result.cut(row.address, row.size);
      if (row.kind == kRelease) result.add(row.address, row.size, row.stream);
    }
    return result;
  }
  // The earliest time of an event.
  int64_t begin_us() const {
    int64_t begin = rows.size() == 0 ? 0 : rows[0].time_us;
    for (size_t i = 0; i < rows.size(); ++i) begin = std::min(begin, rows[i].time_us);
    return begin;
  }

 private:
  Living living_;
};

}  // namespace traces
