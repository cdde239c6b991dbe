// Random jobs through the packing kernels of solvers/native; offsets are compared pair by pair.
//
// With `spoil`, the first plan of each seed in which two jobs meet is made invalid.
#include <limits>
#include <optional>

#include "seeded.hpp"
#include "packing/skyline_search.hpp"
#include "packing/max_load_first.hpp"
#include "packing/skyline.hpp"
#include "packing/peak_outward.hpp"
#include "packing/fit.hpp"
#include "packing/pairwise_search.hpp"
#include "packing/local_repair.hpp"
#include "packing/orders.hpp"
#include "packing/cliques.hpp"
#include "packing/window_repair.hpp"

namespace {

using packing::Jobs;
using packing::Piece;
using packing::Random;
using seeded::counts;
using seeded::fail;

constexpr int64_t kMost = int64_t{1} << 62;  // sizes, alignments and fixed offsets of a problem together

struct Life {
  int64_t start, end;
};

// Jobs with their lifetimes before times become ranks.
struct Problem {
  Jobs jobs;
  std::vector<std::vector<Life>> lives;
  std::vector<int64_t> alignment;

  bool meet(int32_t a, int32_t b) const {
    for (const Life& x : lives[a])
      for (const Life& y : lives[b])
        if (x.start < y.end && y.start < x.end) return true;
    return false;
  }
  bool overlap(int32_t a, int64_t at, int32_t b, int64_t other) const {
    return at < other + jobs.size[b] && other < at + jobs.size[a] && meet(a, b);
  }
  bool single() const { return jobs.pieces.size() == jobs.size.size(); }
};

std::vector<Life> single_life(Random& random, int32_t span) {
  const int32_t start = random.below(span);
  return {{start, start + 1 + random.below(span - start)}};
}

// One interval, one interval around the end of the circle, or several intervals.
std::vector<Life> any_life(Random& random, int32_t span) {
  const int32_t kind = random.below(4);
  if (kind < 2) return single_life(random, span);
  std::vector<int64_t> times;
  for (int32_t k = kind == 2 ? 2 : 2 + 2 * random.below(4); k > 0; --k) times.push_back(random.below(span + 1));
  std::sort(times.begin(), times.end());
  if (kind == 2) {
    if (times[0] == 0 || times[1] == span) return {{0, span}};
    return {{0, times[0]}, {times[1], span}};  // may touch if as long as the circle
  }
  std::vector<Life> life;
  for (size_t k = 0; k < times.size(); k += 2)
    if (times[k] < times[k + 1] && (life.empty() || life.back().end < times[k])) life.push_back({times[k], times[k + 1]});
  return life.empty() ? single_life(random, span) : life;
}

int64_t up_to(Random& random, int64_t most) { return 1 + static_cast<int64_t>(random.next() % static_cast<uint64_t>(most)); }

// Small sizes, any sizes, or sizes whose sums come near the limit of 64 bits.
struct Sizes {
  int64_t largest, coarsest, farthest;

  Sizes(Random& random, int32_t n) {
    switch (random.below(4)) {
      case 0: largest = 6, coarsest = 1, farthest = 30; break;
      case 1: largest = 8, coarsest = 8, farthest = 60; break;
      case 2: largest = 1 << 20, coarsest = 4096, farthest = int64_t{1} << 22; break;
      default: largest = kMost / 2 / n, coarsest = kMost / 4 / n, farthest = kMost / 4;
    }
  }
  int64_t alignment(Random& random) const {
    int64_t value = 1;
    while (value * 2 <= coarsest && random.below(8) != 0) value *= 2;
    return value;
  }
};

Problem any_problem(Random& random) {
  const int32_t most[] = {4, 12, 40}, spans[] = {3, 10, 60};
  const int32_t n = 1 + random.below(most[random.below(3)]), span = spans[random.below(3)];
  const int64_t origin = random.below(4) == 0 ? -kMost + 1 : 0;
  const bool one_piece = random.below(2) == 0, fix = random.below(3) == 0, equal_jobs = random.below(4) == 0;
  const Sizes sizes(random, n);
  Problem problem;
  Jobs& jobs = problem.jobs;
  std::vector<int64_t> start, end;
  jobs.first.push_back(0);
  for (int32_t j = 0; j < n; ++j) {
    if (equal_jobs && j > 0 && random.below(2) == 0) {
      jobs.size.push_back(jobs.size.back());
      problem.alignment.push_back(problem.alignment.back());
      problem.lives.push_back(problem.lives.back());
    } else {
      jobs.size.push_back(up_to(random, sizes.largest));
      problem.alignment.push_back(sizes.alignment(random));
      problem.lives.push_back(one_piece ? single_life(random, span) : any_life(random, span));
      for (Life& life : problem.lives.back()) life.start += origin, life.end += origin;
    }
    const int64_t alignment = problem.alignment.back();
    jobs.mask.push_back(alignment - 1);
    const bool fixed = fix && random.below(4) == 0;
    jobs.fixed.push_back(fixed ? up_to(random, sizes.farthest) / alignment * alignment : -1);
    for (const Life& life : problem.lives.back()) start.push_back(life.start), end.push_back(life.end);
    jobs.first.push_back(static_cast<int32_t>(start.size()));
  }
  packing::rank_times(jobs, start.data(), end.data(), start.size());
  counts["jobs"] += static_cast<unsigned long long>(n);
  return problem;
}

// Many jobs of one piece with short lifetimes.
Problem long_problem(Random& random) {
  const int32_t n = 100 + random.below(200), longest = 2 + random.below(20);
  Problem problem;
  std::vector<int64_t> start, end;
  for (int32_t j = 0; j < n; ++j) {
    start.push_back(random.below(n)), end.push_back(start.back() + 1 + random.below(longest));
    problem.lives.push_back({{start.back(), end.back()}});
    problem.alignment.push_back(1);
    problem.jobs.add({0, 1}, up_to(random, 1000), 0, -1);
  }
  packing::rank_times(problem.jobs, start.data(), end.data(), start.size());
  return problem;
}

// Bounds of a problem's arena from all kernels together.
class Judge {
 public:
  Judge(const Problem& problem, bool spoil) : problem_(problem), spoil_(spoil) {}

  // Checks a plan and returns the arena.
  int64_t plan(const char* kernel, std::vector<int64_t> offset) {
    const Jobs& jobs = problem_.jobs;
    const int32_t n = jobs.count();
    if (offset.size() != jobs.size.size()) fail(kernel, "not one offset for each job");
    if (spoil_) spoil(offset);
    int64_t arena = 0;
    for (int32_t j = 0; j < n; ++j) {
      if (offset[j] < 0 || offset[j] > kMost) fail(kernel, "an offset out of range");
      if (offset[j] % problem_.alignment[j] != 0) fail(kernel, "an offset that is not aligned");
      if (jobs.fixed[j] >= 0 && offset[j] != jobs.fixed[j]) fail(kernel, "not at its fixed offset");
      arena = std::max(arena, offset[j] + jobs.size[j]);
      for (int32_t k = 0; k < j; ++k)
        if (problem_.overlap(j, offset[j], k, offset[k])) fail(kernel, "two jobs overlap");
    }
    smallest_ = std::min(smallest_, arena);
    ++counts["plans"];
    agree(kernel);
    return arena;
  }

  void refuted(const char* kernel, int64_t capacity) {
    refuted_ = std::max(refuted_, capacity);
    ++counts["refuted"];
    agree(kernel);
  }

  int64_t smallest() const { return smallest_; }

 private:
  void agree(const char* kernel) const {
    if (smallest_ <= refuted_) fail(kernel, "a plan within a refuted capacity");
  }

  void spoil(std::vector<int64_t>& offset) {
    for (int32_t j = 1; j < problem_.jobs.count(); ++j) {
      if (!problem_.meet(0, j)) continue;
      offset[0] = offset[j];
      spoil_ = false;
      return;
    }
  }

  const Problem& problem_;
  bool spoil_;
  int64_t smallest_ = std::numeric_limits<int64_t>::max(), refuted_ = -1;
};

// Overlapping fixed offsets are found, and removed.
void fixed_conflict(Problem& problem) {
  Jobs& jobs = problem.jobs;
  const auto clashes = [&](int32_t a, int32_t b) {
    return jobs.fixed[a] >= 0 && jobs.fixed[b] >= 0 && problem.overlap(a, jobs.fixed[a], b, jobs.fixed[b]);
  };
  const auto [first, second] = packing::fixed_conflict(jobs);
  if (first >= 0) {
    if (first == second || !clashes(first, second)) fail("clash", "two jobs that do not contradict each other");
    ++counts["clashes"];
    jobs.fixed.assign(jobs.size.size(), -1);
    return;
  }
  for (int32_t a = 0; a < jobs.count(); ++a)
    for (int32_t b = 0; b < a; ++b)
      if (clashes(a, b)) fail("clash", "a contradiction was overlooked");
}

std::vector<int32_t> any_order(Random& random, int32_t n) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (int32_t k = n - 1; k > 0; --k) std::swap(order[k], order[random.below(k + 1)]);
  return order;
}

void valleys(const Problem& problem, Random& random, Judge& judge) {
  packing::ValleyPacker packer(problem.jobs);
  for (int32_t k = 0; k < 3; ++k) {
    const auto order = any_order(random, problem.jobs.count());
    const int64_t unlimited = std::numeric_limits<int64_t>::max();
    const int64_t limit = k == 0 || random.below(2) == 0 ? unlimited : up_to(random, judge.smallest());
    const int64_t arena = packer.pack(order, limit);
    if (arena < 0 && limit == unlimited) fail("skyline", "gave up without a limit");
    if (arena > limit) fail("skyline", "above the limit");
    if (arena < 0) ++counts["given up"];
    else if (judge.plan("skyline", packer.offsets()) != arena) fail("skyline", "a wrong arena");
  }
}

// The quick path for the order by start gives the same offsets.
void by_start(const Problem& problem, Judge& judge) {
  const Jobs& jobs = problem.jobs;
  const auto order = packing::start_order(jobs);
  std::vector<int32_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (int32_t k = 0; k < jobs.count(); ++k)
    if (sorted[k] != k) fail("order by start", "not an order of all jobs");
  packing::ValleyPacker packer(jobs);
  packer.pack(order, std::numeric_limits<int64_t>::max());
  const auto offset = packing::pack_in_order(jobs, order);
  judge.plan("order by start", offset);
  if (offset != packer.offsets()) fail("order by start", "other offsets than by the order");
}

void max_load_first(const Problem& problem, Random& random, Judge& judge) {
  const int32_t n = problem.jobs.count();
  const int64_t unlimited = std::numeric_limits<int64_t>::max();
  for (int32_t k = 0; k < 3; ++k) {
    const int64_t limit = k == 0 || random.below(2) == 0 ? unlimited : up_to(random, judge.smallest());
    const double noise = random.below(2) == 0 ? 0 : random.unit();
    const auto offset =
        packing::pack_max_load_first(problem.jobs, any_order(random, n), up_to(random, judge.smallest()), limit, noise, random);
    if (offset.empty() && limit == unlimited) fail("max load first", "gave up without a limit");
    if (offset.empty()) ++counts["given up"];
    else if (judge.plan("max load first", offset) > limit) fail("max load first", "above the limit");
  }
  packing::Cancel cancel;
  cancel.cancel();
  const bool any = !packing::ValleyPacker(problem.jobs).candidates().empty();
  if (any && !packing::pack_max_load_first(problem.jobs, any_order(random, n), 0, unlimited, 0, random, cancel).empty())
    fail("max load first", "continued after cancellation");
}

void below(const Problem& problem, Random& random) {
  const Jobs& jobs = problem.jobs;
  const int32_t n = jobs.count();
  const int64_t unlimited = std::numeric_limits<int64_t>::max();
  int64_t total = 1;
  for (int32_t j = 0; j < n; ++j) total += jobs.size[j];
  for (int32_t k = 0; k < 3; ++k) {
    const int64_t ceiling = k == 0 ? unlimited : up_to(random, total);
    const double noise = random.below(2) == 0 ? 0 : random.unit();
    const packing::Cancel cancel;
    const auto offset =
        packing::pack_below(jobs, any_order(random, n), ceiling, up_to(random, total), noise, random, cancel);
    if (offset.size() != jobs.size.size()) fail("below", "not one offset for each job");
    for (int32_t j = 0; j < n; ++j) {
      if (offset[j] < 0) {
        ++counts["left out"];
        if (offset[j] != -1 || ceiling == unlimited || jobs.fixed[j] >= 0) fail("below", "left out without need");
        continue;
      }
      if (jobs.fixed[j] < 0 && offset[j] > ceiling - jobs.size[j]) fail("below", "above the ceiling");
      if (jobs.fixed[j] >= 0 && offset[j] != jobs.fixed[j]) fail("below", "not at its fixed offset");
      if (offset[j] % problem.alignment[j] != 0) fail("below", "an offset that is not aligned");
      for (int32_t i = 0; i < j; ++i)
        if (offset[i] >= 0 && problem.overlap(j, offset[j], i, offset[i])) fail("below", "two jobs overlap");
    }
  }
  packing::Cancel cancel;
  cancel.cancel();
  const bool any = !packing::ValleyPacker(jobs).candidates().empty();
  if (any && !packing::pack_below(jobs, any_order(random, n), unlimited, 0, 0, random, cancel).empty())
    fail("below", "continued after cancellation");
}

double bytes(const Jobs& jobs) {
  double sum = 0, highest = 0;
  for (int32_t j = 0; j < jobs.count(); ++j) {
    sum += static_cast<double>(jobs.size[j]) + static_cast<double>(jobs.mask[j]);
    highest = std::max(highest, static_cast<double>(jobs.fixed[j]));
  }
  return sum + highest;
}

// Repairs a plan of a random order, unless there are too many bytes.
template <class Repair>
void repair_plan(const char* kernel, const Problem& problem, Random& random, Judge& judge) {
  const Jobs& jobs = problem.jobs;
  if (bytes(jobs) > 0x1p61) return;
  packing::ValleyPacker packer(jobs);
  packer.pack(any_order(random, jobs.count()), std::numeric_limits<int64_t>::max());
  Repair repair(jobs, packer.offsets(), random.next());
  for (int32_t k = 0; k < 4; ++k) {
    const int64_t before = repair.arena();
    const bool better = repair.advance(1 + random.below(200000), random.below(2) == 0 ? 0 : before / 2);
    if (better != (repair.arena() < before)) fail(kernel, "reported an improvement wrongly");
    if (repair.arena() > before) fail(kernel, "made the arena larger");
    if (better) ++counts["repaired"];
    if (judge.plan(kernel, repair.offsets()) != repair.arena()) fail(kernel, "a wrong arena");
  }
}

// Peak outward with sizes that are multiples of the coarsest alignment, for goals above and below the load.
void peak_outward(Problem problem, Random& random) {
  Jobs& jobs = problem.jobs;
  const int64_t coarsest = packing::coarsest_alignment(jobs, jobs.count());
  for (int64_t& size : jobs.size) size = (size + coarsest) & ~coarsest;
  if (!problem.single() || bytes(jobs) > 0x1p61) return;
  jobs.fixed.assign(jobs.size.size(), -1);
  const std::vector<int64_t> load = packing::load_of(jobs);
  const int64_t peak = *std::max_element(load.begin(), load.end());
  Judge judge(problem, false);
  if (judge.plan("peak first", packing::pack_peak_first(jobs, packing::Cancel())) < peak) fail("peak first", "below the load");
  for (const int64_t above : {int64_t{0}, up_to(random, 4 * (coarsest + 1)), up_to(random, peak), -up_to(random, peak)}) {
    packing::PeakOutward outward(jobs, peak + above, random.next(), 1 + random.below(6));
    bool found = false;
    for (int32_t k = 0; k < 6 && !found; ++k) {
      const int64_t work = outward.work(), budget = 1 + random.below(30000 + 2000 * jobs.count());
      found = outward.advance(budget);
      if (outward.work() > work + budget + 100 * jobs.count() + 10000) fail("peak outward", "far more work than the budget");
    }
    if (above < 0 ? !outward.given_up() : found && outward.given_up()) fail("peak outward", "given up wrongly, or not given up");
    if (!found) continue;
    ++counts["halved"];
    const int64_t arena = judge.plan("peak outward", outward.offsets());
    const Piece near = outward.near();
    if (near.start > 0 || near.end < jobs.instants - 1) ++counts["with jobs far from the peak"];
    for (int32_t j = 0; j < jobs.count(); ++j)
      if (jobs.pieces[j].start < near.end && jobs.pieces[j].end > near.start && outward.offsets()[j] + jobs.size[j] > peak + above)
        fail("peak outward", "above the goal near the peak");
    if (arena != outward.arena()) fail("peak outward", "a wrong arena");
  }
}

void stacks(const Problem& problem, Random& random, Judge& judge) {
  const int64_t bound = packing::StackBound(problem.jobs, up_to(random, 1 << 16)).bound();
  judge.refuted("stacks", bound - 1);
}

void fits(const Problem& problem, Random& random, Judge& judge) {
  packing::FitPacker packer(problem.jobs);
  using packing::Rule;
  for (const auto rule : {Rule::first_fit, Rule::best_fit, Rule::inner_fit, Rule::first_fit}) {
    packer.begin(any_order(random, problem.jobs.count()), rule);
    if (random.below(4) == 0) packer.advance(1);  // and restart in the middle
    packer.begin(any_order(random, problem.jobs.count()), rule);
    while (!packer.advance(1 + random.below(20))) {}
    if (judge.plan("first or best fit", packer.offsets()) != packer.arena()) fail("first or best fit", "a wrong arena");
  }
}

int64_t any_capacity(Random& random, int64_t smallest) {
  switch (random.below(6)) {
    case 0: return smallest;
    case 1: return smallest - 1;
    case 2: return smallest / 2;
    case 3: return smallest <= kMost / 2 ? 2 * smallest : kMost;
    case 4: return up_to(random, smallest);
    default: return random.below(2) == 0 ? 0 : std::max<int64_t>(smallest - random.below(9), 0);
  }
}

// Runs a complete search with random rules.
template <class Complete>
void decide(const char* kernel, const Problem& problem, uint32_t every, bool takes, Random& random, Judge& judge) {
  const int64_t capacity = any_capacity(random, judge.smallest());
  const uint32_t rules = random.below(3) == 0 ? every : static_cast<uint32_t>(random.next()) & every;
  std::optional<Complete> search;
  try {
    search.emplace(problem.jobs, capacity, random.next(), rules);
  } catch (const std::invalid_argument&) {
    if (takes && judge.smallest() < kMost / 4) fail(kernel, "refused supported jobs");
    ++counts["refused"];
    return;
  }
  if (!takes) fail(kernel, "accepted unsupported jobs");
  for (int32_t k = 0; k < 8 && search->state() == Complete::State::open; ++k) search->advance(1 + random.below(40000));
  if (search->found()) {
    ++counts["found"];
    if (judge.plan(kernel, search->offsets()) > capacity) fail(kernel, "above the capacity");
  } else if (search->infeasible()) {
    judge.refuted(kernel, capacity);
  } else {
    ++counts["open"];
  }
}

void complete(const Problem& problem, Random& random, Judge& judge) {
  decide<packing::SkylineSearch>("skyline search", problem, packing::every_rule, problem.single(), random, judge);
  decide<packing::PairwiseSearch>("pairwise search", problem, packing::every_pair_rule, bytes(problem.jobs) <= 0x1p61, random, judge);
}

void run(Random& random, bool spoil) {
  Problem problem = any_problem(random);
  fixed_conflict(problem);
  Judge judge(problem, spoil);
  valleys(problem, random, judge);
  by_start(problem, judge);
  max_load_first(problem, random, judge);
  below(problem, random);
  fits(problem, random, judge);
  repair_plan<packing::LocalRepair>("repair", problem, random, judge);
  repair_plan<packing::WindowRepair>("window repair", problem, random, judge);
  peak_outward(problem, random);
  if (random.below(4) == 0) peak_outward(long_problem(random), random);
  stacks(problem, random, judge);
  for (int32_t k = 0; k < 6; ++k) complete(problem, random, judge);
}

}  // namespace

int main(int argc, char** argv) {
  return seeded::main_of(argc, argv, run,
                         {"jobs", "clashes", "plans", "given up", "repaired", "found", "refuted", "open",
                          "refused", "left out", "halved", "with jobs far from the peak"});
}
