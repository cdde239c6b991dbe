#include <nanobind/stl/tuple.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "core/replay.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

template <class T>
using Column = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool holds) {
  if (!holds) throw std::invalid_argument("columns of different lengths, or of events that cannot be");
}

void make(Replay* self, Client& client, ReplayDevice& device, const Column<std::uint8_t>& kind,
          const Column<std::int64_t>& birth, const Column<std::int64_t>& size, const Column<std::int64_t>& stream,
          const Column<std::int8_t>& mark) {
  const std::size_t n = kind.shape(0);
  check(birth.shape(0) == n && size.shape(0) == n && stream.shape(0) == n && mark.shape(0) == n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t born = birth.data()[i];
    if (kind.data()[i] == Replay::alloc) check(size.data()[i] >= 0);
    else if (kind.data()[i] < Replay::mark) check(born >= 0 && born < static_cast<std::int64_t>(i) && kind.data()[born] == Replay::alloc);
    else check(mark.data()[i] <= static_cast<std::int8_t>(Mark::end));
  }
  new (self) Replay(client, device, {kind.data(), birth.data(), size.data(), stream.data(), mark.data(), static_cast<std::int64_t>(n)});
}

auto held(const ReplayDevice& device) {
  const auto column = [&](std::int64_t ReplayDevice::Held::* field) {
    std::vector<std::int64_t> values;
    for (const ReplayDevice::Held& one : device.held()) values.push_back(one.*field);
    return as_array(std::move(values));
  };
  using Held = ReplayDevice::Held;
  return std::tuple(column(&Held::address), column(&Held::size), column(&Held::region), column(&Held::start), column(&Held::end));
}

}  // namespace

void bind_replay(nb::module_& m) {
  nb::class_<ReplayDevice, Device>(m, "ReplayDevice", "Addresses without memory, and what of them was held when.")
      .def(nb::init<std::size_t, bool>(), "capacity"_a, nb::kw_only(), "growing"_a = false,
           "With a GPU's plain memory, or with pages of 2 MiB.")
      .def_prop_ro("calls", &ReplayDevice::calls)
      .def("held", &held, "Columns address, size, region, start, end, of segments or pages: where reservations are numbered from 1, and indices of "
           "events; the end is -1 of what is still held.");

  nb::class_<Replay>(m, "Replay", "The events of a trace, put through a client.")
      .def("__init__", &make, "client"_a, "device"_a, nb::kw_only(), "kind"_a, "birth"_a, "size"_a, "stream"_a, "mark"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
           "`birth` is the row of the alloc of each event's buffer, `mark` a Mark or -1.")
      .def("go", &Replay::go, nb::call_guard<nb::gil_scoped_release>(), "most"_a,
           "Goes on until there may be something to plan, for at most so many events; whether any is left.")
      .def("course", [](const Replay& r) {
             return std::tuple(as_array(r.address), as_array(r.live), as_array(r.reserved), r.failed_at);
           }, "Address of each alloc, bytes live and reserved after each event, the first alloc not served or -1.");
}
