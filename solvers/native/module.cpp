// Python binding of the packing kernels. Arrays are one-dimensional and contiguous; see _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <optional>
#include <tuple>

#include "arrays.hpp"
#include "packing/cliques.hpp"
#include "packing/fit.hpp"
#include "packing/lifetimes.hpp"
#include "packing/local_repair.hpp"
#include "packing/max_load_first.hpp"
#include "packing/orders.hpp"
#include "packing/pairwise_search.hpp"
#include "packing/skyline_search.hpp"
#include "packing/stream_waits.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using packing::Jobs;

namespace {

// Checks and returns the columns of the pieces of `buffers` buffers. With a period, time is a circle of this
// length.
packing::Lifetimes lifetimes_of(const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, size_t buffers,
                          int64_t period) {
  const size_t n = owner.shape(0);
  need(start.shape(0) == n && end.shape(0) == n, "columns of different lengths");
  need(period >= 0, "a period below 0");
  const packing::Lifetimes lifetimes{owner.data(), start.data(), end.data(), n};
  for (size_t k = 0; k < n; ++k)
    need(lifetimes.owner[k] >= 0 && static_cast<size_t>(lifetimes.owner[k]) < buffers && lifetimes.start[k] < lifetimes.end[k] &&
             (period == 0 || lifetimes.start[k] >= 0),
         "not a piece of a buffer");
  return lifetimes;
}

Jobs make_jobs(const In<int64_t>& pieces, const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size,
               const In<int64_t>& alignment, const In<int64_t>& fixed) {
  const size_t n = size.shape(0), k = start.shape(0);
  need(pieces.shape(0) == n && alignment.shape(0) == n && fixed.shape(0) == n && end.shape(0) == k,
       "columns of different lengths");
  need(k < (1u << 30), "too many pieces");
  nb::gil_scoped_release release;
  Jobs jobs;
  jobs.size = vector_of(size);
  jobs.fixed = vector_of(fixed);
  packing::reserve(jobs.first, n + 1);
  packing::reserve(jobs.mask, n);
  jobs.first.push_back(0);
  for (size_t j = 0; j < n; ++j) {
    const int64_t a = alignment.data()[j];
    need(a > 0 && (a & (a - 1)) == 0, "alignment is not a power of two");
    need(jobs.size[j] > 0, "a job without a size");
    need(pieces.data()[j] > 0 && pieces.data()[j] <= static_cast<int64_t>(k) - jobs.first.back(),
         "counts of pieces do not add up");
    jobs.mask.push_back(a - 1);
    jobs.first.push_back(jobs.first.back() + static_cast<int32_t>(pieces.data()[j]));
  }
  need(static_cast<size_t>(jobs.first.back()) == k, "counts of pieces do not add up");
  for (size_t p = 0; p < k; ++p) need(start.data()[p] < end.data()[p], "an empty piece");
  packing::rank_times(jobs, start.data(), end.data(), k);
  return jobs;
}

std::vector<int32_t> order_of(const Jobs& jobs, const In<int32_t>& order) {
  nb::gil_scoped_release release;
  auto result = vector_of(order);
  std::vector<bool> seen(jobs.size.size(), false);
  need(result.size() == seen.size(), "the order is not a permutation");
  for (const int32_t job : result) {
    need(job >= 0 && job < jobs.count() && !seen[job], "the order is not a permutation");
    seen[job] = true;
  }
  return result;
}

// Returns compute() as an array; compute() runs without the GIL.
template <class Compute>
auto array_without_gil(Compute compute) {
  decltype(compute()) values;
  {
    nb::gil_scoped_release release;
    values = compute();
  }
  return array_of(std::move(values));
}

// Adds the properties of a heuristic that holds a plan: offsets, arena and work.
template <class T>
void add_plan(nb::class_<T>& type) {
  type.def_prop_ro("offsets", [](const T& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &T::arena)
      .def_prop_ro("work", &T::work, "Work units spent so far; one is about one comparison of first fit.");
}

// Binds a search that continues to improve the given plan.
template <class T>
void bind_repair(nb::module_& m, const char* name, const char* doc) {
  nb::class_<T> type(m, name, doc);
  type.def("__init__",
           [](T* self, const Jobs& jobs, const In<int64_t>& offsets, uint64_t seed) {
             need(offsets.shape(0) == jobs.size.size(), "columns of different lengths");
             auto begin = vector_of(offsets);
             nb::gil_scoped_release release;
             new (self) T(jobs, std::move(begin), seed);
           },
           "jobs"_a, "offsets"_a, "seed"_a, nb::keep_alive<1, 2>());
  type.def("advance", &T::advance, "budget"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Continue for about `budget` work units; return true if a smaller arena was found.");
  add_plan(type);
}

// Binds a complete search for offsets within a capacity; `every_rule` is the default of its rules, if it has any.
template <class T, class... Rules>
void bind_complete_search(nb::module_& m, const char* name, const char* doc, Rules... every_rule) {
  nb::class_<T>(m, name, doc)
      .def("__init__",
           [](T* self, const Jobs& jobs, int64_t capacity, uint64_t seed, Rules... rules) {
             nb::gil_scoped_release release;
             new (self) T(jobs, capacity, seed, rules...);
           },
           "jobs"_a, "capacity"_a, "seed"_a, ("rules"_a = every_rule)...)
      .def("advance", [](T& self, int64_t budget) { return self.advance(budget) != T::State::open; }, "budget"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Continue for about `budget` work units; return true if a plan, or a proof that no plan exists, was found.")
      .def_prop_ro("found", &T::found)
      .def_prop_ro("infeasible", &T::infeasible)
      .def_prop_ro("offsets", [](const T& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("nodes", &T::nodes)
      .def_prop_ro("work", &T::work, "Work units spent so far; one is about one comparison of first fit.");
}

void bind_jobs(nb::module_& m) {
  nb::class_<Jobs>(m, "Jobs", "Packing problem: job j owns the next pieces[j] of the pieces of lifetime [start, end).")
      .def("__init__",
           [](Jobs* self, const In<int64_t>& pieces, const In<int64_t>& start, const In<int64_t>& end,
              const In<int64_t>& size, const In<int64_t>& alignment, const In<int64_t>& fixed) {
             new (self) Jobs(make_jobs(pieces, start, end, size, alignment, fixed));
           },
           "pieces"_a, "start"_a, "end"_a, "size"_a, "alignment"_a, "fixed"_a)
      .def("__len__", [](const Jobs& self) { return self.count(); })
      .def_prop_ro("start_order",
                   [](const Jobs& self) { return array_without_gil([&] { return packing::start_order(self); }); },
                   nb::rv_policy::automatic, "Jobs by start, those across the cut of a circle first.");
}

void bind_searches(nb::module_& m) {
  nb::class_<packing::FitPacker> fit(m, "FitPacker", "First fit or best fit in a given order.");
  fit.def(nb::init<const Jobs&>(), "jobs"_a)
      .def("begin",
           [](packing::FitPacker& self, const In<int32_t>& order, bool best_fit) {
             self.begin(order_of(self.jobs(), order), best_fit ? packing::Rule::best_fit : packing::Rule::first_fit);
           },
           "order"_a, nb::kw_only(), "best_fit"_a = false)
      .def("advance", &packing::FitPacker::advance, "budget"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Continue for about `budget` work units; return true if all jobs are placed.");
  add_plan(fit);

  bind_repair<packing::LocalRepair>(m, "LocalRepair", "Repair of a plan around the highest job, place by place.");
  bind_complete_search<packing::SkylineSearch>(
      m, "SkylineSearch", "Complete search over skyline valleys for offsets within a capacity; one piece per job.",
      static_cast<uint32_t>(packing::every_rule));
  bind_complete_search<packing::PairwiseSearch>(
      m, "PairwiseSearch", "Complete search over the vertical order of each two jobs, within a capacity.");
  nb::class_<packing::Cancel>(m, "Cancel", "Flag that makes a kernel on another thread give up.")
      .def(nb::init<>())
      .def("cancel", &packing::Cancel::cancel);
}

void bind_bounds(nb::module_& m) {
  m.def("fixed_conflict",
        [](const Jobs& jobs) -> std::optional<std::pair<int32_t, int32_t>> {
          nb::gil_scoped_release release;
          const auto pair = packing::fixed_conflict(jobs);
          if (pair.first < 0) return std::nullopt;
          return pair;
        },
        "jobs"_a, "Return two jobs whose fixed offsets overlap, or None.");

  m.def("stack_bound",
        [](const Jobs& jobs, int64_t steps) {
          nb::gil_scoped_release release;
          return packing::StackBound(jobs, steps).bound();
        },
        "jobs"_a, "steps"_a,
        "Return a lower bound in bytes on the height of a stack of jobs that all meet, found in about `steps` steps.");

  m.def("count_waits",
        [](const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size, const In<int64_t>& stream,
           const In<int64_t>& offset, int64_t columns, int64_t period) {
          const packing::ReplayedPlan plan{vector_of(start), vector_of(end), vector_of(size), vector_of(stream),
                                       vector_of(offset), columns, period};
          const size_t n = plan.start.size();
          need(plan.end.size() == n && plan.size.size() == n && plan.stream.size() == n, "columns of different lengths");
          need(columns > 0 && plan.offset.size() == n * static_cast<size_t>(columns), "not one offset for each column");
          for (size_t b = 0; b < n; ++b) need(plan.stream[b] >= 0 && plan.size[b] > 0, "not a stream, or not a size");
          nb::gil_scoped_release release;
          return packing::count_waits(plan);
        },
        "start"_a, "end"_a, "size"_a, "stream"_a, "offset"_a, "columns"_a, "period"_a,
        "Return the number of waits of one stream for another in `columns` iterations; `offset` is row by row.");

  m.def("load_curve",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size,
           int64_t period) {
          packing::Curve curve;
          {
            nb::gil_scoped_release release;
            curve = packing::load_curve(lifetimes_of(owner, start, end, size.shape(0), period), size.data(), period);
          }
          return std::pair(array_of(std::move(curve.times)), array_of(std::move(curve.loads)));
        },
        "owner"_a, "start"_a, "end"_a, "size"_a, "period"_a,
        "Return the times at which lifetimes start or end, and the bytes alive from each time on; the period of a line is 0.");

  m.def("load_extremes",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size,
           int64_t period) {
          nb::gil_scoped_release release;
          const auto lifetimes = lifetimes_of(owner, start, end, size.shape(0), period);
          const auto found = packing::load_extremes(lifetimes, size.data(), period);
          return std::pair(found.peak, found.quietest);
        },
        "owner"_a, "start"_a, "end"_a, "size"_a, "period"_a,
        "Return the peak of the load curve and the first time of the lowest load; zeros for an empty curve.");
}

void bind_placement(nb::module_& m) {
  m.def("to_line",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, int64_t period, int64_t cut,
           bool by_start) {
          need(owner.shape(0) < (1u << 30), "too many pieces");
          packing::Line line;
          {
            nb::gil_scoped_release release;
            const auto lifetimes = lifetimes_of(owner, start, end, std::numeric_limits<size_t>::max(), period);
            need(period == 0 || (cut >= 0 && cut < period), "a cut outside the period");
            for (size_t k = 0; k < lifetimes.count; ++k)
              need(period == 0 || lifetimes.end[k] - lifetimes.start[k] <= period, "a piece longer than the period");
            line = packing::CircleCut(lifetimes, period, cut).line(by_start);
          }
          return std::tuple(array_of(std::move(line.row)), array_of(std::move(line.pieces)),
                            array_of(std::move(line.start)), array_of(std::move(line.end)));
        },
        "owner"_a, "start"_a, "end"_a, "period"_a, "cut"_a, "by_start"_a,
        "Return the buffer and the number of pieces of each job, and start and end of each piece on the line from "
        "`cut`. The given pieces are sorted by (owner, start); the period of a line is 0.");

  m.def("write_offsets",
        [](const Into& into, const In<int64_t>& rows, const In<int64_t>& job, const In<int64_t>& offset) {
          need(job.shape(0) == offset.shape(0), "columns of different lengths");
          const auto columns = static_cast<int64_t>(into.shape(1)), n = static_cast<int64_t>(rows.shape(0));
          const auto table = static_cast<int64_t>(into.shape(0));
          int64_t* const values = into.data();
          const int64_t *const row_of = rows.data(), *const jobs = job.data(), *const offsets = offset.data();
          nb::gil_scoped_release release;
          for (size_t k = 0, count = job.shape(0); k < count; ++k) {
            if (jobs[k] < 0) continue;
            const int64_t turn = columns == 1 || n == 0 ? 0 : jobs[k] / n, row = jobs[k] - turn * n;
            need(turn < columns && row < n && row_of[row] >= 0 && row_of[row] < table, "not a row of the table");
            values[row_of[row] * columns + turn] = offsets[k];
          }
        },
        // noconvert: a converted array is a copy, and writes to it would be lost
        "into"_a.noconvert(), "rows"_a, "job"_a, "offset"_a,
        "Write offset[k] into column job[k] / len(rows) of row rows[job[k] % len(rows)], unless job[k] is negative.");

  m.def("pack_in_order",
        [](const Jobs& jobs, const In<int32_t>& order, const packing::Cancel& cancel) {
          const auto checked = order_of(jobs, order);
          return array_without_gil([&] { return packing::pack_in_order(jobs, checked, cancel); });
        },
        "jobs"_a, "order"_a, "cancel"_a,
        "Return offsets by lowest valley first, the first job in `order` that fits; no offsets if cancelled.");

  m.def("pack_max_load_first",
        [](const Jobs& jobs, const In<int32_t>& order, int64_t goal, const packing::Cancel& cancel) {
          const auto checked = order_of(jobs, order);
          return array_without_gil([&] {
            packing::Random random(0);
            const int64_t limit = std::numeric_limits<int64_t>::max();
            return packing::pack_max_load_first(jobs, checked, goal, limit, 0, random, cancel);
          });
        },
        "jobs"_a, "order"_a, "goal"_a, "cancel"_a,
        "Return offsets by maximum load first for an arena of `goal` bytes, no offsets if cancelled; `order` is the "
        "order of the jobs with gaps.");
}

}  // namespace

void bind_simulators(nb::module_& m);
void bind_offload(nb::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Native part of solvers: packing kernels, simulated allocators, swap planner.";
  bind_simulators(m);
  bind_offload(m);
  bind_jobs(m);
  bind_searches(m);
  bind_bounds(m);
  bind_placement(m);
}
