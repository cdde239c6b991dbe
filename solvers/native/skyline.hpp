// Lowest valley first: fills the skyline of tops over time from below.
//
// The skyline is a list of runs of equal height. The lowest run takes the first job, in the caller's order, whose
// lifetime lies within it, else it rises to its lower neighbour. After Burke, Kendall and Whitwell (2004), with fixed
// times. Near linear: a heap of runs, a list of runs, and one tree over the jobs by start.
#pragma once

#include <limits>
#include <queue>
#include <tuple>

#include "fit.hpp"

namespace packing {

// Of the jobs not yet taken that start within [from, to) and end by `to`, the one with the lowest priority number.
class JobTree {
 public:
  JobTree(const Jobs& jobs, const std::vector<int32_t>& candidates, const std::vector<int32_t>& priority)
      : by_start_(candidates) {
    std::sort(by_start_.begin(), by_start_.end(), [&](int32_t a, int32_t b) {
      return std::tuple(piece(jobs, a).start, priority[a]) < std::tuple(piece(jobs, b).start, priority[b]);
    });
    while (leaves_ < by_start_.size()) leaves_ *= 2;
    nodes_.assign(2 * leaves_, Node{});
    for (size_t k = 0; k < by_start_.size(); ++k) {
      starts_.push_back(piece(jobs, by_start_[k]).start);
      nodes_[leaves_ + k] = {piece(jobs, by_start_[k]).end, priority[by_start_[k]]};
    }
    for (size_t k = leaves_; k-- > 1;) nodes_[k] = join(nodes_[2 * k], nodes_[2 * k + 1]);
  }

  // Takes and returns that job, or -1.
  int32_t take(int32_t from, int32_t to) {
    const size_t low = std::lower_bound(starts_.begin(), starts_.end(), from) - starts_.begin();
    const size_t high = std::lower_bound(starts_.begin() + low, starts_.end(), to) - starts_.begin();
    size_t leaf = 0;
    int32_t best = none;
    find(1, 0, leaves_, low, high, to, best, leaf);
    if (best == none) return -1;
    nodes_[leaf] = Node{};
    for (size_t k = leaf / 2; k >= 1; k /= 2) nodes_[k] = join(nodes_[2 * k], nodes_[2 * k + 1]);
    return by_start_[leaf - leaves_];
  }

 private:
  static constexpr int32_t none = std::numeric_limits<int32_t>::max();
  struct Node {
    int32_t end = none;       // earliest end below this node
    int32_t priority = none;  // lowest priority number below this node
  };
  static const Piece& piece(const Jobs& jobs, int32_t job) { return jobs.pieces[jobs.first[job]]; }
  static Node join(Node a, Node b) { return {std::min(a.end, b.end), std::min(a.priority, b.priority)}; }

  void find(size_t node, size_t begin, size_t end, size_t low, size_t high, int32_t by, int32_t& best, size_t& leaf) {
    if (high <= begin || end <= low || nodes_[node].end > by || nodes_[node].priority >= best) return;
    if (node >= leaves_) {
      best = nodes_[node].priority;
      leaf = node;
      return;
    }
    const size_t middle = (begin + end) / 2;
    const bool right_first = nodes_[2 * node + 1].priority < nodes_[2 * node].priority;
    for (const bool right : {right_first, !right_first}) {
      if (right) find(2 * node + 1, middle, end, low, high, by, best, leaf);
      else find(2 * node, begin, middle, low, high, by, best, leaf);
    }
  }

  std::vector<int32_t> by_start_, starts_;
  std::vector<Node> nodes_;
  size_t leaves_ = 1;
};

class Skyline {
 public:
  // `floor[t]` is the height below which instant t is taken already.
  explicit Skyline(const std::vector<int64_t>& floor) {
    const auto n = static_cast<int32_t>(floor.size());
    runs_.resize(n);
    int32_t last = -1;
    for (int32_t t = 0; t < n; ++t) {
      if (last >= 0 && runs_[last].height == floor[t]) continue;
      insert(t, floor[t], last);
      last = t;
    }
    limit_ = n;
  }

  // Places every candidate (single-piece jobs without a fixed offset) by ascending `priority` where there is a choice.
  void fill(const Jobs& jobs, const std::vector<int32_t>& candidates, const std::vector<int32_t>& priority,
            std::vector<int64_t>& offset) {
    JobTree tree(jobs, candidates, priority);
    for (size_t left = candidates.size(); left > 0;) {
      const int32_t run = lowest();
      const int32_t job = tree.take(run, end_of(run));
      if (job < 0) {
        rise(run);
        continue;
      }
      const Piece piece = jobs.pieces[jobs.first[job]];
      offset[job] = jobs.aligned(job, runs_[run].height);
      split(run, piece, offset[job] + jobs.size[job]);
      --left;
    }
  }

 private:
  struct Run {
    int64_t height = -1;  // -1: no run starts here
    int32_t before = -1, after = -1;
  };
  using Entry = std::pair<int64_t, int32_t>;  // height, start; stale when the run has changed since

  int32_t end_of(int32_t run) const { return runs_[run].after < 0 ? limit_ : runs_[run].after; }

  void insert(int32_t start, int64_t height, int32_t before) {
    Run& run = runs_[start];
    run.height = height;
    run.before = before;
    run.after = before < 0 ? -1 : runs_[before].after;
    if (before >= 0) runs_[before].after = start;
    if (run.after >= 0) runs_[run.after].before = start;
    heap_.emplace(height, start);
  }

  void set(int32_t run, int64_t height) {
    runs_[run].height = height;
    heap_.emplace(height, run);
    merge(run);
    if (runs_[run].before >= 0) merge(runs_[run].before);
  }

  // Joins `run` with the next one when they are equally high.
  void merge(int32_t run) {
    const int32_t next = runs_[run].after;
    if (next < 0 || runs_[next].height != runs_[run].height) return;
    runs_[run].after = runs_[next].after;
    if (runs_[next].after >= 0) runs_[runs_[next].after].before = run;
    runs_[next].height = -1;
  }

  int32_t lowest() {
    while (runs_[heap_.top().second].height != heap_.top().first) heap_.pop();
    return heap_.top().second;
  }

  void rise(int32_t run) {
    const Run& r = runs_[run];
    int64_t height = std::numeric_limits<int64_t>::max();
    if (r.before >= 0) height = std::min(height, runs_[r.before].height);
    if (r.after >= 0) height = std::min(height, runs_[r.after].height);
    set(run, height);
  }

  void split(int32_t run, Piece piece, int64_t height) {
    const int64_t below = runs_[run].height;
    if (piece.end < end_of(run)) insert(piece.end, below, run);
    if (piece.start > run) {
      insert(piece.start, height, run);
      merge(piece.start);
    } else {
      set(run, height);
    }
  }

  std::vector<Run> runs_;  // by first instant
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap_;
  int32_t limit_ = 0;
};

// For each instant, the highest end of the jobs placed there.
inline std::vector<int64_t> floor_under(const Jobs& jobs, const std::vector<int32_t>& placed,
                                        const std::vector<int64_t>& offset) {
  std::vector<std::tuple<int32_t, int32_t, int64_t>> pieces;  // start, end, height
  for (const int32_t job : placed)
    for (int32_t k = jobs.first[job]; k < jobs.first[job + 1]; ++k)
      pieces.emplace_back(jobs.pieces[k].start, jobs.pieces[k].end, offset[job] + jobs.size[job]);
  std::sort(pieces.begin(), pieces.end());
  std::vector<int64_t> floor(jobs.instants, 0);
  std::priority_queue<std::pair<int64_t, int32_t>> alive;  // height, end
  size_t next = 0;
  for (int32_t t = 0; t < jobs.instants; ++t) {
    for (; next < pieces.size() && std::get<0>(pieces[next]) == t; ++next)
      alive.emplace(std::get<2>(pieces[next]), std::get<1>(pieces[next]));
    while (!alive.empty() && alive.top().second <= t) alive.pop();
    if (!alive.empty()) floor[t] = alive.top().first;
  }
  return floor;
}

// Offsets for all jobs: those that are fixed or have several pieces by first fit in `order`, and on top of these the
// others, lowest valley first.
inline std::vector<int64_t> skyline(const Jobs& jobs, const std::vector<int32_t>& order) {
  std::vector<int64_t> offset(jobs.count(), 0);
  std::vector<int32_t> before, candidates, priority(jobs.count());
  for (int32_t k = 0; k < jobs.count(); ++k) {
    priority[order[k]] = k;
    (jobs.fixed[order[k]] < 0 && jobs.single(order[k]) ? candidates : before).push_back(order[k]);
  }
  std::stable_partition(before.begin(), before.end(), [&](int32_t j) { return jobs.fixed[j] >= 0; });
  Placed placed(jobs);
  int64_t looks = 0;
  for (const int32_t job : before) {
    offset[job] = jobs.fixed[job] >= 0 ? jobs.fixed[job] : placed.find(job, Rule::first_fit, looks);
    placed.insert(job, offset[job]);
  }
  if (!candidates.empty()) Skyline(floor_under(jobs, before, offset)).fill(jobs, candidates, priority, offset);
  return offset;
}

}  // namespace packing
