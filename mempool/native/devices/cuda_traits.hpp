// Properties of CUDA memory, of a real driver and of a replay with addresses only.
#pragma once

#include "devices/device.hpp"

namespace mempool {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

// The driver allocates in pieces of 2 MiB, so that a separate segment wastes 1 MiB on average, and a release
// waits for the device. Both costs are small for 10 MiB and more; smaller requests share segments of 20 MiB.
inline constexpr DeviceTraits kWholeTraits{512, 0, 20 * kMiB, 10 * kMiB, false, true, 2 * kMiB};

// Pages are 2 MiB, as on every device so far; a device with larger ones is refused. Address space is cheap,
// and free memory in one segment coalesces regardless of former use. Unmapping waits for the device, so that
// no memory is released automatically.
inline constexpr std::size_t kGrowingShared = std::size_t{1} << 40;  // larger than the memory of any device
inline constexpr DeviceTraits kGrowingTraits{512, 2 * kMiB, kGrowingShared, kGrowingShared, false, true, 2 * kMiB};

}  // namespace mempool
