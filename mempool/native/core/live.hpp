// Counts of the existing objects of each class in the process, with which tests detect leaks.
#pragma once

#include <atomic>
#include <cstdint>

#include "devices/device.hpp"

namespace mempool {

// Base class that counts the objects of a derived class. Uses no atomic of sync.hpp: no code waits for the
// count or depends on the value.
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

// Count of reservations of address space, of arenas and segments, which are no objects.
struct Reservation {
  static void made() noexcept { count().fetch_add(1, std::memory_order_relaxed); }
  static void gone() noexcept { count().fetch_sub(1, std::memory_order_relaxed); }
  static std::atomic<std::int64_t>& count() noexcept {
    static std::atomic<std::int64_t> live{0};
    return live;
  }
};

// Events of a device, counted like other objects: see live.hpp.
struct LiveEvents {
  static Event record(Device& device, Stream stream) noexcept {
    const Event event = device.record(stream);
    if (event != 0) count().fetch_add(1, std::memory_order_relaxed);
    return event;
  }
  static void forget(Device& device, Event event) noexcept {
    if (event == 0) return;
    count().fetch_sub(1, std::memory_order_relaxed);
    device.forget(event);
  }
  static std::atomic<std::int64_t>& count() noexcept {
    static std::atomic<std::int64_t> live{0};
    return live;
  }
};

}  // namespace mempool
