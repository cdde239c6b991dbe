#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "core/pattern.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

using Sizes = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void add_table(Pattern& pattern, std::uint32_t sequence, Stream stream, const Sizes& sizes, const Offsets& offsets,
               std::uint64_t phase, std::vector<std::uint32_t> marks, const std::optional<Sizes>& least) {
  const std::size_t count = sizes.shape(0);
  if (count == 0 || count > (1u << 30)) throw nb::value_error("a table has between 1 and 2**30 positions");
  if (offsets.shape(0) != count || offsets.shape(1) != pattern.unroll) {
    throw nb::value_error("offsets must have one row a position and one column an iteration of the unrolled plan");
  }
  Table table;
  table.sequence = sequence;
  table.stream = stream;
  table.phase = phase;
  table.marks = std::move(marks);
  for (const std::uint32_t mark : table.marks) {
    if (mark > count) throw nb::value_error("a mark lies behind the last position");
  }
  table.sizes.assign(sizes.data(), sizes.data() + count);
  if (least) {
    if (least->shape(0) != count) throw nb::value_error("there must be one least size a position");
    for (std::size_t i = 0; i < count; ++i) {
      if (least->data()[i] <= 0 || least->data()[i] > sizes.data()[i]) throw nb::value_error("a least size lies between 1 and the size");
    }
    table.least.assign(least->data(), least->data() + count);
  }
  table.slots.resize(count * pattern.unroll);
  for (std::size_t i = 0; i < table.slots.size(); ++i) {
    const std::int64_t offset = offsets.data()[i];
    const std::int64_t size = sizes.data()[i / pattern.unroll];
    if (size <= 0) throw nb::value_error("a size must be positive");
    if (offset < 0) continue;
    const auto end = static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(size);
    if (end > pattern.arena_bytes) throw nb::value_error("an offset lies outside the arena");
    table.slots[i].offset = static_cast<Offset>(offset);
  }
  pattern.tables.push_back(std::move(table));
}

}  // namespace

void bind_pattern(nb::module_& m) {
  nb::class_<Pattern>(m, "Pattern", "One recurring iteration: expected sizes in order, and their planned offsets.")
      .def(
          "__init__",
          [](Pattern* self, bool cyclic, bool marked, std::uint32_t unroll, std::size_t arena_bytes, std::uint32_t low_water) {
            if (unroll == 0 || unroll > 4096) throw nb::value_error("unroll must lie between 1 and 4096");
            new (self) Pattern;
            self->cyclic = cyclic;
            self->marked = marked;
            self->unroll = unroll;
            self->arena_bytes = arena_bytes;
            self->low_water = low_water;
          },
          nb::kw_only(), "cyclic"_a = true, "marked"_a = false, "unroll"_a = 1, "arena_bytes"_a, "low_water"_a = 0,
          "low_water: the position of the first table before which least is alive, so that the arena is best taken there.")
      .def("add_table", &add_table, nb::kw_only(), "sequence"_a, "stream"_a, "sizes"_a, "offsets"_a,
           "phase"_a = 0, "marks"_a = std::vector<std::uint32_t>{}, "least"_a = nb::none(),
           "Positions of one sequence: sizes int64[n] in bytes, offsets int64[n, unroll] in bytes (-1: dynamic). "
           "phase: the count of the sequence's allocations at which position 0 was due. The first table added "
           "decides where iterations end. least: of an envelope, int64[n], bytes that each position has at least.")
      .def_ro("arena_bytes", &Pattern::arena_bytes);
}
