// Wake-up signal for a planner: rung rarely, under the pool's lock, and never missed. The bell holds no
// kernel object, and therefore survives a fork.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "core/sync.hpp"

namespace mempool {

class WakeSignal {
 public:
  void ring() noexcept {
    rings_.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  std::uint32_t rings() const noexcept { return rings_.load(std::memory_order_acquire); }
  // Wait until the bell has rung more often than `rings` times or the time is over; may also return
  // spuriously.
  void wait(std::uint32_t rings, std::chrono::nanoseconds patience) noexcept {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience);
    const timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((patience - seconds).count())};
    syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, rings, &limit, nullptr, 0);
  }

 private:
  static_assert(sizeof(Atomic<std::uint32_t>) == sizeof(std::uint32_t));
  Atomic<std::uint32_t> rings_{0};
};

}  // namespace mempool
