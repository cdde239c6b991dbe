// Event types of a trace: traces.trace.EventType.
#pragma once

#include <cstdint>

namespace traces {

constexpr uint8_t kAlloc = 0, kFree = 1, kRead = 2, kMark = 4, kReserve = 5, kRelease = 6, kRefused = 7;

}  // namespace traces
