#include <memory>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "host_device.hpp"
#include "simulated_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

void bind_device(nb::module_& m) {
  nb::class_<Device>(m, "Device", "What memory and streams belong to.")
      .def_prop_ro("alignment", [](const Device& d) { return d.traits().alignment; }, "Bytes.")
      .def_prop_ro("page", [](const Device& d) { return d.traits().page; },
                   "Bytes committed and returned at a time; 0: a reservation is memory, all or nothing.")
      .def_prop_ro("large", [](const Device& d) { return d.traits().large; },
                   "Requests of at least this many bytes get a segment of their own.");

  nb::class_<HostDevice, Device>(m, "HostDevice", "Host memory by mmap.").def(nb::init<>());

  nb::class_<SimulatedCounts>(m, "SimulatedCounts", "What a simulated device has been asked for.")
      .def_ro("committed", &SimulatedCounts::committed)
      .def_ro("peak_committed", &SimulatedCounts::peak_committed)
      .def_ro("reserves", &SimulatedCounts::reserves)
      .def_ro("commits", &SimulatedCounts::commits)
      .def_ro("decommits", &SimulatedCounts::decommits)
      .def_ro("releases", &SimulatedCounts::releases)
      .def_ro("resizes", &SimulatedCounts::resizes)
      .def_ro("refusals", &SimulatedCounts::refusals)
      .def_ro("live_reservations", &SimulatedCounts::live_reservations)
      .def_ro("events_alive", &SimulatedCounts::events_alive)
      .def_ro("synchronizes", &SimulatedCounts::synchronizes)
      .def_ro("errors", &SimulatedCounts::errors);

  nb::class_<SimulatedDevice, Device>(m, "SimulatedDevice", "Addresses without memory, of a given capacity.")
      .def(
          "__init__",
          [](SimulatedDevice* self, std::size_t capacity, std::size_t page, std::size_t alignment,
             std::size_t shared_segment, std::size_t large) {
            if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
              throw nb::value_error("alignment must be a power of two");
            }
            new (self) SimulatedDevice({capacity, page, alignment, shared_segment, large});
          },
          nb::kw_only(), "capacity"_a = std::size_t{1} << 40, "page"_a = 0, "alignment"_a = 512,
          "shared_segment"_a = std::size_t{2} << 20, "large"_a = std::size_t{1} << 20)
      .def("counts", &SimulatedDevice::counts)
      .def("finish", &SimulatedDevice::finish, "stream"_a, "All work queued on the stream is done.")
      .def("capture", &SimulatedDevice::capture, "streams"_a,
           "A graph is captured on these streams, and what would spoil it counts as an error; none: no longer.")
      .def("set_capacity", &SimulatedDevice::set_capacity, "capacity"_a)
      .def("fail_after", &SimulatedDevice::fail_after, "calls"_a,
           "Refuse every request for memory after this many more.");
}
