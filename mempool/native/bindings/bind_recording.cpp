// Binding of the conversion from recorded events to rows of a trace.
#include <nanobind/stl/vector.h>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "core/trace_rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

using Packed = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Columns = nb::typed<nb::dict, nb::str, nb::ndarray<nb::numpy>>;

template <class Event, class... Streams>
Columns rows(TraceNames& names, const Packed& packed, const Streams&... streams) {
  if (packed.size() % sizeof(Event) != 0) throw nb::value_error("a part of a record");
  TraceRows made = unlocked([&] { return names.rows(packed.data(), packed.size() / sizeof(Event), streams...); });
  Columns d;
  d["kind"] = as_array(std::move(made.kind));
  d["buffer"] = as_array(std::move(made.buffer));
  d["size"] = as_array(std::move(made.size));
  d["stream"] = as_array(std::move(made.stream));
  d["thread"] = as_array(std::move(made.thread));
  d["time_ns"] = as_array(std::move(made.time_ns));
  d["operation"] = as_array(std::move(made.operation));
  d["address"] = as_array(std::move(made.address));
  return d;
}

}  // namespace

void bind_recording(nb::module_& m) {
  nb::class_<TraceNames>(m, "TraceNames", "Gives buffers the ids that a trace knows them by, across the pieces of a recording.")
      .def(nb::init<>())
      .def("rows", &rows<RecordedEvent>, "packed"_a,
           nb::sig("def rows(self, packed: bytes | NDArray[numpy.uint8]) -> dict[str, NDArray[typing.Any]]"),
           "Columns of a trace, from events as `Client.take_trace` gives them.")
      .def("brief_rows", &rows<BriefEvent, std::vector<Stream>>, "packed"_a, "streams"_a,
           nb::sig("def brief_rows(self, packed: bytes | NDArray[numpy.uint8], streams: collections.abc.Sequence[int]) -> "
                   "dict[str, NDArray[typing.Any]]"),
           "The same from those of `Client.recording`, all at time 0.");

  m.attr("EVENT_FIELDS") = nb::make_tuple(
      nb::make_tuple("index", "<u8"), nb::make_tuple("address", "<u8"), nb::make_tuple("size", "<u8"),
      nb::make_tuple("time_ns", "<u8"), nb::make_tuple("stream", "<i8"), nb::make_tuple("sequence", "<u4"),
      nb::make_tuple("kind", "<u4"));
}
