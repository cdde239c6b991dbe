// Functions that each add the bindings of one noun to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "core/stats.hpp"
#include "core/sync.hpp"

inline nanobind::dict gauge(const mempool::Gauge& g) {
  nanobind::dict d;
  d["current"] = g.current;
  d["peak"] = g.peak;
  d["total"] = g.total;
  return d;
}

// Run `act` with the interpreter's lock if the pool's lock is free, else without the interpreter's lock: the
// holder of the pool's lock may be waiting for the device, and the device for a Python function queued on a
// stream.
template <class Pool, class Act>
auto patiently(Pool& pool, Act act) {
  if (pool.lock.try_lock()) {
    pool.lock.unlock();
    return act();
  }
  const nanobind::gil_scoped_release release;
  return act();
}

// Run `act`, which takes long or may wait for the device, without the interpreter's lock.
template <class Act>
auto unlocked(Act act) {
  const nanobind::gil_scoped_release release;
  return act();
}

void bind_device(nanobind::module_& m);
void bind_pattern(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_recording(nanobind::module_& m);
void bind_snapshot(nanobind::module_& m);
void bind_checked(nanobind::module_& m);
void bind_hook(nanobind::module_& m);
void bind_numpy(nanobind::module_& m);
void bind_torch(nanobind::module_& m);
void bind_cupy(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_harness(nanobind::module_& m);
