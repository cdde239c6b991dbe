#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>

#include "simulators/bind.hpp"
#include "simulators/pytorch_expandable.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace simulators;

namespace {

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

}  // namespace

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
           "A segment that was there before, and the blocks that were in use in it, by address; their handles. `slack` "
           "is how much further each may reach into what is free behind it.")
      .def("learned",
           [](const PyTorch& self) {
             std::vector<int64_t> handles, ends;
             for (const auto& [handle, end] : self.learned()) handles.push_back(handle), ends.push_back(end);
             return std::pair(array_of(std::move(handles)), array_of(std::move(ends)));
           },
           "Handles of adopted blocks, and where they must end for the addresses that were recorded; later ones count.");
  nb::class_<PyTorchExpandable, Allocator>(m, "SimulatedPyTorchExpandable", "The same with expandable segments.")
      .def(nb::init<Device&, const PyTorchRules&>(), nb::keep_alive<1, 2>(), "device"_a, "rules"_a);
}
