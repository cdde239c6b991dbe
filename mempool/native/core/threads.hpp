// Coordination of threads: readers of pointers that are rarely replaced (Presence), the planner's wake-up signal,
// and numbers for per-thread default streams.
//
// Readers that cost a plain store, for pointers that are replaced rarely and followed often.
//
// A thread announces its presence; a thread that wants to destroy an object unlinks it first and then waits
// until all threads present at that time have left. The waiter pays for the barrier between the reader's
// store and its loads, through membarrier(2); if the kernel lacks it, the reader pays.
#pragma once

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <new>
#include <set>

#include "core/sync.hpp"
#include "devices/device.hpp"

namespace mempool {

class Presence {
  struct alignas(64) Slot {
    Atomic<unsigned> depth{0};  // number of Here objects of this thread; written by this thread only
    Atomic<bool> taken{true};   // by a living thread
    Slot* next = nullptr;       // never changes once listed; slots are never deleted
  };

 public:
  class Here {
   public:
    Here() noexcept : slot_(mine()) {
      if (slot_ == nullptr) return;
      if (waiter_pays()) {
        slot_->depth.store(slot_->depth.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
      } else {
        slot_->depth.fetch_add(1, std::memory_order_acq_rel);
      }
    }
    ~Here() {
      if (slot_ == nullptr) return;
      slot_->depth.store(slot_->depth.load(std::memory_order_relaxed) - 1, std::memory_order_release);
    }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    Slot* slot_;
  };

  // True: all threads present at the call have left. False: not within about ten milliseconds.
  static bool everybody_left() noexcept {
    if (uncounted().load(std::memory_order_relaxed)) return false;
    if (waiter_pays() && syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) return false;
    for (Slot* slot = slots().load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
      // The addition of 0 orders this check strictly before or after the reader's arrival: a reader that
      // arrives later sees the earlier unlinking.
      for (int tries = 0; slot->depth.fetch_add(0, std::memory_order_acq_rel) != 0; ++tries) {
        if (tries == 100) return false;
        const timespec pause{0, 100000};
        nanosleep(&pause, nullptr);
      }
    }
    return true;
  }

  // Call once before the first Here, from one thread.
  static void prepare() noexcept {
#ifndef __SANITIZE_THREAD__
    waiter_pays() = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
#endif
  }

  // Reset the slots of other threads, which do not exist in a forked child.
  static void after_fork_in_child() noexcept {
    for (Slot* slot = slots().load(std::memory_order_relaxed); slot != nullptr; slot = slot->next) {
      if (slot == mine_or_null()) continue;
      slot->depth.store(0, std::memory_order_relaxed);
      slot->taken.store(false, std::memory_order_relaxed);
    }
    prepare();
  }

 private:
  static bool& waiter_pays() noexcept {
    static bool pays = false;
    return pays;
  }
  static Atomic<Slot*>& slots() noexcept {
    static Atomic<Slot*> head{nullptr};
    return head;
  }
  // Set when a thread could not get a slot: from then on presence is unknown.
  static Atomic<bool>& uncounted() noexcept {
    static Atomic<bool> any{false};
    return any;
  }
  static Slot*& mine_or_null() noexcept {
    static thread_local Slot* slot = nullptr;
    return slot;
  }
  static Slot* mine() noexcept {
    Slot*& slot = mine_or_null();
    if (__builtin_expect(slot == nullptr, 0)) slot = enlist();
    return slot;
  }

  struct Leaver {  // a thread that returns after the thread-local objects are destroyed takes a slot for ever
    ~Leaver() {
      Slot*& slot = mine_or_null();
      if (slot != nullptr) slot->taken.store(false, std::memory_order_release);
      slot = nullptr;
    }
  };

  __attribute__((noinline)) static Slot* enlist() noexcept {
    static thread_local Leaver leaver;
    for (Slot* slot = slots().load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
      bool taken = false;
      if (slot->taken.compare_exchange_strong(taken, true, std::memory_order_acquire)) return slot;
    }
    Slot* const slot = new (std::nothrow) Slot;
    if (slot == nullptr) {
      uncounted().store(true, std::memory_order_relaxed);
      return nullptr;
    }
    slot->next = slots().load(std::memory_order_relaxed);
    while (!slots().compare_exchange_weak(slot->next, slot, std::memory_order_release, std::memory_order_relaxed)) {
    }
    return slot;
  }
};

// Wake-up signal for a planner: rung rarely, under the pool's lock, and never missed. The bell holds no
// kernel object, and therefore survives a fork.
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

// Numbers for per-thread default streams. The driver has one handle for them, which means another stream in
// each thread. Here each stream has a negative number, which no handle is. A number is not reused after the
// thread has ended, because work queued there may still run.
class ThreadStream {
 public:
  static constexpr Stream kHandle = 2;  // the driver's handle, which means the calling thread's stream

  static Stream mine() noexcept {
    Stream& stream = per_thread<Number>().stream;
    if (stream == 0) stream = numbers().give();
    return stream;
  }
  // Return true for another thread's stream: from here no work can be queued and no event recorded there.
  static bool elsewhere(Stream stream) noexcept { return stream < 0 && stream != per_thread<Number>().stream; }
  // Return true if the stream's thread has ended, so that no further work is queued there.
  static bool ended(Stream stream) noexcept { return stream < 0 && numbers().ended(stream); }

 private:
  struct Number {
    Stream stream = 0;  // none yet
    ~Number() {
      if (stream != 0) numbers().end(stream);
    }
  };
  class Numbers {
   public:
    Stream give() noexcept {
      const Guarded guard(lock_);
      try {
        given_.insert(next_);
      } catch (...) {  // the stream counts as ended, so that waits are longer than needed
      }
      return next_--;
    }
    void end(Stream stream) noexcept {
      const Guarded guard(lock_);
      given_.erase(stream);
    }
    bool ended(Stream stream) noexcept {
      const Guarded guard(lock_);
      return stream > next_ && given_.count(stream) == 0;
    }

   private:
    Lock lock_;
    Stream next_ = -1;
    std::set<Stream> given_;  // of threads that have not ended
  };
  static Numbers& numbers() noexcept {
    // never destroyed, because threads may end after the objects destroyed at process end
    static auto* const all = new Numbers;
    return *all;
  }
};

}  // namespace mempool
