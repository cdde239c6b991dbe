// Repacks a time window by maximum load first, and backtracks when so much is lost that the arena would be
// too large.
//
// Besides the jobs within the window, other jobs reach into the window from its ends and stay in place. They
// hang above the skyline until the skyline has risen to them: the room below them can take jobs. Lost bytes
// count as load (see max_load_first.hpp), so a try fails as soon as the load exceeds the goal at any instant, or
// would exceed it because the jobs left for a valley cannot fill the valley up to its wall. A job that leaves
// such a slit is rejected and another job tried, a few times. Then a few steps, seldom many, are undone and
// others are tried at random. The instants of highest load come first, so that the undone steps are related
// to the failure. Failure proves nothing.
#pragma once

#include <numeric>

#include "packing/max_load_first.hpp"

namespace packing {

// A time window: jobs of one piece each, in instants [0, width). First the jobs to place, `free` of them,
// then the jobs that stay, each touching an end of the window.
struct Window {
  explicit Window(Piece part) : from(part.start), width(part.end - part.start) { jobs.instants = width + 2; }

  // Adds the part of another problem's piece that lies within the window.
  void add(const Jobs& whole, int32_t job, Piece piece, int64_t fixed) {
    jobs.add({std::max(piece.start - from, 0), std::min(piece.end - from, width)}, whole.size[job], whole.mask[job], fixed);
  }

  Jobs jobs;  // one more instant closes the ring
  int32_t free = 0, from = 0, width = 0;
};

// The jobs alive in a part of the time, as a `Window`.
struct WindowExcerpt {
  // `whole` must have one piece per job. `fixed` returns the offset of a job that stays, or -1 for a job to
  // place. All sizes must be multiples of the coarsest alignment, so that all offsets are, too.
  template <class Fixed>
  WindowExcerpt(const Jobs& jobs, Piece part, Fixed fixed) : window(part) {
    for (const bool staying : {false, true}) {
      for (int32_t j = 0; j < jobs.count(); ++j) {
        if (jobs.pieces[j].end <= part.start || jobs.pieces[j].start >= part.end) continue;
        const int64_t offset = fixed(j);
        if ((offset >= 0) != staying) continue;
        window.add(jobs, j, jobs.pieces[j], offset);
        whose.push_back(j);
      }
      if (!staying) window.free = window.jobs.count();
    }
    std::fill(window.jobs.mask.begin(), window.jobs.mask.end(), 0);
  }

  Window window;
  std::vector<int32_t> whose;  // jobs of the window, by their numbers in `whole`
};

// The jobs that stay at one end of a window: each touches this end, so they hang one above the other.
class WindowEdge {
 public:
  WindowEdge(const Window& window, bool left) : left_(left) {
    for (int32_t j = window.free; j < window.jobs.count(); ++j) {
      const Piece piece = window.jobs.pieces[j];
      if ((piece.start == 0) == left) jobs_.push_back({window.jobs.fixed[j], left ? piece.end : -piece.start, j});
    }
    std::sort(jobs_.begin(), jobs_.end(), [](const Job& a, const Job& b) { return a.base < b.base; });
    while (leaves_ < jobs_.size()) leaves_ *= 2;
    reach_.assign(2 * leaves_, none);
    for (size_t k = 0; k < jobs_.size(); ++k) reach_[leaves_ + k] = jobs_[k].reach;
    for (size_t k = leaves_; k-- > 1;) reach_[k] = std::max(reach_[2 * k], reach_[2 * k + 1]);
  }

  // Returns the lowest base over any of [from, to) that lies above everything hanging lower; a job placed
  // there must end no higher. At the left end, a job that hangs over a later instant hangs over `from` too.
  int64_t above(int32_t from, int32_t to) const {
    const size_t k = next_reaching_beyond(left_ ? from : -to);
    return k < jobs_.size() ? jobs_[k].base : std::numeric_limits<int64_t>::max();
  }

  // The job that the skyline has reached, or -1.
  int32_t reached(const Valley& valley, int32_t width) const {
    const bool at_end = left_ ? valley.from == 0 : valley.to == width;
    return at_end && next_ < jobs_.size() && jobs_[next_].base == valley.height ? jobs_[next_].job : -1;
  }
  void pass() { ++next_; }
  void pass_back() { --next_; }

 private:
  static constexpr int32_t none = std::numeric_limits<int32_t>::min();
  struct Job {
    int64_t base;
    // how far the job reaches: its end at the left end of the window; its negated start at the right end
    int32_t reach;
    int32_t job;
  };

  // The lowest job that still hangs and reaches beyond an instant, or one after the last job.
  size_t next_reaching_beyond(int32_t instant) const {
    size_t k = leaves_ + next_;
    if (next_ >= jobs_.size()) return next_;
    while (reach_[k] <= instant) {
      while (k % 2 == 1) k /= 2;  // the last of the jobs above
      if (k == 0) return jobs_.size();
      ++k;
    }
    while (k < leaves_) k = 2 * k + (reach_[2 * k] <= instant);
    return k - leaves_;
  }

  bool left_;
  std::vector<Job> jobs_;       // lowest first
  std::vector<int32_t> reach_;  // a tree of maxima over the jobs' reaches
  size_t leaves_ = 1, next_ = 0;  // next_: the lowest job that still hangs
};

// The search state of one time window.
class WindowRefill {
 public:
  // `goal` is an arena in bytes; all jobs that stay must end within the goal.
  WindowRefill(const Window& window, int64_t goal, uint64_t seed)
      : jobs_(window.jobs), goal_(goal), width_(window.width), coarsest_(coarsest_alignment(jobs_, window.free)),
        random_(seed), load_(load_of(jobs_)), index_(jobs_, jobs_to_place(window)), left_end_(window, true),
        right_end_(window, false), skyline_(ground(window)), run_(skyline_.start()), offset_(jobs_.count(), -1) {
    list_summits();
  }

  // Continues until all jobs are placed or about `budget` work units are spent; returns whether all are placed
  // within the goal.
  bool advance(int64_t budget) {
    for (const int64_t until = work_ + budget; !found() && work_ < until;) {
      step();
      if (load_.most() <= goal_ && !failed_) continue;
      failed_ = false;
      ++failures_;
      deepest_ = std::max(deepest_, steps_.size());
      const auto back = static_cast<size_t>(1 + usual_undo / (random_.unit() + 1e-3));
      for (size_t k = std::min(back, steps_.size()); k > 0; --k) undo();
    }
    return found();
  }

  // Accepts a larger arena from now on.
  void relax(int64_t goal) { goal_ = std::max(goal_, goal); }
  int64_t goal() const { return goal_; }

  bool found() const { return placed_ == jobs_.count() && load_.most() <= goal_; }
  int64_t work() const { return work_; }
  int64_t failures() const { return failures_; }  // number of backtracks
  // Offsets of all jobs, including those that stay.
  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  static constexpr int64_t work_a_step = 300;  // cost of a step with its undoing; measured
  static constexpr double usual_undo = 2;       // number of steps mostly undone after a failure
  static constexpr double random_choice = 0.5;  // probability of a random choice at a depth reached before
  // fraction of the goal above which the instants of highest load come first
  static constexpr double summit_load = 0.9;
  static constexpr int32_t most_rejected = 8;   // jobs rejected per valley before the step fails; measured
  static constexpr int64_t no_limit = std::numeric_limits<int64_t>::max();

  struct Step {
    int32_t job = -1;        // the placed job, or -1: the valley rose
    int32_t slot = -1;       // slot of the job in the index, or -1: a job that stays
    int32_t from = 0, to = 0;
    int64_t lost = 0;        // bytes lost there
    size_t mark = 0;         // mark of the skyline before the step
    int32_t run = 0;
    size_t summit = 0;       // the first summit not done before the step
  };
  struct Choice {  // time interval in which a job must lie, and largest size
    int32_t from, to;
    int64_t most;
  };

  static std::vector<int32_t> jobs_to_place(const Window& window) {
    std::vector<int32_t> jobs(window.free);
    std::iota(jobs.begin(), jobs.end(), 0);
    return jobs;
  }
  // One more instant closes the ring: a wall of infinite height.
  static std::vector<int64_t> ground(const Window& window) {
    std::vector<int64_t> floor(window.width + 1, 0);
    floor[window.width] = no_limit;
    return floor;
  }

  void step() {
    work_ += work_a_step;
    Step step;
    step.summit = summit_;
    run_ = run_to_raise();
    const Valley valley = skyline_.valley_from(run_);
    step.mark = skyline_.mark(), step.run = run_;
    step.from = valley.from, step.to = valley.to;
    if (const int32_t job = left_end_.reached(valley, width_); job >= 0) return left_end_.pass(), place(step, job, valley);
    if (const int32_t job = right_end_.reached(valley, width_); job >= 0) return right_end_.pass(), place(step, job, valley);
    if (!fill(step, valley)) rise(step, valley);
    for (; !rejected_.empty(); rejected_.pop_back()) index_.put_back(rejected_.back().slot, rejected_.back().job);
  }

  // Places the best job that leaves no slit; returns false if there is none. After several jobs that leave a
  // slit, sets failed_ and returns true.
  bool fill(Step step, const Valley& valley) {
    for (;;) {
      const IntervalIndex::Match found = choose(valley);
      if (found.slot < 0) return false;
      step.slot = found.slot;
      place(step, index_.take(found), valley);
      if (load_.most() <= goal_ && !leaves_slit()) return true;
      if (rejected_.size() == most_rejected) return failed_ = true;
      work_ += work_a_step / 2;
      rejected_.push_back({found.slot, steps_.back().job});
      undo();
      index_.take(found.slot);
    }
  }

  void rise(Step step, const Valley& valley) {
    const int64_t height = std::min({valley.before, valley.after, above(valley.from, valley.to)});
    if ((failed_ = height == no_limit)) return;  // all remaining jobs leave slits
    step.slot = -1;
    step.lost = height - valley.height;
    load_.add(valley.from, valley.to, step.lost);
    run_ = skyline_.rise(run_, height);
    steps_.push_back(step);
    failed_ = leaves_slit();
  }

  // Returns whether the last step has made a valley that cannot be filled.
  bool leaves_slit() {
    const int32_t run = skyline_.run_at(steps_.back().from);
    return is_slit(run) || is_slit(skyline_.before(run)) || is_slit(skyline_.after(run));
  }

  // A slit is a valley at whose fullest instant more bytes than allowed must be lost: the jobs alive there
  // that lie within the valley do not fill it up to its wall.
  bool is_slit(int32_t run) {
    if (!skyline_.is_valley(run)) return false;
    const Valley valley = skyline_.valley_from(run);
    const int64_t wall = std::min(valley.before, valley.after);
    if (wall == no_limit) return false;
    const int32_t fullest = load_.fullest(valley.from, valley.to);
    const int64_t missing = wall - valley.height - (goal_ - load_[fullest]);
    if (missing <= 0 || index_.have(valley.from, valley.to, fullest, missing, coarsest_)) return false;
    return above(valley.from, valley.to) >= wall;  // a job that hangs lower replaces the wall
  }

  // Lowest base of a job that hangs over any of [from, to).
  int64_t above(int32_t from, int32_t to) const { return std::min(left_end_.above(from, to), right_end_.above(from, to)); }

  // The run of highest load where a job is still to be placed; no particular run if the load is not very
  // high.
  int32_t run_to_raise() {
    for (; summit_ < summits_.size(); ++summit_) {
      const int32_t run = skyline_.run_at(summits_[summit_]);
      if (skyline_.height(run) < load_[summits_[summit_]]) return run;
    }
    return run_;
  }

  void list_summits() {
    std::vector<std::pair<int64_t, int32_t>> found;
    for (int32_t t = 0; t < width_; ++t)
      if (static_cast<double>(load_[t]) > summit_load * static_cast<double>(goal_) && load_[t] >= load_[t + 1] &&
          (t == 0 || load_[t] > load_[t - 1]))
        found.emplace_back(-load_[t], t);
    std::sort(found.begin(), found.end());
    for (const auto& [load, instant] : found) summits_.push_back(instant);
  }

  void place(Step step, int32_t job, const Valley& valley) {
    const Piece piece = jobs_.pieces[job];
    step.job = job;
    offset_[job] = step.slot < 0 ? valley.height : jobs_.aligned(job, valley.height);
    step.from = piece.start, step.to = piece.end;
    step.lost = offset_[job] - valley.height;
    if (step.lost > 0) load_.add(step.from, step.to, step.lost);
    run_ = skyline_.raise(run_, piece, offset_[job] + jobs_.size[job]);
    ++placed_;
    steps_.push_back(step);
  }

  void undo() {
    const Step step = steps_.back();
    steps_.pop_back();
    skyline_.undo(step.mark);
    run_ = step.run, summit_ = step.summit;
    if (step.lost > 0) load_.add(step.from, step.to, -step.lost);
    if (step.job < 0) return;
    --placed_;
    offset_[step.job] = -1;
    if (step.slot >= 0) index_.put_back(step.slot, step.job);
    else if (jobs_.pieces[step.job].start == 0) left_end_.pass_back();
    else right_end_.pass_back();
  }

  // Chooses as MaxLoadFirst does; at depths reached before, often only within a random part of the valley or
  // among smaller jobs.
  IntervalIndex::Match choose(const Valley& valley) {
    const int32_t fullest = load_.fullest(valley.from, valley.to);
    const int64_t here = load_[fullest], wall = std::min(valley.before, valley.after);
    Choice choice{valley.from, valley.to, no_limit};
    if (load_[valley.from > 0 ? valley.from - 1 : width_] >= here)
      choice.most = std::min(choice.most, valley.before - valley.height);
    if (load_[valley.to] >= here) choice.most = std::min(choice.most, valley.after - valley.height);
    const int64_t most = choice.most;
    const bool narrowed = steps_.size() < deepest_ && random_.unit() < random_choice;
    if (narrowed) narrow(choice);
    IntervalIndex::Match found = longest(valley, choice);
    if (found.slot < 0 && narrowed) found = longest(valley, choice = {valley.from, valley.to, most});
    if (found.slot < 0 && most < no_limit && here + wall - valley.height > goal_)
      found = longest(valley, choice = {valley.from, valley.to, no_limit});
    if (found.slot < 0 || index_.covers(found, fullest, width_ + 1)) return found;
    const IntervalIndex::Match covering = longest(valley, choice, fullest, fullest + 1);
    return covering.slot >= 0 ? covering : found;
  }

  void narrow(Choice& choice) {
    const int32_t part = 1 + (choice.to - choice.from) / 3;
    switch (random_.below(3)) {
      case 0: choice.from += random_.below(part); break;
      case 1: choice.to -= random_.below(part); break;
      default:
        const auto most = static_cast<double>(std::min(choice.most, goal_));
        choice.most = std::max<int64_t>(1, static_cast<int64_t>(most * random_.unit()));
    }
  }

  // Bounded by the jobs that hang there; padding is assumed to be as large as possible.
  IntervalIndex::Match longest(const Valley& valley, const Choice& choice, int32_t start_by, int32_t end_from) const {
    const int64_t from_height = (valley.height + coarsest_) & ~coarsest_;
    IntervalIndex::Match found;
    const auto room = [&](int32_t from, int32_t to) { return above(from, to) - from_height; };
    index_.longest(choice.from, start_by, end_from, choice.to, choice.most, room, found);
    return found;
  }
  IntervalIndex::Match longest(const Valley& valley, const Choice& choice) const {
    return longest(valley, choice, valley.to, valley.from);
  }

  const Jobs& jobs_;
  int64_t goal_;
  int32_t width_;
  int64_t coarsest_;
  Random random_;
  LoadTree load_;
  IntervalIndex index_;
  WindowEdge left_end_, right_end_;
  SkylineOf<true> skyline_;
  int32_t run_, placed_ = 0;
  std::vector<int64_t> offset_;
  std::vector<Step> steps_;
  bool failed_ = false;
  std::vector<int32_t> summits_;  // instants by load, highest first
  size_t summit_ = 0;             // the first summit below which jobs may still be to be placed
  struct Rejected {
    int32_t slot, job;
  };
  std::vector<Rejected> rejected_;
  size_t deepest_ = 0;  // largest number of steps at any failure
  int64_t work_ = 0, failures_ = 0;
};

}  // namespace packing
