// What the core's locks, atomics and thread-local objects are in the simulated world: see mempool/native/core/sync.hpp.
#pragma once

#include <array>
#include <atomic>

#include "core/guards.hpp"
#include "world/fibers.hpp"

namespace mempool {

// One thread of the machine runs, so these need no order; but between any two of them another fiber may run.
template <class T>
class Atomic {
 public:
  Atomic() noexcept = default;
  constexpr Atomic(T value) noexcept : value_(value) {}  // NOLINT: as std::atomic
  T load(std::memory_order = std::memory_order_seq_cst) const noexcept {
    world::point();
    return value_;
  }
  void store(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    world::point();
    value_ = value;
  }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    world::point();
    const T before = value_;
    value_ = value;
    return before;
  }
  T fetch_add(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    world::point();
    const T before = value_;
    value_ = static_cast<T>(value_ + value);
    return before;
  }
  T fetch_sub(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    return fetch_add(static_cast<T>(-value));
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order = std::memory_order_seq_cst,
                               std::memory_order = std::memory_order_seq_cst) noexcept {
    world::point();
    if (value_ != expected) {
      expected = value_;
      return false;
    }
    value_ = value;
    return true;
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order one = std::memory_order_seq_cst,
                             std::memory_order other = std::memory_order_seq_cst) noexcept {
    return compare_exchange_strong(expected, value, one, other);
  }

 private:
  T value_{};
};

class Lock {
 public:
  void lock() noexcept {
    world::point();
    while (MEMPOOL_GUARDED("lock") && held_) world::block();
    held_ = true;
  }
  bool try_lock() noexcept {
    world::point();
    if (MEMPOOL_GUARDED("lock") && held_) return false;
    return held_ = true;
  }
  void unlock() noexcept {
    held_ = false;
    world::point();
  }

 private:
  bool held_ = false;
};

template <class T>
T& per_thread() noexcept {
  static std::array<T, world::kMostThreads> objects;
  return objects[world::current];
}

}  // namespace mempool
