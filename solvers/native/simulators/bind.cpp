// Binding of the simulated device, the event loop and the simulated allocators.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <optional>

#include "arrays.hpp"
#include "simulators/allocator.hpp"
#include "simulators/cupy.hpp"
#include "simulators/pytorch_expandable.hpp"
#include "simulators/rmm_pool.hpp"
#include "simulators/plain_fit.hpp"

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

PyTorchRules rules_of(int64_t max_split, int64_t max_non_split_rounding, int64_t large_segment, double gc_threshold,
                      const std::array<int64_t, 16>& divisions) {
  PyTorchRules rules;
  rules.max_split = max_split;
  rules.max_non_split_rounding = max_non_split_rounding;
  rules.large_segment = large_segment;
  rules.gc_threshold = gc_threshold;
  rules.divisions = divisions;
  return rules;
}

Out<int64_t> adopt(PyTorch& self, int64_t address, int64_t size, int64_t stream, const In<int64_t>& used,
                   const In<int64_t>& bytes, const In<int64_t>& slack) {
  need(used.shape(0) == bytes.shape(0) && used.shape(0) == slack.shape(0), "columns of different lengths");
  std::vector<Block> blocks;
  int64_t top = address;
  for (size_t k = 0; k < used.shape(0); ++k) {
    const int64_t at = used.data()[k], has = bytes.data()[k];
    need(has > 0 && at >= top && has <= address + size - at, "blocks that overlap, or leave their segment");
    const int64_t next = k + 1 < used.shape(0) ? used.data()[k + 1] : address + size;
    need(slack.data()[k] >= 0 && slack.data()[k] <= std::max<int64_t>(next - at - has - 1, 0), "too much slack");
    blocks.push_back({at, has, stream});
    blocks.back().slack = slack.data()[k];
    top = at + has;
  }
  return array_of(self.adopt({address, size, stream, 0, 0, -1}, blocks));
}

void bind_fits(nb::module_& m) {
  nb::class_<Fit, Allocator>(m, "SimulatedFit", "First or best fit in one region that grows.")
      .def(nb::init<Device&, bool, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "best"_a,
           "alignment"_a, "growth"_a);
}

void bind_pytorch(nb::module_& m) {
  nb::class_<PyTorchRules>(m, "PyTorchRules", "Settings of PyTorch's caching allocator, in bytes.")
      .def("__init__",
           [](PyTorchRules* self, int64_t max_split, int64_t max_non_split_rounding, int64_t large_segment,
              double gc_threshold, const std::array<int64_t, 16>& divisions) {
             new (self) PyTorchRules(rules_of(max_split, max_non_split_rounding, large_segment, gc_threshold, divisions));
           },
           nb::kw_only(), "max_split"_a, "max_non_split_rounding"_a, "large_segment"_a, "gc_threshold"_a, "divisions"_a)
      .def("rounded", &PyTorchRules::rounded, "size"_a, "Bytes of a block for a request.")
      .def("segment_for", &PyTorchRules::segment_for, "size"_a, "Bytes of a segment for a rounded request.");
  nb::class_<PyTorch, Allocator>(m, "SimulatedPyTorch", "PyTorch's caching allocator.")
      .def(nb::init<Device&, const PyTorchRules&>(), nb::keep_alive<1, 2>(), "device"_a, "rules"_a)
      .def("adopt", adopt, "address"_a, "size"_a, "stream"_a, "used"_a, "bytes"_a,
           "slack"_a,
           "Add a segment of the first state and its used blocks by address; return the blocks' handles. `slack` is "
           "the number of bytes by which a block may reach into the free range behind.")
      .def("learned",
           [](const PyTorch& self) {
             std::vector<int64_t> handles, ends;
             for (const auto& [handle, end] : self.learned()) handles.push_back(handle), ends.push_back(end);
             return std::pair(array_of(std::move(handles)), array_of(std::move(ends)));
           },
           "Return handles of adopted blocks and the ends that the recorded addresses require; later entries win.");
  nb::class_<PyTorchExpandable, Allocator>(m, "SimulatedPyTorchExpandable", "PyTorch's caching allocator with expandable segments.")
      .def(nb::init<Device&, const PyTorchRules&>(), nb::keep_alive<1, 2>(), "device"_a, "rules"_a);
}

void bind_pools(nb::module_& m) {
  nb::class_<Cupy, Allocator>(m, "SimulatedCupy", "CuPy's pool.")
      .def(nb::init<Device&>(), nb::keep_alive<1, 2>(), "device"_a);
}

void bind_rmm(nb::module_& m) {
  nb::class_<RmmPool, Allocator>(m, "SimulatedRmmPool", "RMM's pool; the maximum -1 means none.")
      .def(nb::init<Device&, int64_t, int64_t>(), nb::keep_alive<1, 2>(), "device"_a, nb::kw_only(), "initial"_a,
           "maximum"_a);
}

}  // namespace

void bind_simulators(nb::module_& m) {
  nb::class_<Device>(m, "SimulatedDevice", "Device with addresses and a limit in bytes, without memory.")
      .def("__init__",
           [](Device* self, int64_t limit, int64_t floor) {
             need(limit >= 0 && floor >= 0, "negative bytes");
             new (self) Device(limit, floor);
           },
           "limit"_a, "floor"_a = 0, "Create a device whose own addresses begin above the floor.")
      .def("answer",
           [](Device& self, int64_t size, int64_t address) {
             need(size > 0 && address >= 0, "not a range");
             self.answer(size, address);
           },
           "size"_a, "address"_a, "Give the next unanswered reservation of this size this address.")
      .def_prop_ro("limit", &Device::limit)
      .def_prop_ro("calls", &Device::calls)
      .def_prop_ro(
          "segments", segments_of, nb::rv_policy::automatic,
          nb::sig("def segments(self, /) -> tuple[numpy.typing.NDArray[numpy.int64], ...]"),
          "Columns address, size, stream, region, start, end; the end of a segment still held is -1.");
  m.attr("LARGEST_DEVICE") = Device::most_bytes;
  nb::class_<Allocator>(m, "SimulatedAllocator", "Allocator that serves the requests of one trace from the memory of a device.")
      .def("run", run_columns, "kind"_a, "birth"_a, "size"_a, "stream"_a, "adopted"_a, "address"_a = nb::none(),
           "Return the address of each alloc, bytes live and reserved after each event, and the first failed alloc or "
           "-1. `birth` is the row of the alloc of each event's buffer. The first len(adopted) events describe the "
           "first state: `adopted` has the handles of its live buffers, -1 for the others. With the column "
           "`address`, recorded releases of memory are repeated.");
  bind_fits(m);
  bind_pytorch(m);
  bind_pools(m);
  bind_rmm(m);
}
