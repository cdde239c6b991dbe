// What CUDA memory is like, whether a driver gives it or a replay has its addresses only.
#pragma once

#include "device.hpp"

namespace mempool {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// The driver gives memory in pieces of 2 MiB, so a segment of its own wastes 1 MiB on average, and giving one back waits
// for the device. Both are little for 10 MiB and more; what is smaller shares segments of 20 MiB.
inline constexpr DeviceTraits kWholeTraits{512, 0, 20 * kMiB, 10 * kMiB, false, true, 2 * kMiB};

// Pages are of 2 MiB, as of every device so far; a device with larger ones is refused. Address space is cheap, and what is
// free in one segment fits together whatever it was used for. Unmapping waits for the device, so nothing goes back by itself.
inline constexpr std::size_t kGrowingShared = std::size_t{1} << 40;  // more than any device has
inline constexpr DeviceTraits kGrowingTraits{512, 2 * kMiB, kGrowingShared, kGrowingShared, false, true, 2 * kMiB};

}  // namespace mempool
