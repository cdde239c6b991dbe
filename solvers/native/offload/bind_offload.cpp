// Python binding of the offload planner.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arrays.hpp"
#include "offload/schedule_search.hpp"
#include "offload/offload_planner.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using offload::Absences;
using offload::Planner;

namespace {

void make(Planner* self, const In<double>& seconds, const In<int64_t>& load, const In<int64_t>& last,
          const In<int64_t>& use, const In<int64_t>& size, const In<double>& out, const In<double>& in,
          const In<int32_t>& source, bool circular, bool duplex) {
  const size_t k = seconds.shape(0), n = size.shape(0);
  need(k > 0 && load.shape(0) == k, "a step without operations, or a load of another length");
  need(last.shape(0) == n && use.shape(0) == n && out.shape(0) == n && in.shape(0) == n && source.shape(0) == n,
       "columns of different lengths");
  const auto most = static_cast<int64_t>(k);
  for (size_t c = 0; c < n; ++c) {
    const int64_t a = last.data()[c], b = use.data()[c];
    need(a >= 0 && a < most && b > a && b <= (circular ? a + most : most - 1), "an absence outside of the step");
    need(source.data()[c] >= -1 && source.data()[c] < static_cast<int32_t>(n), "no such absence");
  }
  new (self) Planner(vector_of(seconds), vector_of(load),
                     Absences{vector_of(last), vector_of(use), vector_of(size), vector_of(out), vector_of(in),
                              vector_of(source)},
                     circular, duplex);
}

std::vector<int32_t> checked(const Planner& planner, const In<int32_t>& order) {
  auto result = vector_of(order);
  for (const int32_t c : result) need(c >= 0 && c < planner.count(), "no such absence");
  return result;
}

using Columns = std::tuple<Out<int32_t>, Out<int64_t>, Out<int64_t>, double, int64_t>;

Columns columns_of(const std::vector<uint8_t>& chosen, const offload::Windows& away, double stall, int64_t peak) {
  std::vector<int32_t> rows;
  std::vector<int64_t> release, fetch;
  for (size_t c = 0; c < chosen.size() && std::isfinite(stall); ++c) {
    if (!chosen[c] || away.release[c] >= away.fetch[c]) continue;
    rows.push_back(static_cast<int32_t>(c));
    release.push_back(away.release[c]);
    fetch.push_back(away.fetch[c]);
  }
  return {array_of(std::move(rows)), array_of(std::move(release)), array_of(std::move(fetch)), stall, peak};
}

using Improved = std::tuple<Out<int64_t>, Out<int64_t>, Out<int64_t>, double>;

Improved improve(const Planner& self, const In<int64_t>& out, const In<int64_t>& release, const In<int64_t>& fetch,
                 int64_t limit, double work, uint64_t seed) {
  const size_t n = static_cast<size_t>(self.count());
  need(out.shape(0) == n && release.shape(0) == n && fetch.shape(0) == n, "columns of different lengths");
  std::vector<offload::Move> moves(n);
  const auto& a = self.absences();
  for (size_t c = 0; c < n; ++c) {
    moves[c] = {out.data()[c], release.data()[c], fetch.data()[c]};
    const auto& m = moves[c];
    need(!m.taken() || (a.last[c] <= m.out && m.out < m.release && m.fetch <= a.use[c]), "a move outside of an absence");
  }
  double stall = 0;
  if (n) {
    nb::gil_scoped_release unlocked;
    offload::ScheduleSearch search(self, limit, seed);
    moves = search.improve(moves, work);
    stall = search.stall();
  }
  std::vector<int64_t> columns[3];
  for (const auto& m : moves) {
    columns[0].push_back(m.out), columns[1].push_back(m.release), columns[2].push_back(m.fetch);
  }
  return {array_of(std::move(columns[0])), array_of(std::move(columns[1])), array_of(std::move(columns[2])), stall};
}

}  // namespace

void bind_offload(nb::module_& m) {
  nb::class_<Planner>(m, "OffloadPlanner", "Native planner of the offloads and reloads of a step; see solvers.swap.")
      .def("__init__", &make, "seconds"_a, "load"_a, "last"_a, "use"_a, "size"_a, "out"_a, "back"_a, "source"_a,
           "circular"_a, "duplex"_a)
      .def("plan",
           [](Planner& self, const In<int32_t>& order, int64_t limit, int rounds) {
             const auto first = checked(self, order);
             offload::Result result;
             {
               nb::gil_scoped_release release;
               result = self.plan(first, limit, rounds);
             }
             return columns_of(result.chosen, result.away, result.stall, result.peak);
           },
           "order"_a, "limit"_a, "rounds"_a,
           "Absences, their release and fetch, the stall and the peak; a stall of inf where the limit cannot be held.")
      .def("improve", &improve, "out"_a, "release"_a, "fetch"_a, "limit"_a, "work"_a,
           "seed"_a,
           "Out, release and fetch of each absence after so much work, none where release >= fetch.")
      .def("select_without_stall",
           [](Planner& self, const In<int32_t>& order, int64_t limit) {
             const auto first = checked(self, order);
             std::vector<uint8_t> chosen;
             offload::Windows away;
             int64_t peak = 0;
             {
               nb::gil_scoped_release release;
               chosen = self.select_without_stall(first, limit);
               away = self.windows(chosen);
               self.prune(first, limit, chosen, away);
               for (const int64_t load : self.loads(chosen, away)) peak = std::max(peak, load);
             }
             return columns_of(chosen, away, 0.0, peak);
           },
           "order"_a, "limit"_a, "The same without any stall; the peak may be over the limit.");
}
