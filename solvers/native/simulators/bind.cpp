// Binding of the simulated device and of the event loop.
#include "simulators/bind.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>

namespace nb = nanobind;
using namespace nb::literals;
using namespace simulators;

namespace {

nb::object segments_of(const Device& device) {
  const auto& rows = device.segments();
  const auto column = [&](int64_t Segment::* field) {
    std::vector<int64_t> values;
    for (const Segment& row : rows) values.push_back(row.*field);
    return array_of(std::move(values));
  };
  return nb::make_tuple(column(&Segment::address), column(&Segment::size), column(&Segment::stream),
                        column(&Segment::region), column(&Segment::start), column(&Segment::end));
}

auto run_columns(Allocator& allocator, const In<uint8_t>& kind, const In<int64_t>& birth, const In<int64_t>& size,
                 const In<int64_t>& stream, const In<int64_t>& adopted, const std::optional<In<int64_t>>& address) {
  const size_t n = kind.shape(0);
  need(adopted.shape(0) <= n, "more adopted events than there are");
  need(birth.shape(0) == n && size.shape(0) == n && stream.shape(0) == n && (!address || address->shape(0) == n),
       "columns of different lengths");
  for (size_t i = 0; i < n; ++i) {
    const int64_t born = birth.data()[i];
    need(kind.data()[i] != 0 || (born == static_cast<int64_t>(i) && size.data()[i] >= 0), "not an alloc");
    need(kind.data()[i] != 1 || (born >= 0 && born < static_cast<int64_t>(i) && kind.data()[born] == 0), "not a free");
  }
  Course course;
  {
    nb::gil_scoped_release release;
    course = run(allocator, {kind.data(), birth.data(), size.data(), stream.data(), address ? address->data() : nullptr,
                             static_cast<int64_t>(n)},
                 vector_of(adopted));
  }
  return std::tuple(array_of(std::move(course.address)), array_of(std::move(course.live)),
                    array_of(std::move(course.reserved)), course.failed_at);
}

}  // namespace

void bind_simulators(nb::module_& m) {
  nb::class_<Device>(m, "SimulatedDevice", "Addresses without memory, and a limit in bytes.")
      .def("__init__",
           [](Device* self, int64_t limit, int64_t floor) {
             need(limit >= 0 && floor >= 0, "negative bytes");
             new (self) Device(limit, floor);
           },
           "limit"_a, "floor"_a = 0, "Own addresses begin above the floor.")
      .def("answer",
           [](Device& self, int64_t size, int64_t address) {
             need(size > 0 && address >= 0, "not a range");
             self.answer(size, address);
           },
           "size"_a, "address"_a, "Where a reservation of that size lies, the first that has no earlier answer.")
      .def_prop_ro("limit", &Device::limit)
      .def_prop_ro("calls", &Device::calls)
      .def_prop_ro(
          "segments", segments_of, nb::rv_policy::automatic,
          nb::sig("def segments(self, /) -> tuple[numpy.typing.NDArray[numpy.int64], ...]"),
          "Columns address, size, stream, region, start, end; the end is -1 of what is still held.");
  m.attr("LARGEST_DEVICE") = Device::most_bytes;
  nb::class_<Allocator>(m, "SimulatedAllocator", "What takes from a device and serves requests, once.")
      .def("run", run_columns, "kind"_a, "birth"_a, "size"_a, "stream"_a, "adopted"_a, "address"_a = nb::none(),
           "Address of each alloc, bytes live and reserved after each event, and the first alloc that failed, or -1. "
           "`birth` is the row of the alloc of each event's buffer. What led to the first state comes first, as "
           "`adopted` events: handles of the buffers alive in it, -1 for the others. With the column `address`, "
           "what the recorded allocator gave back is given back.");
  bind_fits(m);
  bind_pytorch(m);
  bind_pools(m);
  bind_rmm(m);
}
