#include "simulators/bind.hpp"
#include "simulators/fits.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace simulators;

void bind_fits(nb::module_& m) {
  nb::class_<Fit, Allocator>(m, "SimulatedFit", "First or best fit in one region that grows.")
      .def(nb::init<Device&, bool, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "best"_a,
           "alignment"_a, "growth"_a);
}
