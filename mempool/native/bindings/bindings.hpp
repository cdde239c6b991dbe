// Functions that each add the bindings of one noun to the module.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

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

// NumPy arrays of values made by native code.
template <class T>
using Array = nanobind::ndarray<nanobind::numpy, const T, nanobind::ndim<1>>;

// Return an array that owns the values' memory, read as Ts, without a copy.
template <class T, class Value>
Array<T> viewed_as(std::vector<Value> values) {
  auto kept = std::make_unique<std::vector<Value>>(std::move(values));
  const std::size_t count = kept->size() * sizeof(Value) / sizeof(T);
  const void* data = kept->data();
  const nanobind::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<Value>*>(p); });
  kept.release();
  return Array<T>(data, {count}, owner);
}

template <class T>
Array<T> as_array(std::vector<T> values) {
  return viewed_as<T>(std::move(values));
}

void bind_device(nanobind::module_& m);
void bind_pattern(nanobind::module_& m);
void bind_offload(nanobind::module_& m);
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
