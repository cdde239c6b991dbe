// Complete pairwise search: decides for each two jobs that meet in time which is below. Takes all jobs,
// including those with gaps or across the cut of a circle: only the relation "meets" matters.
//
// Each job has a lowest and a highest offset. Two jobs that meet are an open pair until one of them has no
// room below the other job; then that job is above, and the offset ranges of both shrink. Consequences are
// propagated to a fixpoint, also in *sets* (cliques) of jobs of which any two meet, so that the jobs of a set
// are stacked. Then the search branches: one job of an open pair is put below the other, and after a failure
// above. When no open pair overlaps at the lowest offsets, these offsets are a plan. The disjunctive
// (job-shop) problem has been solved so since Carlier and Pinson (1989); addresses take the place of time,
// and sets the place of machines.
//
// The search branches on the pair with most failures and least room (Boussemart, Hemery, Lecoutre and Sais,
// 2004). A try ends after a number of failures; the failure weights stay. Each try is half as long again as
// the one before, so the search ends.
//
// Completeness: among the plans with the same job below in each pair, the *lowest* plan is the one in which
// each job stands on the ground, on another job that meets it, or at an offset forced by alignment or fixed
// ranges. The search removes an offset of a job only if the job has this offset in no lowest plan that agrees
// with the decisions made.
#pragma once

#include <limits>
#include <stdexcept>

#include "packing/cliques.hpp"
#include "packing/random.hpp"

namespace packing {

class PairwiseSearch {
 public:
  enum class State { open, found, infeasible };
  static constexpr int64_t most = int64_t{1} << 61;  // largest sum of bytes anywhere
  static constexpr int32_t most_jobs = 1024;

  // Throws std::invalid_argument for more than 1,024 jobs, or more than 2^61 bytes of them, their alignments and the
  // highest fixed offset.
  PairwiseSearch(const Jobs& jobs, int64_t capacity, uint64_t seed);

  State state() const { return state_; }
  bool found() const { return state_ == State::found; }
  bool infeasible() const { return state_ == State::infeasible; }
  int64_t nodes() const { return nodes_; }  // number of decisions
  int64_t work() const { return work_a_step * steps_; }
  const std::vector<int64_t>& offsets() const { return low_; }

  // Goes on until a plan or a proof is found or about `budget` more work units are spent.
  State advance(int64_t budget) {
    const int64_t until = work() + budget;
    while (state_ == State::open && work() < until) step();
    return state_;
  }

 private:
  static constexpr int64_t work_a_step = 4;           // cost of a pair in work units of first fit; measured
  static constexpr int64_t first_try = 100;          // failures in the first try
  static constexpr double less_room_first = 0.05;              // probability of trying first the order with less room
  static constexpr int64_t most_in_sets = 1 << 12;   // total number of jobs in all sets

  struct Pair {
    int32_t a, b;
    double weight;  // 1 to 2, random, plus the number of failures
  };
  struct Neighbour {
    int32_t job, pair;
  };
  struct Set {
    std::vector<int32_t> jobs;  // any two meet; sorted by descending lowest offset, as of the last list_members()
    int64_t mask;               // all offsets of these jobs are multiples of mask + 1
    bool queued;
  };
  struct Member {       // a job of a set
    int32_t job;
    int64_t low, end;   // lowest offset; highest offset plus padded size
    int64_t padded;     // padded size
  };
  struct Change {
    int32_t what;  // job: the lowest offset; n + job: the highest; 2 n + place(a, b): a was put below b
    int64_t old;
  };
  struct Frame {  // a decision
    int32_t lower, upper;
    size_t mark;  // trail length before the decision
  };

  int32_t place(int32_t a, int32_t b) const { return a * n_ + b; }
  bool is_below(int32_t a, int32_t b) const { return below_[place(a, b)]; }
  int64_t room(int32_t lower, int32_t upper) const { return high_[upper] - low_[lower] - size_[lower]; }

  void measure(const Jobs& jobs, int64_t capacity);
  void pair_up(const OverlapGraph& meets);
  void find_sets(const OverlapGraph& meets);
  bool begin();

  void step();
  void decide(const Pair& pair);
  bool back();
  void restart();
  void undo(size_t mark);

  bool up(int32_t job, int64_t& at) const;
  bool down(int32_t job, int64_t& at) const;
  bool raise(int32_t job, int64_t at);
  bool sink(int32_t job, int64_t at);
  bool put_below(int32_t a, int32_t b);
  void link(int32_t a, int32_t b);
  void queue(int32_t job);
  void clear_queues();
  bool propagate();
  bool revise(Pair& pair);
  void list_members(Set& set);
  bool sums(Set& set);

  Random random_;
  State state_ = State::open;
  int32_t n_ = 0;
  int64_t capacity_ = 0;
  std::vector<int64_t> size_, mask_, fixed_;       // per job; mask: offsets are multiples of mask + 1
  std::vector<int64_t> low_, high_;                // per job: lowest and highest offset
  std::vector<char> below_;                        // at place(a, b): a is below b, directly or transitively
  std::vector<Pair> pairs_;
  std::vector<int32_t> open_;                      // pairs still open when the try began
  std::vector<std::vector<Neighbour>> neighbours_; // per job: the jobs that meet it
  std::vector<Set> sets_;
  std::vector<std::vector<int32_t>> sets_of_;      // per job: indices of its sets
  std::vector<Change> trail_;
  std::vector<Frame> frames_;
  std::vector<int32_t> jobs_queue_, sets_queue_;   // jobs and sets that have changed
  std::vector<char> queued_;                       // per job: in jobs_queue_
  std::vector<int32_t> above_;                     // scratch of link()
  std::vector<Member> members_, by_end_;           // scratch: the members of the current set
  int64_t nodes_ = 0, steps_ = 0;
  int64_t failed_ = 0, limit_ = first_try;         // of this try
};

inline PairwiseSearch::PairwiseSearch(const Jobs& jobs, int64_t capacity, uint64_t seed) : random_(seed) {
  measure(jobs, capacity);
  const OverlapGraph meets(jobs);
  pair_up(meets);
  find_sets(meets);
  if (!begin()) state_ = State::infeasible;
  trail_.clear();
}

inline void PairwiseSearch::measure(const Jobs& jobs, int64_t capacity) {
  n_ = jobs.count();
  if (n_ > most_jobs) throw std::invalid_argument("too many jobs");
  size_ = jobs.size, mask_ = jobs.mask, fixed_ = jobs.fixed;
  int64_t left = most;
  for (const int64_t offset : fixed_) left = std::min(left, most - offset);
  for (int32_t j = 0; j < n_; ++j) {
    for (const int64_t bytes : {size_[j], mask_[j]})
      if ((left -= std::min(bytes, most)) < 0) throw std::invalid_argument("too many bytes");
    if (fixed_[j] >= 0) mask_[j] = fixed_[j] > 0 ? (fixed_[j] & -fixed_[j]) - 1 : most - 1;
  }
  capacity_ = std::clamp<int64_t>(capacity, 0, most);
  steps_ += 64 * n_ + static_cast<int64_t>(n_) * n_;
}

inline void PairwiseSearch::pair_up(const OverlapGraph& meets) {
  below_.assign(static_cast<size_t>(n_) * n_, 0);
  neighbours_.resize(n_);
  for (int32_t b = 0; b < n_; ++b)
    for (int32_t a = 0; a < b; ++a) {
      if (!meets(a, b)) continue;
      const auto pair = static_cast<int32_t>(pairs_.size());
      neighbours_[a].push_back({b, pair}), neighbours_[b].push_back({a, pair});
      open_.push_back(pair);
      pairs_.push_back({a, b, 1 + random_.unit()});
    }
}

// Only sets of three or more jobs; sets of two are pairs.
inline void PairwiseSearch::find_sets(const OverlapGraph& meets) {
  sets_of_.resize(n_);
  int64_t left = most_in_sets;
  const auto take = [&](const std::vector<int32_t>& jobs) {
    const auto count = static_cast<int64_t>(jobs.size());
    if (count < 3 || left < count) return;
    left -= count;
    int64_t mask = most - 1;
    for (const int32_t j : jobs) mask = std::min(mask, mask_[j]), sets_of_[j].push_back(static_cast<int32_t>(sets_.size()));
    sets_.push_back({jobs, mask < most / count ? mask : 0, false});
  };
  int64_t steps = most_in_sets * 256;
  meets.largest(take, [&] { return (steps -= n_) >= 0 && left > 0; });
  steps_ += (most_in_sets * 256 - steps) / 8;
}

// Propagates everything that holds before any decision.
inline bool PairwiseSearch::begin() {
  low_.assign(n_, 0), high_.assign(n_, 0), queued_.assign(n_, 0);
  for (int32_t j = 0; j < n_; ++j) {
    high_[j] = capacity_ - size_[j];
    if (!up(j, low_[j]) || !down(j, high_[j]) || low_[j] > high_[j]) return false;
    queue(j);
  }
  return propagate();
}

// up() and down() move an offset to the next one that the job can have; false if there is none.
inline bool PairwiseSearch::up(int32_t job, int64_t& at) const {
  if (fixed_[job] >= 0) {
    const bool can = at <= fixed_[job];
    at = fixed_[job];
    return can;
  }
  at = (at + mask_[job]) & ~mask_[job];
  return true;
}

inline bool PairwiseSearch::down(int32_t job, int64_t& at) const {
  if (fixed_[job] >= 0) {
    const bool can = at >= fixed_[job];
    at = fixed_[job];
    return can;
  }
  if (at < 0) return false;
  at &= ~mask_[job];
  return true;
}

inline bool PairwiseSearch::raise(int32_t job, int64_t at) {
  if (at <= low_[job]) return true;
  if (at > high_[job] || !up(job, at) || at > high_[job]) return false;
  trail_.push_back({job, low_[job]});
  low_[job] = at;
  queue(job);
  return true;
}

inline bool PairwiseSearch::sink(int32_t job, int64_t at) {
  if (at >= high_[job]) return true;
  if (at < low_[job] || !down(job, at) || at < low_[job]) return false;
  trail_.push_back({n_ + job, high_[job]});
  high_[job] = at;
  queue(job);
  return true;
}

// For two jobs that meet.
inline bool PairwiseSearch::put_below(int32_t a, int32_t b) {
  if (is_below(b, a)) return false;
  if (!is_below(a, b)) link(a, b);
  return raise(b, low_[a] + size_[a]) && sink(a, high_[b] - size_[a]);
}

// Transitive closure: every job below a is below every job above b. This excludes cycles, in which offsets
// would rise byte by byte.
inline void PairwiseSearch::link(int32_t a, int32_t b) {
  above_.clear();
  for (int32_t y = 0; y < n_; ++y)
    if (y == b || is_below(b, y)) above_.push_back(y);
  for (int32_t x = 0; x < n_; ++x) {
    if (x != a && !is_below(x, a)) continue;
    for (const int32_t y : above_) {
      if (is_below(x, y)) continue;
      below_[place(x, y)] = 1;
      trail_.push_back({2 * n_ + place(x, y), 0});
      queue(x), queue(y);
    }
  }
  steps_ += n_ / 4;
}

inline void PairwiseSearch::queue(int32_t job) {
  if (!queued_[job]) queued_[job] = 1, jobs_queue_.push_back(job);
  for (const int32_t s : sets_of_[job])
    if (!sets_[s].queued) sets_[s].queued = true, sets_queue_.push_back(s);
}

inline void PairwiseSearch::clear_queues() {
  for (const int32_t job : jobs_queue_) queued_[job] = 0;
  for (const int32_t s : sets_queue_) sets_[s].queued = false;
  jobs_queue_.clear(), sets_queue_.clear();
}

// Propagates all changes to a fixpoint: pairs first, then sets. Returns false on a contradiction.
inline bool PairwiseSearch::propagate() {
  while (!jobs_queue_.empty() || !sets_queue_.empty()) {
    if (!jobs_queue_.empty()) {
      const int32_t job = jobs_queue_.back();
      jobs_queue_.pop_back();
      queued_[job] = 0;
      for (const Neighbour& with : neighbours_[job])
        if (!revise(pairs_[with.pair])) return false;
      continue;
    }
    Set& set = sets_[sets_queue_.back()];
    sets_queue_.pop_back();
    set.queued = false;
    if (!sums(set)) return false;
  }
  return true;
}

inline bool PairwiseSearch::revise(Pair& pair) {
  const int32_t a = pair.a, b = pair.b;
  ++steps_;
  bool can = true;
  if (is_below(a, b)) can = put_below(a, b);
  else if (is_below(b, a)) can = put_below(b, a);
  else if (room(a, b) < 0) can = room(b, a) >= 0 && put_below(b, a);
  else if (room(b, a) < 0) can = put_below(a, b);
  if (!can) pair.weight += 1;
  return can;
}

inline void PairwiseSearch::list_members(Set& set) {
  auto& jobs = set.jobs;  // still nearly sorted
  for (size_t k = 1; k < jobs.size(); ++k)
    for (size_t i = k; i > 0 && low_[jobs[i]] > low_[jobs[i - 1]]; --i) std::swap(jobs[i], jobs[i - 1]);
  members_.clear();
  for (const int32_t j : jobs) {
    const int64_t padded = (size_[j] + set.mask) & ~set.mask;
    members_.push_back({j, low_[j], high_[j] + padded, padded});
  }
  steps_ += 4 * static_cast<int64_t>(jobs.size());
}

// Jobs below a job that begin no lower than one of these jobs are stacked between that one and the job; and
// upside down.
inline bool PairwiseSearch::sums(Set& set) {
  list_members(set);
  by_end_ = members_;
  std::sort(by_end_.begin(), by_end_.end(),
            [](const Member& x, const Member& y) { return x.end < y.end || (x.end == y.end && x.job < y.job); });
  steps_ += static_cast<int64_t>(members_.size() * members_.size());
  for (const Member& member : members_) {
    int64_t sum = 0, low = 0, end = member.end;
    for (const Member& x : members_)
      if (is_below(x.job, member.job)) sum += x.padded, low = std::max(low, x.low + sum);
    sum = 0;
    for (const Member& x : by_end_)
      if (is_below(member.job, x.job)) sum += x.padded, end = std::min(end, x.end - sum);
    if (!raise(member.job, low) || !sink(member.job, end - member.padded)) return false;
  }
  return true;
}

inline void PairwiseSearch::step() {
  if (failed_ >= limit_) restart();
  const Pair* best = nullptr;
  double highest = -1;
  bool overlap = false;
  for (const int32_t p : open_) {
    const Pair& pair = pairs_[p];
    const int32_t a = pair.a, b = pair.b;
    if (is_below(a, b) || is_below(b, a)) continue;
    overlap = overlap || (low_[a] < low_[b] + size_[b] && low_[b] < low_[a] + size_[a]);
    const double least = static_cast<double>(std::min(room(a, b), room(b, a))) / static_cast<double>(capacity_);
    const double score = pair.weight / (1 + 20 * least);
    if (score > highest) highest = score, best = &pair;
  }
  steps_ += static_cast<int64_t>(open_.size());
  if (overlap) decide(*best);
  else state_ = State::found;
}

// Tries the order with more room first, mostly.
inline void PairwiseSearch::decide(const Pair& pair) {
  int32_t lower = pair.a, upper = pair.b;
  if ((room(lower, upper) < room(upper, lower)) != (random_.unit() < less_room_first)) std::swap(lower, upper);
  ++nodes_;
  frames_.push_back({lower, upper, trail_.size()});
  if (!(put_below(lower, upper) && propagate()) && !back()) state_ = State::infeasible;
}

// Undoes the latest decision and enforces the opposite order; if that fails, too, goes on with the decision
// before.
inline bool PairwiseSearch::back() {
  while (!frames_.empty()) {
    ++failed_;
    clear_queues();
    const Frame frame = frames_.back();
    frames_.pop_back();
    undo(frame.mark);
    if (put_below(frame.upper, frame.lower) && propagate()) return true;
  }
  return false;
}

inline void PairwiseSearch::undo(size_t mark) {
  for (; trail_.size() > mark; trail_.pop_back()) {
    const Change& change = trail_.back();
    if (change.what < n_) low_[change.what] = change.old;
    else if (change.what < 2 * n_) high_[change.what - n_] = change.old;
    else below_[change.what - 2 * n_] = 0;
  }
}

// Keeps everything derived before the first decision.
inline void PairwiseSearch::restart() {
  if (!frames_.empty()) undo(frames_.front().mark);
  frames_.clear(), trail_.clear();
  const auto closed = [&](int32_t p) { return is_below(pairs_[p].a, pairs_[p].b) || is_below(pairs_[p].b, pairs_[p].a); };
  open_.erase(std::remove_if(open_.begin(), open_.end(), closed), open_.end());
  failed_ = 0;
  limit_ += limit_ / 2;
}

}  // namespace packing
