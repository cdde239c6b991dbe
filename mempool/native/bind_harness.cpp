// Parts of the core on their own, for tests that feed them synthetic input.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "occupancy.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

void bind_harness(nb::module_& m) {
  nb::class_<Occupancy>(m, "Occupancy", "The guard alone.")
      .def(nb::init<>())
      .def("set_cells", &Occupancy::set_cells, "starts"_a)
      .def("is_free", [](const Occupancy& o, Offset begin, Offset end) { return o.is_free(begin, end, o.cells_before(end)); },
           "begin"_a, "end"_a)
      .def("take", &Occupancy::take, "begin"_a, "end"_a)
      .def("release", &Occupancy::release, "begin"_a,
           "The end of what lived there; 0 if nothing did.")
      .def("find_hole", &Occupancy::find_hole, "bytes"_a, "alignment"_a, "limit"_a)
      .def("end_of_last", &Occupancy::end_of_last)
      .def("live_ranges", &Occupancy::live_ranges);
}
