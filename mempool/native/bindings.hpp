// The binding is split by noun; each of these adds its own to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "stats.hpp"
#include "sync.hpp"

inline nanobind::dict gauge(const mempool::Gauge& g) {
  nanobind::dict d;
  d["current"] = g.current;
  d["peak"] = g.peak;
  d["total"] = g.total;
  return d;
}

// With the interpreter's lock where the pool's is free: whoever holds that may be waiting for the device, and the device for a
// function of Python's that is queued on a stream.
template <class Pool, class Act>
auto patiently(Pool& pool, Act act) {
  if (pool.lock.try_lock()) {
    pool.lock.unlock();
    return act();
  }
  const nanobind::gil_scoped_release release;
  return act();
}

// What takes long, or may wait for the device, is done while Python's threads run on.
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
