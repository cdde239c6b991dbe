// Skyline packing: fills the valleys of the skyline of tops over time from below.
//
// The skyline is a ring of runs of equal height. A run lower than both neighbours is a valley. A valley takes
// a job whose lifetime lies within the valley; without such a job the valley rises to its lower neighbour.
// The algorithm follows Burke, Kendall and Whitwell (2004), with fixed times and on a circle: a job of two
// pieces, one at either end of the line, is one arc. Valleys are independent of each other, so they are
// filled in the order of a walk to nearby valleys, without a heap; the offsets equal those of lowest valley
// first.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <tuple>
#include <vector>

#include "packing/fit.hpp"

namespace packing {

// Lifetimes of the jobs in instants or in sections (sections.hpp): half-open, on a circle from 0 to `length`.
struct Times {
  const std::vector<Piece>& pieces;  // indexed by Jobs::first
  int32_t length;
};

inline Times instants_of(const Jobs& jobs) { return {jobs.pieces, jobs.instants - 1}; }

// Lifetime of a job without gaps as one arc on the circle; the arc may end beyond the circle's length.
inline Piece arc_of(const Jobs& jobs, const Times& times, int32_t job) {
  const Piece first = times.pieces[jobs.first[job]];
  if (jobs.single(job)) return first;
  return {times.pieces[jobs.first[job + 1] - 1].start, first.end + times.length};
}

// The arc in instants; start is -1 for a job with gaps.
inline Piece arc(const Jobs& jobs, int32_t job) {
  const int32_t many = jobs.first[job + 1] - jobs.first[job];
  const auto goes_round = [&] {
    return jobs.pieces[jobs.first[job]].start == 0 && jobs.pieces[jobs.first[job + 1] - 1].end == jobs.instants - 1;
  };
  if (many == 1 || (many == 2 && goes_round())) return arc_of(jobs, instants_of(jobs), job);
  return {-1, -1};
}

// Finds, among the jobs not yet taken that lie within a run, the job with the lowest priority number.
class JobTree {
 public:
  JobTree(const Jobs& jobs, const std::vector<int32_t>& candidates)
      : by_start_(candidates), length_(jobs.instants - 1) {
    const auto sooner = [&](int32_t a, int32_t b) { return arc(jobs, a).start < arc(jobs, b).start; };
    if (!std::is_sorted(by_start_.begin(), by_start_.end(), sooner))
      std::stable_sort(by_start_.begin(), by_start_.end(), sooner);
    while (leaves_ < by_start_.size()) leaves_ *= 2;
    nodes_.assign(2 * leaves_, Node{});
    first_from_.reserve(jobs.instants + 1);
    for (const int32_t job : by_start_) {
      const Piece piece = arc(jobs, job);
      first_from_.resize(piece.start + 1, static_cast<int32_t>(ends_.size()));
      ends_.push_back(piece.end);
    }
    first_from_.resize(std::max(jobs.instants, 0) + 1, static_cast<int32_t>(ends_.size()));
  }

  // Puts all candidates back, with new priorities.
  void fill(const std::vector<int32_t>& priority) {
    for (size_t k = 0; k < by_start_.size(); ++k) nodes_[leaves_ + k] = {ends_[k], priority[by_start_[k]]};
    for (size_t k = leaves_; k-- > 1;) nodes_[k] = join(nodes_[2 * k], nodes_[2 * k + 1]);
  }

  // Takes and returns the job for the run [from, to), or -1. `to` may lie beyond the circle's length.
  int32_t take(int32_t from, int32_t to) {
    Best best;
    if (to - from == length_) {
      find(1, 0, leaves_, 0, ends_.size(), none - 1, best);
    } else {
      find(1, 0, leaves_, first_from_[from], first_from_[std::min(to, length_)], to, best);
      if (to > length_) find(1, 0, leaves_, 0, first_from_[to - length_], to - length_, best);
    }
    if (best.priority == none) return -1;
    nodes_[best.leaf] = Node{};
    for (size_t k = best.leaf / 2; k >= 1; k /= 2) nodes_[k] = join(nodes_[2 * k], nodes_[2 * k + 1]);
    return by_start_[best.leaf - leaves_];
  }

 private:
  static constexpr int32_t none = std::numeric_limits<int32_t>::max();
  struct Node {
    int32_t end = none;       // earliest end below this node
    int32_t priority = none;  // lowest priority number below this node
  };
  struct Best {
    int32_t priority = none;
    size_t leaf = 0;
  };
  static Node join(Node a, Node b) { return {std::min(a.end, b.end), std::min(a.priority, b.priority)}; }

  // Searches the leaves [low, high) for jobs that end by `by`.
  void find(size_t node, size_t begin, size_t end, size_t low, size_t high, int32_t by, Best& best) const {
    if (high <= begin || end <= low || nodes_[node].end > by || nodes_[node].priority >= best.priority) return;
    if (node >= leaves_) {
      best = {nodes_[node].priority, node};
      return;
    }
    const size_t middle = (begin + end) / 2;
    const bool right_first = nodes_[2 * node + 1].priority < nodes_[2 * node].priority;
    for (const bool right : {right_first, !right_first}) {
      if (right) find(2 * node + 1, middle, end, low, high, by, best);
      else find(2 * node, begin, middle, low, high, by, best);
    }
  }

  std::vector<int32_t> by_start_, ends_;
  std::vector<int32_t> first_from_;  // by instant: first of by_start_ that starts then or later
  std::vector<Node> nodes_;
  int32_t length_;
  size_t leaves_ = 1;
};

// Cancellation flag, set by another thread.
class Cancel {
 public:
  void cancel() { flag_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return flag_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> flag_{false};
};

struct Valley {
  int32_t from, to;        // instants; `to` may lie beyond the circle's length
  int64_t height;
  int64_t before, after;   // heights of the walls; no wall counts as the largest height
};

class Skyline {
 public:
  // `floor[t]` is the height below which instant t is already taken.
  explicit Skyline(const std::vector<int64_t>& floor) : runs_(filled(floor.size(), Run{})), length_(floor.size()) {
    insert(0, floor[0], -1);
    for (int32_t t = 1; t < length_; ++t) {
      if (runs_[start_].height == floor[t]) continue;
      insert(t, floor[t], start_);
      start_ = t;
    }
    merge(start_);
  }

  // Places `left` jobs, chosen by take(valley), which returns -1 to place no job in a valley; -1 for a valley
  // without walls ends the placement. Returns false when a job ends above `limit` or the cancellation flag is
  // set.
  template <class Take>
  bool fill(const Jobs& jobs, const Times& times, size_t left, int64_t limit, std::vector<int64_t>& offset,
            const Cancel& cancel, Take take) {
    for (int32_t run = start_; left > 0;) {
      const Valley valley = valley_from(run);
      if (cancel.cancelled()) return false;
      const int32_t job = take(valley);
      if (job < 0) {
        if (runs_[run].after == run) return true;
        run = rise(run, std::min(valley.before, valley.after));
        continue;
      }
      offset[job] = jobs.aligned(job, valley.height);
      if (offset[job] + jobs.size[job] > limit) return false;
      run = raise(run, arc_of(jobs, times, job), offset[job] + jobs.size[job]);
      --left;
    }
    return true;
  }

 private:
  static constexpr int64_t no_wall = std::numeric_limits<int64_t>::max();
  struct Run {
    int64_t height = -1;  // -1: no run starts here
    int32_t before = -1, after = -1;
  };

  // Walks down from a run to a valley and returns the valley; `run` becomes the valley's run.
  Valley valley_from(int32_t& run) const {
    for (;;) {
      const Run& here = runs_[run];
      const bool alone = here.after == run;
      const int64_t before = alone ? no_wall : runs_[here.before].height;
      const int64_t after = alone ? no_wall : runs_[here.after].height;
      if (std::min(before, after) >= here.height) return {run, end_of(run), here.height, before, after};
      run = before < here.height ? here.before : here.after;
    }
  }

  // Raises a run to a height and returns the resulting run, which may be merged with neighbours.
  int32_t rise(int32_t run, int64_t height) {
    runs_[run].height = height;
    merge(run);
    const int32_t before = runs_[run].before;
    return merge(before) ? before : run;
  }

  // Raises the part `piece` of a run to `height`. Returns an existing run there, a lower one if possible.
  int32_t raise(int32_t run, Piece piece, int64_t height) {
    const int64_t below = runs_[run].height;
    if (runs_[run].after == run && piece.start != run) {  // a single run all round may as well begin here
      close(run);
      insert(piece.start, below, -1);
      run = piece.start;
    }
    const int32_t end = piece.end % length_;
    if (end != runs_[run].after % length_) insert(end, below, run);
    if (piece.start == run) return rise(run, height);
    insert(piece.start, height, run);
    merge(piece.start);
    return run;
  }

  // End of a run; beyond the circle's length for the run that holds instant 0 or begins after all others.
  int32_t end_of(int32_t run) const {
    const int32_t after = runs_[run].after;
    return after > run ? after : after + length_;
  }

  void insert(int32_t start, int64_t height, int32_t before) {
    const int32_t after = before < 0 ? start : runs_[before].after;
    runs_[start] = {height, before < 0 ? start : before, after};
    runs_[runs_[start].before].after = start;
    runs_[after].before = start;
  }

  // Merges `run` with the next run if both have the same height.
  bool merge(int32_t run) {
    const int32_t next = runs_[run].after;
    if (next == run || runs_[next].height != runs_[run].height) return false;
    runs_[run].after = runs_[next].after;
    runs_[runs_[next].after].before = run;
    close(next);
    return true;
  }

  void close(int32_t run) { runs_[run].height = -1; }

  std::vector<Run> runs_;  // by first instant
  int32_t length_, start_ = 0;
};

// Returns for each instant the highest end of the jobs placed there; jobs without an offset are not counted.
inline std::vector<int64_t> floor_under(const Jobs& jobs, const Times& times, const std::vector<int32_t>& placed,
                                        const std::vector<int64_t>& offset) {
  std::vector<std::tuple<int32_t, int32_t, int64_t>> pieces;  // start, end, height
  for (const int32_t job : placed)
    for (int32_t k = offset[job] < 0 ? jobs.first[job + 1] : jobs.first[job]; k < jobs.first[job + 1]; ++k)
      pieces.emplace_back(times.pieces[k].start, times.pieces[k].end, offset[job] + jobs.size[job]);
  std::sort(pieces.begin(), pieces.end());
  std::vector<int64_t> floor = filled(times.length, int64_t{0});
  if (pieces.empty()) return floor;
  std::priority_queue<std::pair<int64_t, int32_t>> alive;  // height, end
  size_t next = 0;
  for (int32_t t = 0; t < times.length; ++t) {
    for (; next < pieces.size() && std::get<0>(pieces[next]) == t; ++next)
      alive.emplace(std::get<2>(pieces[next]), std::get<1>(pieces[next]));
    while (!alive.empty() && alive.top().second <= t) alive.pop();
    if (!alive.empty()) floor[t] = alive.top().first;
  }
  return floor;
}

// Places all jobs: jobs that are fixed or have gaps by first fit in the given order, and above them the other
// jobs, lowest valley first, prioritized by the given order.
class ValleyPacker {
 public:
  explicit ValleyPacker(const Jobs& jobs)
      : jobs_(jobs), candidates_(of(jobs, true)), others_(of(jobs, false)), offset_(filled(jobs.count(), int64_t{0})) {}

  // Returns the arena, or -1 if the arena would be above `limit` or the flag is set.
  int64_t pack(const std::vector<int32_t>& order, int64_t limit, const Cancel& cancel = Cancel()) {
    prioritize(order);
    if (!tree_) tree_.emplace(jobs_, candidates_);
    tree_->fill(priority_);
    const auto take = [&](const Valley& valley) { return tree_->take(valley.from, valley.to); };
    return pack(order, limit, cancel, take);
  }

  template <class Take>
  int64_t pack(const std::vector<int32_t>& order, int64_t limit, const Cancel& cancel, Take take) {
    return pack(order, limit, cancel, take, instants_of(jobs_));
  }

  // The valleys passed to take(valley) use these times.
  template <class Take>
  int64_t pack(const std::vector<int32_t>& order, int64_t limit, const Cancel& cancel, Take take, const Times& times) {
    if (!place_others(order, cancel)) return -1;
    Skyline skyline(floor_under(jobs_, times, others_, offset_));
    if (!skyline.fill(jobs_, times, candidates_.size(), limit, offset_, cancel, take)) return -1;
    const int64_t arena = arena_of(jobs_, offset_);
    return arena <= limit ? arena : -1;
  }

  const std::vector<int64_t>& offsets() const& { return offset_; }
  std::vector<int64_t> offsets() && { return std::move(offset_); }
  const std::vector<int32_t>& candidates() const { return candidates_; }
  std::vector<int32_t> candidates_in(const std::vector<int32_t>& order) const {
    std::vector<int32_t> result;
    reserve(result, candidates_.size());
    std::copy_if(order.begin(), order.end(), std::back_inserter(result),
                 [&](int32_t job) { return is_candidate(jobs_, job); });
    return result;
  }

 private:
  static bool is_candidate(const Jobs& jobs, int32_t job) { return jobs.fixed[job] < 0 && arc(jobs, job).start >= 0; }
  static std::vector<int32_t> of(const Jobs& jobs, bool candidate) {
    std::vector<int32_t> result;
    if (candidate) reserve(result, jobs.count());
    for (int32_t j = 0; j < jobs.count(); ++j)
      if (is_candidate(jobs, j) == candidate) result.push_back(j);
    return result;
  }

  void prioritize(const std::vector<int32_t>& order) {
    priority_.resize(jobs_.count());
    for (int32_t k = 0; k < jobs_.count(); ++k) priority_[order[k]] = k;
  }

  // Returns whether the placement was completed. In order of starts, jobs that have ended can no longer
  // conflict.
  bool place_others(const std::vector<int32_t>& order, const Cancel& cancel) {
    if (others_.empty()) return true;
    prioritize(order);
    std::sort(others_.begin(), others_.end(), [&](int32_t a, int32_t b) {
      return std::pair(jobs_.fixed[a] < 0, priority_[a]) < std::pair(jobs_.fixed[b] < 0, priority_[b]);
    });
    const auto free = std::find_if(others_.begin(), others_.end(), [&](int32_t job) { return jobs_.fixed[job] < 0; });
    for (auto it = others_.begin(); it != free; ++it) offset_[*it] = jobs_.fixed[*it];
    if (free == others_.end()) return true;
    const auto start = [&](int32_t job) { return jobs_.pieces[jobs_.first[job]].start; };
    const auto end = [&](int32_t job) { return jobs_.pieces[jobs_.first[job + 1] - 1].end; };
    const bool by_start = std::is_sorted(free, others_.end(), [&](int32_t a, int32_t b) { return start(a) < start(b); });
    Placed placed(jobs_);
    for (auto it = others_.begin(); it != free; ++it) placed.insert(*it, offset_[*it]);
    int64_t work = 0;
    for (auto it = free; it != others_.end(); ++it) {
      if (cancel.cancelled()) return false;
      offset_[*it] = placed.find(*it, Rule::first_fit, work);
      placed.insert(*it, offset_[*it]);
      if (by_start && (it - free) % soon_forgotten == 0)
        placed.remove_if([&](int32_t job) { return end(job) <= start(*it); });
    }
    return true;
  }

  static constexpr std::ptrdiff_t soon_forgotten = 64;  // jobs

  const Jobs& jobs_;
  const std::vector<int32_t> candidates_;  // jobs of one arc without a fixed offset
  std::vector<int32_t> others_;
  std::optional<JobTree> tree_;
  std::vector<int64_t> offset_;
  std::vector<int32_t> priority_;  // place in the order
};

}  // namespace packing
