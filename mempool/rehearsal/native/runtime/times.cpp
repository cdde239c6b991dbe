// Modelled time: its start, and the operations of PyTorch, whose times the program's own process knows (operation_times.cpp).
#include "runtime/runtime.hpp"

using namespace standin;

// Let work take time from now on. Nanoseconds, and nanoseconds a byte: of copies to the host and of copies to the device; for
// memory of the host that is not page-locked; for memory of the device. `duplex`: each direction has an engine.
EXPORTED void mempool_standin_start_clock(double out_latency, double out_per_byte, double back_latency, double back_per_byte,
                                          int duplex, double pageable, double memory) {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  gpu->timeline = std::make_unique<fake::Timeline>(
      fake::Timeline::Link{out_latency, out_per_byte, back_latency, back_per_byte, duplex != 0, pageable, memory});
}

// Return the nanoseconds until which the host has waited; 0 where the clock has not been started.
EXPORTED std::int64_t mempool_standin_time() {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  return gpu->timeline == nullptr ? 0 : gpu->timeline->host;
}

// The calling thread begins an operation, within the one that it began last.
EXPORTED void mempool_standin_begin_operation() {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  fake::self().operations.push_back(nullptr);
}
EXPORTED int mempool_standin_has_launched() {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  const auto& operations = fake::self().operations;
  return !operations.empty() && operations.back() != nullptr;
}
EXPORTED void mempool_standin_end_operation(double nanoseconds) {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  auto& operations = fake::self().operations;
  if (operations.empty()) return;
  if (const auto cost = operations.back()) {
    cost->nanoseconds = std::max(fake::Timeline::kShortest, static_cast<std::int64_t>(nanoseconds + 0.5));
    cost->open = false;
  }
  operations.pop_back();
}
