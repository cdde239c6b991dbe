// Conversion of a client's events to the rows of a trace.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/recorder.hpp"

namespace mempool {

// Columns of `traces.Trace` with the same names, one row per event. Operations of marks: 0, 1 and 2 for a
// step, the beginning and the end of a region.
struct TraceRows {
  static constexpr std::int32_t kFound = 3;  // for a step detected by the pool

  std::vector<std::uint8_t> kind;
  std::vector<std::int64_t> buffer, size, stream;
  std::vector<std::int64_t> time_ns, address;  // empty for brief events
  std::vector<std::int32_t> thread, operation;
};

// Assigns buffer ids. The core identifies buffers by address, a trace by ids that are never reused. Buffers
// keep their ids from one piece of a recording to the next. Frees and uses of buffers allocated before the
// recording are left out. A buffer that grew or shrank in place appears in the rows before the end of the old
// one, as the program sees it. For one thread at a time.
class TraceNames {
 public:
  // `packed`: `count` events, at any alignment.
  TraceRows rows(const void* packed, std::size_t count);
  // Convert brief events, without times and addresses. `streams`: by sequence; throws std::out_of_range for a sequence
  // without a stream.
  TraceRows rows(const void* packed, std::size_t count, const std::vector<Stream>& streams);

 private:
  template <class Event, class Get>
  TraceRows all(std::size_t count, Get get);
  std::int64_t id_of(const RecordedEvent& event);  // -1: not a known buffer

  std::int64_t next_ = 0;
  std::unordered_map<Address, std::int64_t> alive_;
};

}  // namespace mempool
