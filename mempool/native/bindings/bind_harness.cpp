// Bindings of single parts of the core, for tests that feed synthetic input.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "devices/device.hpp"
#include "core/occupancy.hpp"
#include "core/thread_stream.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

struct DeviceCalls {
  Device& device;
};

template <class Answer, class... Arguments>
auto call(Answer (Device::*method)(Arguments...) noexcept) {
  return [method](DeviceCalls& calls, Arguments... arguments) { return (calls.device.*method)(arguments...); };
}

void bind_device_calls(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<DeviceCalls>(m, "DeviceCalls", "What a pool asks of a device, one call at a time.")
      .def("__init__", [](DeviceCalls* self, Device& device) { new (self) DeviceCalls{device}; }, "device"_a,
           nb::keep_alive<1, 2>())
      .def("reserve", call(&Device::reserve), "bytes"_a, "alignment"_a = 512, released)
      .def("commit", call(&Device::commit), "address"_a, "bytes"_a, released)
      .def("decommit", call(&Device::decommit), "address"_a, "bytes"_a, released)
      .def("resize", call(&Device::resize), "address"_a, "from_bytes"_a, "to_bytes"_a, released)
      .def("release", call(&Device::release), "address"_a, "bytes"_a, released)
      .def("copy", call(&Device::copy), "to"_a, "source"_a, "bytes"_a, "stream"_a = 0, released)
      .def("zero", call(&Device::zero), "address"_a, "bytes"_a, "stream"_a = 0, released)
      .def("record", call(&Device::record), "stream"_a, released)
      .def("query", call(&Device::query), "event"_a, released)
      .def("wait", call(&Device::wait), "stream"_a, "event"_a, released)
      .def("forget", call(&Device::forget), "event"_a, released)
      .def("synchronize", call(&Device::synchronize), released)
      .def("capturing", call(&Device::capturing), "stream"_a, released)
      .def("capture", call(&Device::capture), "stream"_a, released);
}

}  // namespace

void bind_harness(nb::module_& m) {
  bind_device_calls(m);
  m.def("thread_stream", &ThreadStream::mine, "The calling thread's own number of the per-thread default stream.");
  nb::class_<Occupancy>(m, "Occupancy", "The guard alone.")
      .def(nb::init<>())
      .def("set_planned_slots", &Occupancy::set_planned_slots, "starts"_a)
      .def("is_free", [](const Occupancy& o, Offset begin, Offset end) { return o.is_free(begin, end, o.slots_before(end)); },
           "begin"_a, "end"_a)
      .def("take", [](Occupancy& o, Offset begin, Offset end) { o.take(begin, end, 0); }, "begin"_a, "end"_a)
      .def("release", &Occupancy::release, "begin"_a,
           "The end of what lived there; 0 if nothing did.")
      .def("find_hole", &Occupancy::find_hole, "bytes"_a, "alignment"_a, "limit"_a)
      .def("end_of_last", &Occupancy::end_of_last)
      .def("live_ranges", &Occupancy::live_ranges);
}
