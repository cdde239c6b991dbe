// Bindings of the simulated allocators, one function per group; each adds its allocators to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "arrays.hpp"
#include "simulators/allocator.hpp"

void bind_fits(nanobind::module_& m);
void bind_pytorch(nanobind::module_& m);
void bind_pools(nanobind::module_& m);
void bind_rmm(nanobind::module_& m);
