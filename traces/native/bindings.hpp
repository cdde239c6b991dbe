// The parts of the native module of traces.
#pragma once

#include <nanobind/nanobind.h>

void bind_snapshots(nanobind::module_& m);
