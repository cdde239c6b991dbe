#include <algorithm>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/pair.h>

#include "bindings/bindings.hpp"
#include "core/client.hpp"
#include "devices/host_device.hpp"
#include "core/pool.hpp"
#include "devices/simulated_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

// A device that the pool borrows, because Python holds the device too (tests read the counts).
class BorrowedDevice final : public Device {
 public:
  BorrowedDevice(Device& device, nb::object owner) : device_(device), owner_(owner.release().ptr()) {}
  ~BorrowedDevice() override {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    Py_DECREF(owner_);
  }
  DeviceTraits traits() const noexcept override { return device_.traits(); }
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override { return device_.reserve(bytes, alignment); }
  bool commit(Address address, std::size_t bytes) noexcept override { return device_.commit(address, bytes); }
  void decommit(Address address, std::size_t bytes) noexcept override { device_.decommit(address, bytes); }
  Address resize(Address address, std::size_t from, std::size_t to) noexcept override {
    return device_.resize(address, from, to);
  }
  void release(Address address, std::size_t bytes) noexcept override { device_.release(address, bytes); }
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override {
    device_.copy(to, from, bytes, stream);
  }
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override { device_.zero(address, bytes, stream); }
  std::size_t foresight() const noexcept override { return device_.foresight(); }
  void prefetch(Address address, std::size_t bytes) noexcept override { device_.prefetch(address, bytes); }
  Event record(Stream stream) noexcept override { return device_.record(stream); }
  bool query(Event event) noexcept override { return device_.query(event); }
  bool tells(Event event) const noexcept override { return device_.tells(event); }
  bool may_record(Stream stream) noexcept override { return device_.may_record(stream); }
  bool wait(Stream stream, Event event) noexcept override { return device_.wait(stream, event); }
  void forget(Event event) noexcept override { device_.forget(event); }
  bool synchronize() noexcept override { return device_.synchronize(); }
  bool capturing(Stream stream) noexcept override { return device_.capturing(stream); }
  std::uint64_t capture(Stream stream) noexcept override { return device_.capture(stream); }
  DeviceMemory memory() const noexcept override { return device_.memory(); }
  std::uint64_t refusals() const noexcept override { return device_.refusals(); }
  std::string last_refusal_text() const override { return device_.last_refusal_text(); }
  bool serves(int index) noexcept override { return device_.serves(index); }
  bool is(int index) const noexcept override { return device_.is(index); }
  bool bound() const noexcept override { return device_.bound(); }
  HostedMemory* hosted() noexcept override { return device_.hosted(); }

 private:
  Device& device_;
  PyObject* owner_;
};

struct PoolStats {
  Gauge reserved, deferred;
  ArenaStats arena;
  std::size_t idle, recent_reserved, budget;
  std::uint64_t beyond_budget;
  std::size_t live, segments, segment_free, segment_free_blocks, segment_largest_free, live_blocks, graph_pools, table_bytes, limit;
  std::uint64_t device_calls, stream_waits;
};

std::size_t live_of_all(const Pool& pool) {
  std::size_t bytes = 0;
  for (const Client* client : pool.clients()) bytes += client->live();
  return bytes;
}

PoolStats taken(Pool& pool) {
  const Guarded guard(pool.lock);
  return {pool.source().reserved(),
          pool.deferred(),
          pool.arena_stats(),
          pool.segments().retained(),
          pool.source().recent_peak(),
          pool.source().budget(),
          pool.source().beyond_budget(),
          live_of_all(pool),
          pool.segments().segments(),
          pool.segments().free_bytes(),
          pool.segments().free_blocks(),
          pool.segments().largest_free(),
          pool.live_blocks(),
          pool.graphs().pools(),
          pool.table_bytes(),
          pool.source().limit(),
          pool.source().calls(),
          pool.arena_streams().waits()};
}

// Make Python objects without the lock: making one may collect garbage, which frees arrays, which takes the
// lock.
nb::typed<nb::dict, nb::str, nb::any> pool_stats(Pool& pool) {
  const PoolStats s = patiently(pool, [&] { return taken(pool); });
  nb::typed<nb::dict, nb::str, nb::any> d;
  d["reserved"] = gauge(s.reserved);
  d["deferred"] = gauge(s.deferred);
  d["arena_bytes"] = s.arena.bytes;
  d["arena_live_ranges"] = s.arena.alive;
  d["arena_refused"] = s.arena.refused;
  d["arena_conversions"] = s.arena.conversions;
  d["idle_bytes"] = s.idle;
  d["recent_reserved_bytes"] = s.recent_reserved;
  d["budget_bytes"] = s.budget;
  d["beyond_budget"] = s.beyond_budget;
  d["live_bytes"] = s.live;
  d["segments"] = s.segments;
  d["segment_free_bytes"] = s.segment_free;
  d["segment_free_blocks"] = s.segment_free_blocks;
  d["segment_largest_free_bytes"] = s.segment_largest_free;
  d["live_blocks"] = s.live_blocks;
  d["graph_pools"] = s.graph_pools;
  d["device_calls"] = s.device_calls;
  d["stream_waits"] = s.stream_waits;
  d["table_bytes"] = s.table_bytes;
  d["max_reserved_bytes"] = s.limit;
  return d;
}

}  // namespace

void bind_pool(nb::module_& m) {
  // Release the interpreter's lock in calls that may wait for the device, directly or through another thread:
  // a Python function of another thread may be queued on a stream.
  const auto released = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<Pool>(m, "Pool", "One device's memory: arena, guard, fallback.")
      .def(
          "__init__",
          [](Pool* self, nb::object device, std::size_t small_bytes, std::size_t max_reserved,
             std::size_t recorded_events, bool share_streams) {
            auto& borrowed = nb::cast<Device&>(device);
            if (recorded_events < 16) throw nb::value_error("recorded_events must be at least 16");
            new (self) Pool(std::make_unique<BorrowedDevice>(borrowed, device),
                            {small_bytes, max_reserved, recorded_events, ArenaStreams::kMostStreams, share_streams});
          },
          nb::kw_only(), "device"_a, "small_bytes"_a = 512, "max_reserved"_a = ~std::size_t{0},
          "recorded_events"_a = PoolOptions{}.recorded_events, "share_streams"_a = true)
      .def("stats", &pool_stats)
      .def("wait_for_device",
           [](Pool& pool) {
             const nb::gil_scoped_release release;
             return pool.source().device().synchronize();  // without the pool's lock, so that other threads can allocate meanwhile
           },
           "Wait for all queued work. False: the wait failed, for example during a graph capture.")
      .def("clients",
           [](Pool& pool) {
             return patiently(pool, [&] {
               std::vector<std::string> names;
               const Guarded guard(pool.lock);
               for (const Client* client : pool.clients()) names.push_back(client->name());
               return names;
             });
           },
           "Return the names of the clients that share the pool.")
      .def("begin_graph",
           [](Pool& pool, GraphPools::Id id, std::vector<Stream> streams) {
             const auto takes = [streams = std::move(streams)](Stream stream) {
               return std::find(streams.begin(), streams.end(), stream) != streams.end();
             };
             unlocked([&] {
               const Guarded guard(pool.lock);
               pool.begin_graph(id, takes);
             });
           },
           "id"_a, "streams"_a, "Assign allocations on these streams to a graph that is being captured.")
      .def("end_graph", [](Pool& pool, GraphPools::Id id) { const Guarded guard(pool.lock); pool.end_graph(id); }, "id"_a, released)
      .def("release_graph", [](Pool& pool, GraphPools::Id id) { const Guarded guard(pool.lock); pool.release_graph(id); },
           "id"_a, released, "End one use of a graph's memory, which is released when its buffers are freed. "
                             "Call once for each begin.")
      .def("trim", [](Pool& pool) { const Guarded guard(pool.lock); pool.trim(); }, released,
           "Give free memory back to the device.")
      .def("return_idle", [](Pool& pool) { const Guarded guard(pool.lock); pool.return_idle(); }, released,
           "Release memory that stayed idle through the last two calls.")
      .def("release_arena", [](Pool& pool) { const Guarded guard(pool.lock); return pool.release_arena(); }, released,
           "Release the arena if no range is live; return true if no arena is left.")
      .def("set_retained_limit",
           [](Pool& pool, std::size_t bytes) { const Guarded guard(pool.lock); pool.segments().set_retained_limit(bytes); },
           "bytes"_a, released, "Release free memory beyond this many bytes at once.")
      .def("set_max_reserved",
           [](Pool& pool, std::size_t bytes) { const Guarded guard(pool.lock); pool.source().set_limit(bytes); }, "bytes"_a, released)
      .def("set_budget",
           [](Pool& pool, std::size_t bytes) { const Guarded guard(pool.lock); pool.set_budget(bytes); }, "bytes"_a, released,
           "Set a soft limit: free memory is released before more is taken, and memory taken beyond the limit is "
           "counted.")
      .def("room",
           [](Pool& pool) {
             return patiently(pool, [&] {
               const Guarded guard(pool.lock);
               return pool.room();
             });
           },
           "Return the bytes available at once: within the budget after free memory was released, or in the "
           "largest hole of the arena; negative: bytes held beyond the budget.")
      .def("owns",
           [](Pool& pool, Address address) {
             return patiently(pool, [&] {
               const Guarded guard(pool.lock);
               bool ours = false;
               pool.size_of(address, ours);
               return ours;
             });
           }, "address"_a)
      .def("arena_ranges",
           [](Pool& pool) {
             return unlocked([&] {
               const Guarded guard(pool.lock);
               return pool.occupancy().live_ranges();
             });
           },
           "Return the live (begin, end) offsets in the arena, in order.");
}
