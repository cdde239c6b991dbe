// The contents of a pool and the history of a client, as packed records for NumPy.
#include <nanobind/stl/string.h>

#include "bindings/bindings.hpp"
#include "core/client.hpp"
#include "core/snapshot.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

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
        "What the pool holds and, of a client, the history, all of one moment: packed records of SEGMENT_FIELDS, "
        "BLOCK_FIELDS and EVENT_FIELDS.");
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
  }, "How many of each there are in the process; a pattern that nobody has installed yet is a plan too.");
  m.def("usage", &usage, "pool"_a,
        "Segments and bytes held, in size-class pages (small) and otherwise (large); of these idle, in segments in which "
        "something lives; what was reserved at most since Client.reset_peaks(); dealings with the device.");
  m.def("set_history", &Client::set_history, "client"_a, "events"_a,
        "Keep the last so many allocations, frees and dealings with the device; 0: none. The same number again goes on.");

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
