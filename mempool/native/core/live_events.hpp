// Events of a device, counted like other objects: see live.hpp.
#pragma once

#include "devices/device.hpp"
#include "core/live.hpp"

namespace mempool {

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
