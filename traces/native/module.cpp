// Bindings of traces' native code.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "alignment.hpp"
#include "bindings.hpp"
#include "living.hpp"
#include "period.hpp"

namespace nb = nanobind;
using namespace nb::literals;
template <class Value>
using Column = nb::ndarray<const Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

using traces::Fault, traces::Living, traces::Refused;

// Reports the kind of fault only: the caller knows the address.
template <class Work>
auto refusing(const Work& work) {
  try {
    return work();
  } catch (const Fault& fault) {
    throw Refused(fault.kind);
  }
}

// Binds the table of living buffers.
void bind_living(nb::module_& m) {
  nb::class_<Living>(m, "Living", "Table of the living buffer at each address of a device; impossible events raise `Refused`.")
      .def(nb::init<>())
      .def(
          "alloc",
          [](Living& self, int64_t address, int64_t size, int64_t buffer) {
            refusing([&] { self.alloc(address, size, buffer); });
          },
          "address"_a, "size"_a, "buffer"_a, "Add a buffer by its number.")
      .def(
          "free",
          [](Living& self, int64_t address, int64_t size, int64_t unknown) {
            return refusing([&] { return self.free(address, size, unknown); });
          },
          "address"_a, "size"_a, "unknown"_a,
          "Remove and return the buffer at an address; return `unknown`, a buffer of `size` bytes from before the "
          "recording, if the address is new.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native part of traces.";
  m.def(
      "tail_period",
      [](const Column<std::int64_t>& values, std::int64_t repeats) {
        if (repeats < 1) throw nb::value_error("repeats is less than 1");
        traces::Tail tail;
        {
          nb::gil_scoped_release unlocked;
          std::vector<std::int64_t> border;
          tail = traces::tail_period(values.data(), values.shape(0), repeats, border);
        }
        return std::make_pair(tail.period, tail.length);
      },
      "values"_a, "repeats"_a,
      "Return period and length of the longest tail with at least `repeats` periods; (0, 0) if there is none.");
  m.def(
      "align_backwards",
      [](const Column<std::int64_t>& sizes, const Column<std::int64_t>& least, const Column<std::int64_t>& most) {
        if (least.shape(0) != most.shape(0)) throw nb::value_error("least and most differ in length");
        std::vector<std::int64_t> places;
        {
          const nb::gil_scoped_release unlocked;
          places = traces::align_backwards(sizes.data(), sizes.shape(0), least.data(), most.data(),
                                           static_cast<std::int64_t>(least.shape(0)));
        }
        return array_of(std::move(places));
      },
      "sizes"_a, "least"_a, "most"_a,
      "Return int64[n], the place of each of n allocations in repetitions of a sequence: 0 or more in the last repetition, negative in "
      "earlier ones, the largest int64 for an allocation without a counterpart. The alignment runs backwards and is greedy.");
  m.def(
      "iterations_start",
      [](const Column<std::uint32_t>& sequence, const Column<std::uint64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        const nb::gil_scoped_release unlocked;
        return traces::iterations_start(sequence.data(), size.data(), size.shape(0), traces::kIterations);
      },
      "sequence"_a, "size"_a,
      "Return the first allocation of the iterations at the end of the sequences; -1 if the main sequence does not repeat.");
  m.def(
      "sequence_with_most_bytes",
      [](const Column<std::int32_t>& sequence, const Column<std::int64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        if (sequence.shape(0) == 0) throw nb::value_error("no allocations");
        const nb::gil_scoped_release unlocked;
        return traces::sequence_with_most_bytes(sequence.data(), size.data(), sequence.shape(0));
      },
      "sequence"_a, "size"_a, "Return the sequence that allocates most bytes, the lowest of several.");
  m.attr("LEAST_EVIDENCE") = traces::kIterations.values;
  m.attr("LEAST_REPEATS") = traces::kIterations.repeats;
  m.def(
      "iterations_start_without_rare_sizes",
      [](const Column<std::uint32_t>& sequence, const Column<std::uint64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        const nb::gil_scoped_release unlocked;
        return traces::iterations_start_without_rare_sizes(sequence.data(), size.data(), size.shape(0));
      },
      "sequence"_a, "size"_a,
      "Return the same as `iterations_start` for the allocations without rare sizes, if most allocations remain.");
  m.attr("LEAST_RARE") = traces::kLeastRare;
  m.attr("MOST_RARE") = traces::kMostRare;
  m.attr("LEAST_KEPT") = static_cast<double>(traces::kLeastKept) / traces::kLeastKeptOf;
  m.attr("LEAST_EVIDENCE_BUT_RARE") = traces::kRareLeftOut.values;
  m.attr("LEAST_REPEATS_BUT_RARE") = traces::kRareLeftOut.repeats;
  m.def(
      "least_load_position",
      [](const Column<std::int64_t>& row, const Column<std::int64_t>& size, const Column<std::int64_t>& freed_before,
         std::size_t start, std::size_t period) {
        const std::size_t n = row.shape(0);
        if (size.shape(0) != n || freed_before.shape(0) != n) throw nb::value_error("columns differ in length");
        if (start > n || period < 1 || period > n + 1 - start) throw nb::value_error("no period behind the start");
        const nb::gil_scoped_release unlocked;
        return traces::least_load_position(row.data(), size.data(), freed_before.data(), n, start, period);
      },
      "row"_a, "size"_a, "freed_before"_a, "start"_a, "period"_a,
      "Return the position in the periods from `start` on at which the fewest temporary bytes are alive.");
  bind_snapshots(m);
  bind_living(m);
}
