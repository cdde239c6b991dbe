// Binding of traces' native code.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "period.hpp"

namespace nb = nanobind;
using Values = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NB_MODULE(_core, m) {
  m.doc() = "Native part of traces.";
  m.def(
      "tail_period",
      [](const Values& values, std::int64_t repeats) {
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
}
