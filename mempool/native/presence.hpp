// Readers that cost a plain store, for pointers that are replaced rarely and followed all the time.
//
// A thread says that it is here; who wants to destroy what the readers might hold unlinks it first and then waits until
// everybody who was here has left. The barrier between the reader's store and its loads is paid by the waiter, through
// membarrier(2); where the kernel has none, by the reader.
#pragma once

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "sync.hpp"

namespace mempool {

class Presence {
  struct alignas(64) Slot {
    Atomic<unsigned> depth{0};  // how many Here of this thread live: written by it alone
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

  // True: everybody who was here when this was called has left. False: not within about ten milliseconds.
  static bool everybody_left() noexcept {
    if (uncounted().load(std::memory_order_relaxed)) return false;
    if (waiter_pays() && syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) return false;
    for (Slot* slot = slots().load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
      // Adding nothing puts this look before or after the reader's arrival, and never beside it: who arrives after it
      // sees what was unlinked before it.
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

  // The other threads do not exist in a forked child, wherever they were.
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
  // Set when a thread could not have a slot: from then on nobody knows who is here.
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

  struct Leaver {  // a thread that still comes here after its thread-local objects are gone takes a slot for ever
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
