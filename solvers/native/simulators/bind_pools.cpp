#include "simulators/bfc.hpp"
#include "simulators/bind.hpp"
#include "simulators/buddy.hpp"
#include "simulators/cnmem.hpp"
#include "simulators/cupy.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace simulators;

void bind_pools(nb::module_& m) {
  nb::class_<Cupy, Allocator>(m, "SimulatedCupy", "CuPy's pool.")
      .def(nb::init<Device&>(), nb::keep_alive<1, 2>(), "device"_a);
  nb::class_<Cnmem, Allocator>(m, "SimulatedCnmem", "CNMeM, which takes so many bytes first, and perhaps more.")
      .def(nb::init<Device&, int64_t, bool>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "first"_a, "grows"_a);
  nb::class_<Bfc, Allocator>(m, "SimulatedBfc", "TensorFlow's best fit with coalescing.")
      .def(nb::init<Device&, int64_t, int64_t, bool>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "region"_a,
           "slack"_a, "collects"_a);
  nb::class_<Buddy, Allocator>(m, "SimulatedBuddy", "The binary buddy system.")
      .def(nb::init<Device&, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "least"_a,
           "region"_a);
}
