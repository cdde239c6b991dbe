// The binding is split by noun; each of these adds its own to the module.
#pragma once

#include <nanobind/nanobind.h>

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
