// The binding is split by noun; each of these adds its own to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "stats.hpp"

inline nanobind::dict gauge(const mempool::Gauge& g) {
  nanobind::dict d;
  d["current"] = g.current;
  d["peak"] = g.peak;
  d["total"] = g.total;
  return d;
}

void bind_device(nanobind::module_& m);
void bind_pattern(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_snapshot(nanobind::module_& m);
void bind_checked(nanobind::module_& m);
void bind_hook(nanobind::module_& m);
void bind_numpy(nanobind::module_& m);
void bind_torch(nanobind::module_& m);
void bind_harness(nanobind::module_& m);
