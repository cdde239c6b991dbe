// From a client's events to the rows of a trace.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "recorder.hpp"

namespace mempool {

// The columns of `traces.Trace` of the same names, a row an event. Marks' operations: 0, 1 and 2 for a step, the beginning and
// the end of a region.
struct TraceRows {
  static constexpr std::int32_t kFound = 3;  // for a step that nobody marked

  std::vector<std::uint8_t> kind;
  std::vector<std::int64_t> buffer, size, stream, time_ns, address;
  std::vector<std::int32_t> thread, operation;
};

// The core tells buffers by address; a trace by ids that are never used twice. Buffers keep theirs from one piece of a recording to
// the next. Frees and uses of what was allocated before the recording are left out. For the program, what grew or shrank in place
// lived before the old one's end: so say the rows. For one thread at a time.
class TraceNames {
 public:
  // `packed`: so many events, at any address.
  TraceRows rows(const void* packed, std::size_t count);
  // Of brief events, which all happen at time 0. `streams`: of each sequence; std::out_of_range where one has none.
  TraceRows rows(const void* packed, std::size_t count, const std::vector<Stream>& streams);

 private:
  template <class Get>
  TraceRows all(std::size_t count, Get get);
  std::int64_t id_of(const RecordedEvent& event);  // -1: of no buffer that is known

  std::int64_t next_ = 0;
  std::unordered_map<Address, std::int64_t> alive_;
};

}  // namespace mempool
