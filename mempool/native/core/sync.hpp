// All locks, atomics and thread-local objects of the core, so that a test build can replace them: the simulated world's
// threads are fibers, which may switch at each of these operations.
#pragma once

#ifdef MEMPOOL_WORLD
#include "world/sync.hpp"
#else

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#include "core/guards.hpp"

namespace mempool {

template <class T>
using Atomic = std::atomic<T>;

// A lock for critical sections of tens of nanoseconds: one locked instruction to take, a plain store to
// release. Waiters back off exponentially, so that the holder's core keeps the cache line for a run of
// operations (measured with two threads that do nothing else: 21 ns an operation, against 131 with plain
// spinning and 44 with std::mutex), then yield, then sleep, for a preempted holder or a slow section. The
// lock holds no kernel object: a forked child may reset it.
class Lock {
 public:
  void lock() noexcept {
    if (!MEMPOOL_GUARDED("lock") || !held_.exchange(true, std::memory_order_acquire)) return;
    contend();
  }
  // False: another thread holds the lock.
  bool try_lock() noexcept { return !MEMPOOL_GUARDED("lock") || !held_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  // Bursts of one thread are cheaper than alternation, which moves the protected data to another cache at
  // each turn.
  static constexpr unsigned kMostPauses = 4096;

  [[gnu::noinline, gnu::cold]] void contend() noexcept {
    unsigned pauses = 16;
    for (unsigned round = 0;; ++round) {
      wait(round, pauses);
      if (pauses < kMostPauses) pauses *= 2;
      if (!held_.load(std::memory_order_relaxed) && !held_.exchange(true, std::memory_order_acquire)) return;
    }
  }
  static void wait(unsigned round, unsigned pauses) noexcept {
    for (unsigned i = 0; i < pauses; ++i) {
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    if (round >= 8 && round < 64) sched_yield();
    if (round >= 64) {
      const timespec pause{0, 20000};
      nanosleep(&pause, nullptr);
    }
  }

  Atomic<bool> held_{false};
};

// Return the calling thread's object, which is destroyed with the thread.
template <class T>
T& per_thread() noexcept {
  static thread_local T object;
  return object;
}

}  // namespace mempool

#endif

namespace mempool {

class Guarded {
 public:
  explicit Guarded(Lock& lock) noexcept : lock_(lock) { lock_.lock(); }
  ~Guarded() { lock_.unlock(); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

 private:
  Lock& lock_;
};

}  // namespace mempool
