// How many objects of each kind there are in the process, against leaks: the tests ask after each of theirs.
#pragma once

#include <atomic>
#include <cstdint>

namespace mempool {

// Counts the objects of a class that derives from it. Not one of sync.hpp's atomics: nobody waits for it or decides by it.
template <class Counted>
class Live {
 public:
  static std::int64_t count() noexcept { return count_.load(std::memory_order_relaxed); }

 protected:
  Live() noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  Live(const Live&) noexcept : Live() {}
  Live& operator=(const Live&) noexcept = default;
  ~Live() { count_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  inline static std::atomic<std::int64_t> count_{0};
};

// The same for what is no object: reservations of address space, arenas and segments alike.
struct Reservation {
  static void made() noexcept { count().fetch_add(1, std::memory_order_relaxed); }
  static void gone() noexcept { count().fetch_sub(1, std::memory_order_relaxed); }
  static std::atomic<std::int64_t>& count() noexcept {
    static std::atomic<std::int64_t> live{0};
    return live;
  }
};

}  // namespace mempool
