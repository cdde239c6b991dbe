// Bindings of traces' native code.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "period.hpp"
#include "quietest.hpp"

namespace nb = nanobind;
template <class Value>
using Column = nb::ndarray<const Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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
      nb::arg("values"), nb::arg("repeats"),
      "Period and length of the longest tail that repeats at least so often; (0, 0) where there is none.");
  m.def(
      "iterations_begin",
      [](const Column<std::uint32_t>& sequence, const Column<std::uint64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        const nb::gil_scoped_release unlocked;
        return traces::iterations_begin(sequence.data(), size.data(), size.shape(0), traces::kIterations);
      },
      nb::arg("sequence"), nb::arg("size"),
      "The first allocation of the iterations that the sequences end with; -1 where the main one does not repeat.");
  m.def(
      "heaviest",
      [](const Column<std::int32_t>& sequence, const Column<std::int64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        if (sequence.shape(0) == 0) throw nb::value_error("no allocations");
        const nb::gil_scoped_release unlocked;
        return traces::heaviest(sequence.data(), size.data(), sequence.shape(0));
      },
      nb::arg("sequence"), nb::arg("size"), "The sequence that allocates most bytes, of several the lowest.");
  m.attr("LEAST_EVIDENCE") = traces::kIterations.values;
  m.attr("LEAST_REPEATS") = traces::kIterations.repeats;
  m.def(
      "iterations_begin_but_rare",
      [](const Column<std::uint32_t>& sequence, const Column<std::uint64_t>& size) {
        if (sequence.shape(0) != size.shape(0)) throw nb::value_error("sequence and size differ in length");
        const nb::gil_scoped_release unlocked;
        return traces::iterations_begin_but_rare(sequence.data(), size.data(), size.shape(0));
      },
      nb::arg("sequence"), nb::arg("size"),
      "The same for what does not vary: without the sizes that come rarely, if most stays.");
  m.attr("LEAST_RARE") = traces::kLeastRare;
  m.attr("MOST_RARE") = traces::kMostRare;
  m.attr("LEAST_KEPT") = static_cast<double>(traces::kLeastKept) / traces::kLeastKeptOf;
  m.attr("LEAST_EVIDENCE_BUT_RARE") = traces::kRareLeftOut.values;
  m.attr("LEAST_REPEATS_BUT_RARE") = traces::kRareLeftOut.repeats;
  m.def(
      "quietest",
      [](const Column<std::int64_t>& row, const Column<std::int64_t>& size, const Column<std::int64_t>& freed_before,
         std::size_t start, std::size_t period) {
        const std::size_t n = row.shape(0);
        if (size.shape(0) != n || freed_before.shape(0) != n) throw nb::value_error("columns differ in length");
        if (start > n || period < 1 || period > n + 1 - start) throw nb::value_error("no period behind the start");
        const nb::gil_scoped_release unlocked;
        return traces::quietest(row.data(), size.data(), freed_before.data(), n, start, period);
      },
      nb::arg("row"), nb::arg("size"), nb::arg("freed_before"), nb::arg("start"), nb::arg("period"),
      "The place in the periods from `start` on at which least of what comes and goes is alive.");
  bind_snapshots(m);
  bind_living(m);
}
