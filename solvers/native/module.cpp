// Python binding of the packing kernels. Arrays are one-dimensional and contiguous; see _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <optional>
#include <tuple>

#include "arrays.hpp"
#include "packing/branching.hpp"
#include "packing/earliest.hpp"
#include "packing/fullest.hpp"
#include "packing/line.hpp"
#include "packing/outward.hpp"
#include "packing/packer.hpp"
#include "packing/pairs.hpp"
#include "packing/repair.hpp"
#include "packing/search.hpp"
#include "packing/stack.hpp"
#include "packing/staircase.hpp"
#include "packing/stretches.hpp"
#include "packing/waits.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using packing::Jobs;

namespace {

// Checks and returns the columns of the pieces of `buffers` buffers. With a period, time is a circle of this
// length.
packing::Spells spells_of(const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, size_t buffers,
                          int64_t period) {
  const size_t n = owner.shape(0);
  need(start.shape(0) == n && end.shape(0) == n, "columns of different lengths");
  need(period >= 0, "a period below 0");
  const packing::Spells spells{owner.data(), start.data(), end.data(), n};
  for (size_t k = 0; k < n; ++k)
    need(spells.owner[k] >= 0 && static_cast<size_t>(spells.owner[k]) < buffers && spells.start[k] < spells.end[k] &&
             (period == 0 || spells.start[k] >= 0),
         "not a piece of a buffer");
  return spells;
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

// Throws unless the jobs alive at any instant can be stacked without a gap.
void need_stackable(const Jobs& jobs) {
  need(jobs.count() > 0 && jobs.pieces.size() == jobs.size.size(), "there are none, or with gaps");
  const int64_t coarsest = packing::coarsest_alignment(jobs, jobs.count());
  for (int32_t j = 0; j < jobs.count(); ++j)
    need(jobs.fixed[j] < 0 && (jobs.size[j] & coarsest) == 0, "fixed offsets, or sizes that are not aligned");
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

}  // namespace

void bind_simulators(nb::module_& m);
void bind_offload(nb::module_& m);

NB_MODULE(_core, m) {
  m.doc() = "Native part of solvers: packing kernels, simulated allocators.";
  bind_simulators(m);
  bind_offload(m);

  nb::class_<Jobs>(m, "Jobs", "What is packed; job j owns the next pieces[j] of the pieces [start, end).")
      .def("__init__",
           [](Jobs* self, const In<int64_t>& pieces, const In<int64_t>& start, const In<int64_t>& end,
              const In<int64_t>& size, const In<int64_t>& alignment, const In<int64_t>& fixed) {
             new (self) Jobs(make_jobs(pieces, start, end, size, alignment, fixed));
           },
           "pieces"_a, "start"_a, "end"_a, "size"_a, "alignment"_a, "fixed"_a)
      .def("__len__", [](const Jobs& self) { return self.count(); })
      .def_prop_ro("at_peak", [](const Jobs& self) { return packing::count_alive(self, packing::peak_of(self)); },
                   "Jobs that are alive where most bytes are, first.")
      .def_prop_ro(
          "earliest_first",
          [](const Jobs& self) {
            std::vector<int32_t> order;
            {
              nb::gil_scoped_release release;
              order = packing::earliest_first(self);
            }
            return array_of(std::move(order));
          },
          nb::rv_policy::automatic, "The jobs by their starts, those across the cut of a circle first.");

  nb::class_<packing::Packer>(m, "Packer", "First or best fit in a given order.")
      .def(nb::init<const Jobs&>(), "jobs"_a)
      .def("begin",
           [](packing::Packer& self, const In<int32_t>& order, bool best_fit, bool inner) {
             const auto best = inner ? packing::Rule::inner_fit : packing::Rule::best_fit;
             self.begin(order_of(self.jobs(), order), best_fit ? best : packing::Rule::first_fit);
           },
           "order"_a, nb::kw_only(), "best_fit"_a = false, "inner"_a = false)
      .def("advance", &packing::Packer::advance, "budget"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Go on for about `budget` looks; whether all jobs are placed.")
      .def_prop_ro("offsets", [](const packing::Packer& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &packing::Packer::arena)
      .def_prop_ro("looks", &packing::Packer::looks);

  nb::class_<packing::Search>(m, "Search", "Seeded search over orders for lowest valley first.")
      .def("__init__",
           [](packing::Search* self, const Jobs& jobs, const In<int32_t>& order, uint64_t seed) {
             auto checked = order_of(jobs, order);
             nb::gil_scoped_release release;
             new (self) packing::Search(jobs, std::move(checked), seed);
           },
           "jobs"_a, "order"_a, "seed"_a)
      .def("advance", &packing::Search::advance, "budget"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Go on for about `budget` looks; whether a smaller arena was found.")
      .def_prop_ro("offsets", [](const packing::Search& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &packing::Search::arena)
      .def_prop_ro("looks", &packing::Search::looks);

  nb::class_<packing::Repair>(m, "Repair", "Makes a plan lower, place by place.")
      .def("__init__",
           [](packing::Repair* self, const Jobs& jobs, const In<int64_t>& offsets, uint64_t seed) {
             need(offsets.shape(0) == jobs.size.size(), "columns of different lengths");
             const auto begin = vector_of(offsets);
             nb::gil_scoped_release release;
             new (self) packing::Repair(jobs, begin, seed);
           },
           "jobs"_a, "offsets"_a, "seed"_a)
      .def("advance", &packing::Repair::advance, "budget"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Go on for about `budget` looks; whether a smaller arena was found.")
      .def_prop_ro("offsets", [](const packing::Repair& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &packing::Repair::arena)
      .def_prop_ro("looks", &packing::Repair::looks);

  nb::class_<packing::Stretches>(m, "Stretches", "Makes a plan lower, one stretch of time after the other.")
      .def("__init__",
           [](packing::Stretches* self, const Jobs& jobs, const In<int64_t>& offsets, uint64_t seed) {
             need(offsets.shape(0) == jobs.size.size(), "columns of different lengths");
             auto begin = vector_of(offsets);
             nb::gil_scoped_release release;
             new (self) packing::Stretches(jobs, std::move(begin), seed);
           },
           "jobs"_a, "offsets"_a, "seed"_a, nb::keep_alive<1, 2>())
      .def("advance", &packing::Stretches::advance, "budget"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Go on for about `budget` looks; whether a smaller arena was found.")
      .def_prop_ro("offsets", [](const packing::Stretches& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &packing::Stretches::arena)
      .def_prop_ro("looks", &packing::Stretches::looks);

  nb::class_<packing::Outward>(m, "Outward", "Packs what is alive at the peak, then what is near it, then the rest.")
      .def("__init__",
           [](packing::Outward* self, const Jobs& jobs, int64_t goal, uint64_t seed, int32_t tries) {
             need_stackable(jobs);
             nb::gil_scoped_release release;
             new (self) packing::Outward(jobs, goal, seed, tries);
           },
           "jobs"_a, "goal"_a, "seed"_a, "tries"_a = 6, nb::keep_alive<1, 2>())
      .def("advance", &packing::Outward::advance, "budget"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Go on for about `budget` looks, or until it is given up; whether all is placed: near the peak within the goal.")
      .def_prop_ro("offsets", [](const packing::Outward& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("arena", &packing::Outward::arena)
      .def_prop_ro("given_up", &packing::Outward::given_up)
      .def_prop_ro("looks", &packing::Outward::looks);

  nb::class_<packing::Branching>(m, "Branching", "Complete search for offsets within a capacity; one piece a job.")
      .def("__init__",
           [](packing::Branching* self, const Jobs& jobs, int64_t capacity, uint64_t seed, uint32_t rules) {
             nb::gil_scoped_release release;
             new (self) packing::Branching(jobs, capacity, seed, rules);
           },
           "jobs"_a, "capacity"_a, "seed"_a, "rules"_a = static_cast<uint32_t>(packing::every_rule))
      .def("advance",
           [](packing::Branching& self, int64_t budget) {
             nb::gil_scoped_release release;
             return self.advance(budget) != packing::Branching::State::open;
           },
           "budget"_a, "Go on for about `budget` looks; whether a plan, or a proof that there is none, was found.")
      .def_prop_ro("found", &packing::Branching::found)
      .def_prop_ro("infeasible", &packing::Branching::infeasible)
      .def_prop_ro(
          "offsets", [](const packing::Branching& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("nodes", &packing::Branching::nodes)
      .def_prop_ro("looks", &packing::Branching::looks);

  nb::class_<packing::Pairs>(m, "Pairs", "Complete search for which of two jobs is below, within a capacity.")
      .def("__init__",
           [](packing::Pairs* self, const Jobs& jobs, int64_t capacity, uint64_t seed, uint32_t rules) {
             nb::gil_scoped_release release;
             new (self) packing::Pairs(jobs, capacity, seed, rules);
           },
           "jobs"_a, "capacity"_a, "seed"_a, "rules"_a = static_cast<uint32_t>(packing::every_pair_rule))
      .def("advance",
           [](packing::Pairs& self, int64_t budget) {
             nb::gil_scoped_release release;
             return self.advance(budget) != packing::Pairs::State::open;
           },
           "budget"_a, "Go on for about `budget` looks; whether a plan, or a proof that there is none, was found.")
      .def_prop_ro("found", &packing::Pairs::found)
      .def_prop_ro("infeasible", &packing::Pairs::infeasible)
      .def_prop_ro(
          "offsets", [](const packing::Pairs& self) { return array_of(self.offsets()); }, nb::rv_policy::automatic)
      .def_prop_ro("nodes", &packing::Pairs::nodes)
      .def_prop_ro("looks", &packing::Pairs::looks);

  m.def("clash",
        [](const Jobs& jobs) -> std::optional<std::pair<int32_t, int32_t>> {
          nb::gil_scoped_release release;
          const auto pair = packing::clash(jobs);
          if (pair.first < 0) return std::nullopt;
          return pair;
        },
        "jobs"_a, "Two jobs whose fixed offsets contradict each other, or None.");

  m.def("stack_bound",
        [](const Jobs& jobs, int64_t steps) {
          nb::gil_scoped_release release;
          return packing::Stacks(jobs, steps).bound();
        },
        "jobs"_a, "steps"_a, "How high jobs that all meet must stand at least, found in about so many steps.");

  m.def("count_waits",
        [](const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size, const In<int64_t>& stream,
           const In<int64_t>& offset, int64_t columns, int64_t period) {
          const packing::Replayed plan{vector_of(start), vector_of(end), vector_of(size), vector_of(stream),
                                       vector_of(offset), columns, period};
          const size_t n = plan.start.size();
          need(plan.end.size() == n && plan.size.size() == n && plan.stream.size() == n, "columns of different lengths");
          need(columns > 0 && plan.offset.size() == n * static_cast<size_t>(columns), "not one offset for each column");
          for (size_t b = 0; b < n; ++b) need(plan.stream[b] >= 0 && plan.size[b] > 0, "not a stream, or not a size");
          nb::gil_scoped_release release;
          return packing::count_waits(plan);
        },
        "start"_a, "end"_a, "size"_a, "stream"_a, "offset"_a, "columns"_a, "period"_a,
        "Waits of one stream for another in `columns` iterations; streams count from 0, `offset` is row by row.");

  nb::class_<packing::Cancel>(m, "Cancel", "Tells a kernel on another thread to give up.")
      .def(nb::init<>())
      .def("cancel", &packing::Cancel::cancel);

  m.def("load_curve",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size,
           int64_t period) {
          packing::Curve curve;
          {
            nb::gil_scoped_release release;
            curve = packing::load_curve(spells_of(owner, start, end, size.shape(0), period), size.data(), period);
          }
          return std::pair(array_of(std::move(curve.times)), array_of(std::move(curve.loads)));
        },
        "owner"_a, "start"_a, "end"_a, "size"_a, "period"_a,
        "Times at which something starts or ends, and the bytes alive from each; on a line where the period is 0.");

  m.def("load_extremes",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, const In<int64_t>& size,
           int64_t period) {
          nb::gil_scoped_release release;
          const auto spells = spells_of(owner, start, end, size.shape(0), period);
          const auto found = packing::load_extremes(spells, size.data(), period);
          return std::pair(found.peak, found.quietest);
        },
        "owner"_a, "start"_a, "end"_a, "size"_a, "period"_a,
        "The highest load of that curve, and the first time of its lowest; zeros where it is empty.");

  m.def("on_line",
        [](const In<int64_t>& owner, const In<int64_t>& start, const In<int64_t>& end, int64_t period, int64_t cut,
           bool by_start) {
          need(owner.shape(0) < (1u << 30), "too many pieces");
          packing::Line line;
          {
            nb::gil_scoped_release release;
            const auto spells = spells_of(owner, start, end, std::numeric_limits<size_t>::max(), period);
            need(period == 0 || (cut >= 0 && cut < period), "a cut outside the period");
            for (size_t k = 0; k < spells.count; ++k)
              need(period == 0 || spells.end[k] - spells.start[k] <= period, "a piece longer than the period");
            line = packing::Cut(spells, period, cut).line(by_start);
          }
          return std::tuple(array_of(std::move(line.row)), array_of(std::move(line.pieces)),
                            array_of(std::move(line.start)), array_of(std::move(line.end)));
        },
        "owner"_a, "start"_a, "end"_a, "period"_a, "cut"_a, "by_start"_a,
        "Buffer and number of pieces of each job, and start and end of each piece on the line from `cut`. Pieces are "
        "sorted by (owner, start) on a circle, or with the period 0 on a line.");

  m.def("put",
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
        "Write offset[k] into column job[k] / len(rows) of row rows[job[k] % len(rows)], where job[k] is not negative.");

  m.def("skyline",
        [](const Jobs& jobs, const In<int32_t>& order, const packing::Cancel& cancel) {
          const auto checked = order_of(jobs, order);
          std::vector<int64_t> offsets;
          {
            nb::gil_scoped_release release;
            offsets = packing::pack_in_order(jobs, checked, cancel);
          }
          return array_of(std::move(offsets));
        },
        "jobs"_a, "order"_a, "cancel"_a,
        "Offsets by lowest valley first, none when cancelled; `order` decides where several jobs fit.");

  m.def("peak_first",
        [](const Jobs& jobs, const packing::Cancel& cancel) {
          need_stackable(jobs);
          std::vector<int64_t> offsets;
          {
            nb::gil_scoped_release release;
            offsets = packing::pack_peak_first(jobs, cancel);
          }
          return array_of(std::move(offsets));
        },
        "jobs"_a, "cancel"_a,
        "Offsets of what is alive at the peak first, then either side by lowest valley first; none when cancelled.");

  m.def("fullest",
        [](const Jobs& jobs, const In<int32_t>& order, int64_t goal, const packing::Cancel& cancel) {
          const auto checked = order_of(jobs, order);
          std::vector<int64_t> offsets;
          {
            nb::gil_scoped_release release;
            packing::Random random(0);
            const int64_t limit = std::numeric_limits<int64_t>::max();
            offsets = packing::pack_fullest(jobs, checked, goal, limit, 0, random, cancel);
          }
          return array_of(std::move(offsets));
        },
        "jobs"_a, "order"_a, "goal"_a, "cancel"_a,
        "Offsets by what is alive, none when cancelled, for an arena of `goal` bytes; `order` is that of the jobs "
        "that have gaps.");

  m.def("below",
        [](const Jobs& jobs, const In<int32_t>& order, int64_t ceiling, int64_t goal, double doubt, uint64_t seed,
           const packing::Cancel& cancel) {
          const auto checked = order_of(jobs, order);
          std::vector<int64_t> offsets;
          {
            nb::gil_scoped_release release;
            packing::Random random(seed);
            offsets = packing::pack_below(jobs, checked, ceiling, goal, doubt, random, cancel);
          }
          return array_of(offsets);
        },
        "jobs"_a, "order"_a, "ceiling"_a, "goal"_a, "doubt"_a, "seed"_a, "cancel"_a,
        "Offsets, by what is alive, of what fits below `ceiling`, -1 for the others; none when cancelled. All of them "
        "should fit in `goal` bytes; `doubt` is a part of that by which loads are taken for more than they are.");
}
