// Readers that cost a plain store, for pointers that are replaced rarely and followed often.
//
// A thread announces its presence; a thread that wants to destroy an object unlinks it first and then waits
// until all threads present at that time have left. The waiter pays for the barrier between the reader's
// store and its loads, through membarrier(2); if the kernel lacks it, the reader pays.
#pragma once

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "core/sync.hpp"

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

}  // namespace mempool
