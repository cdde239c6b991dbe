#include "simulators/bind.hpp"
#include "simulators/rmm_arena.hpp"
#include "simulators/rmm_binning.hpp"
#include "simulators/rmm_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace simulators;

void bind_rmm(nb::module_& m) {
  nb::class_<RmmPool, Allocator>(m, "SimulatedRmmPool", "RMM's pool; no maximum is -1.")
      .def(nb::init<Device&, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "initial"_a,
           "maximum"_a);
  nb::class_<RmmBinning, Allocator>(m, "SimulatedRmmBinning", "RMM's bins of 2**least to 2**most bytes over its pool.")
      .def(nb::init<Device&, int, int, int64_t, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(),
           "least"_a, "most"_a, "blocks"_a, "initial"_a, "maximum"_a);
  nb::class_<RmmArena, Allocator>(m, "SimulatedRmmArena", "RMM's arena of so many bytes.")
      .def(nb::init<Device&, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "bytes"_a);
}
