// Bindings of recorded events: trace rows, replay of a trace, and snapshots of a pool.
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "core/client.hpp"
#include "core/replay.hpp"
#include "core/pool_state.hpp"
#include "core/trace_rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

// Binding of the conversion from recorded events to rows of a trace.
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
  d["operation"] = as_array(std::move(made.operation));
  if constexpr (std::is_same_v<Event, RecordedEvent>) {
    d["time_ns"] = as_array(std::move(made.time_ns));
    d["address"] = as_array(std::move(made.address));
  }
  return d;
}

}  // namespace

void bind_recording(nb::module_& m) {
  nb::class_<TraceNames>(m, "TraceNames", "Ids of buffers in a trace, across the pieces of a recording.")
      .def(nb::init<>())
      .def("rows", &rows<RecordedEvent>, "packed"_a,
           nb::sig("def rows(self, packed: bytes | NDArray[numpy.uint8]) -> dict[str, NDArray[typing.Any]]"),
           "Return the columns of a trace from events of `Client.take_trace`.")
      .def("brief_rows", &rows<BriefEvent, std::vector<Stream>>, "packed"_a, "streams"_a,
           nb::sig("def brief_rows(self, packed: bytes | NDArray[numpy.uint8], streams: collections.abc.Sequence[int]) -> "
                   "dict[str, NDArray[typing.Any]]"),
           "Return the columns of a trace from events of `Client.recording`, without times and addresses.");

  m.attr("EVENT_FIELDS") = nb::make_tuple(
      nb::make_tuple("index", "<u8"), nb::make_tuple("address", "<u8"), nb::make_tuple("size", "<u8"),
      nb::make_tuple("time_ns", "<u8"), nb::make_tuple("stream", "<i8"), nb::make_tuple("sequence", "<u4"),
      nb::make_tuple("kind", "<u4"));
}

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
  nb::class_<ReplayDevice, Device>(m, "ReplayDevice", "Addresses without memory, with a log of the memory held "
                                                      "over time.")
      .def(nb::init<std::size_t, bool>(), "capacity"_a, nb::kw_only(), "growing"_a = false,
           "Make a device with a GPU's plain memory, or (`growing`) with pages of 2 MiB.")
      .def_prop_ro("calls", &ReplayDevice::calls)
      .def("held", &held, "Return columns address, size, region, start, end of segments or pages: region is the "
                          "number of the reservation, from 1; start and end are event numbers; end -1: still "
                          "held.");

  nb::class_<Replay>(m, "Replay", "Replay of a trace's events through a client.")
      .def("__init__", &make, "client"_a, "device"_a, nb::kw_only(), "kind"_a, "birth"_a, "size"_a, "stream"_a, "mark"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
           "`birth` is the row of the alloc of each event's buffer, `mark` a Mark or -1.")
      .def("go", &Replay::go, nb::call_guard<nb::gil_scoped_release>(), "most"_a,
           "Replay until there may be planning work, for at most this many events; return true if events are left.")
      .def("course", [](const Replay& r) {
             return std::tuple(as_array(r.address), as_array(r.live), as_array(r.reserved), r.failed_at);
           }, "Return the address of each alloc, bytes live and reserved after each event, and the first refused "
              "alloc or -1.");
}

// The contents of a pool and the history of a client, as packed records for NumPy.
namespace {

template <class Record>
nb::bytes packed(const std::vector<Record>& records) {
  return nb::bytes(records.data(), records.size() * sizeof(Record));
}

// Make Python objects without the lock: making one may collect garbage, which frees arrays, which takes the
// lock.
nb::typed<nb::tuple, nb::bytes, nb::bytes, nb::bytes> snapshot(Pool& pool, const Client* client) {
  const Snapshot taken = take_snapshot(pool, client);
  return nb::make_tuple(packed(taken.segments), packed(taken.blocks), packed(taken.history));
}

nb::dict part(const Usage::Part& p) {
  nb::dict d;
  d["segments"] = p.segments;
  d["bytes"] = p.bytes;
  d["idle_blocks"] = p.idle_blocks;
  d["idle_bytes"] = p.idle_bytes;
  return d;
}

nb::typed<nb::dict, nb::str, nb::any> usage(Pool& pool) {
  const Usage u = take_usage(pool);
  nb::typed<nb::dict, nb::str, nb::any> d;
  d["small"] = part(u.small);
  d["large"] = part(u.large);
  d["reserved_total_bytes"] = u.reserved_total;
  d["recent_peak_bytes"] = u.recent_peak;
  d["times_took"] = u.times_took;
  d["times_gave"] = u.times_gave;
  d["retries"] = u.retries;
  d["waits"] = u.waits;
  return d;
}

}  // namespace

void bind_snapshot(nb::module_& m) {
  m.def("snapshot", &snapshot, "pool"_a, "client"_a.none() = nb::none(),
        "Return the state of the pool and the history of a client at one moment: packed records of "
        "SEGMENT_FIELDS, BLOCK_FIELDS and EVENT_FIELDS.");
  m.def("live_objects", [] {
    nb::dict live;
    live["pools"] = Pool::count();
    live["clients"] = Client::count();
    live["plans"] = Pattern::count();
    live["segments"] = Segment::count();
    live["blocks"] = Block::count();
    live["arenas"] = LiveArena::count();
    live["events"] = LiveEvents::count().load();
    live["reservations"] = Reservation::count().load();
    return live;
  }, "Return the number of existing objects of each class in the process; an uninstalled pattern counts as a plan.");
  m.def("usage", &usage, "pool"_a,
        "Return segments and bytes held, in size-class pages (small) and otherwise (large); idle bytes in "
        "segments with live buffers; the peak of reserved bytes since Client.reset_peaks(); counts of device "
        "calls.");
  m.def("set_history", &Client::set_history, "client"_a, "events"_a,
        "Keep the last `events` allocations, frees and device calls; 0: none. An unchanged number continues the "
        "history.");

  m.attr("SEGMENT_FIELDS") =
      nb::make_tuple(nb::make_tuple("base", "<u8"), nb::make_tuple("size", "<u8"), nb::make_tuple("stream", "<i8"),
                     nb::make_tuple("kind", "<u4"), nb::make_tuple("paged", "<u4"), nb::make_tuple("graph_high", "<u8"),
                     nb::make_tuple("graph_low", "<u8"));
  m.attr("BLOCK_FIELDS") = nb::make_tuple(nb::make_tuple("address", "<u8"), nb::make_tuple("size", "<u8"),
                                          nb::make_tuple("requested", "<u8"), nb::make_tuple("segment", "<u4"),
                                          nb::make_tuple("state", "<u4"));
  m.attr("SEGMENT_KINDS") = nb::make_tuple("arena", "shared", "large", "small");
  m.attr("BLOCK_STATES") = nb::make_tuple("free", "live", "waiting");
  m.attr("EVENT_KINDS") =
      nb::make_tuple("alloc", "free", "handover", "use", "step", "begin", "end", "segment_alloc", "segment_free", "segment_map",
                     "segment_unmap", "refused");
}
