// Complete search for offsets within a capacity, or for the proof that there are none.
//
// The search is depth-first: over the sections of all valleys, the search branches on the section with the
// fewest options and most failures (Boussemart, Hemery, Lecoutre and Sais, 2004), and tries the options one
// after the other. A failure returns to the latest decision that contributed to it (Prosser, 1993). The order of
// the options uses random preferences, drawn anew at each try (Gomes, Selman and Kautz, 1998). A try redoes the
// decisions from one of those that touch the sections of the last failure: from the first in the first tries of a
// round, and later, at random, from ever later ones. The first try of a round redoes all. The lengths of tries
// and of rounds follow the sequence of Luby, Sinclair and Zuckerman (1993), so that the search ends. Sections are
// from MiniMalloc (Moffitt, 2023).
#pragma once

#include "packing/random.hpp"
#include "packing/valleys.hpp"

namespace packing {

class SkylineSearch {
 public:
  enum class State { open, found, infeasible };

  // Throws std::invalid_argument for jobs of several pieces or more than 2^62 bytes.
  SkylineSearch(const Jobs& jobs, int64_t capacity, uint64_t seed, uint32_t rules = every_rule)
      : valleys_(jobs, capacity, rules), rules_(rules), shortest_try_(32 + jobs.count() / 32), random_(seed) {
    steps_ = steps_a_job * jobs.count();
    for (const int64_t size : jobs.size) biggest_ = std::max(biggest_, static_cast<double>(size));
    if (valleys_.promising()) restart();
    else state_ = State::infeasible;
  }

  State state() const { return state_; }
  bool found() const { return state_ == State::found; }
  bool infeasible() const { return state_ == State::infeasible; }
  int64_t nodes() const { return nodes_; }        // jobs placed and sections risen
  int64_t work() const { return work_a_step * (steps_ + valleys_.steps()); }
  std::vector<int64_t> offsets() const { return valleys_.offsets(); }

  // Continues until a plan or a proof is found or about `budget` more work units are spent.
  State advance(int64_t budget) {
    const int64_t until = work() + budget;
    while (state_ == State::open && work() < until) {
      if (failed_ >= limit_) restart();
      else step();
    }
    return state_;
  }

 private:
  static constexpr int32_t skip = -1;
  static constexpr int64_t work_a_step = 4;      // cost of a section in work units of first fit; measured
  static constexpr int64_t steps_a_job = 64;     // cost of the setup per job
  static constexpr int64_t tries_a_round = 24;  // length of the shortest round in shortest tries; measured
  static constexpr int64_t tries_a_draw = 12;   // tries of a round per draw of the decision to redo from; measured

  struct Option {
    int32_t job;  // job number, or skip
    double value;
  };
  struct Frame {  // a decision
    int32_t run;
    size_t mark;         // trail length before the decision
    size_t option, end;  // alternatives left
    Piece conflict;      // of the alternatives that failed
  };

  // Begins a try, after the last one of a round anew. Failures weigh on for all of every other round, as some
  // problems need; others need that each try forgets them. Measured on many problems.
  void restart() {
    spent_ += failed_, failed_ = 0;
    const bool anew = spent_ >= round_;
    if (anew) spent_ = tries_ = 0, round_ = tries_a_round * shortest_try_ * luby(++rounds_);
    limit_ = shortest_try_ * luby(++tries_);
    for (double& weight : preference_) weight = random_.unit();
    if (anew || rounds_ % 2 == 1) valleys_.forget();
    touching_.clear();
    for (size_t k = 0; !anew && k < frames_.size(); ++k) {
      const Piece filled = valleys_.filled_at(frames_[k].mark);
      if (filled.start < failure_.end && failure_.start < filled.end) touching_.push_back(k);
    }
    Piece none{0, 0};
    if (touching_.empty()) {
      valleys_.undo(0, none);
      frames_.clear(), options_.clear();
      if (valleys_.jobs_left() == 0) state_ = State::found;
      return;
    }
    int32_t latest = 0;
    for (int64_t draws = tries_ / tries_a_draw; draws > 0; --draws)
      latest = std::max(latest, random_.below(static_cast<int32_t>(touching_.size())));
    const size_t first = touching_[latest];
    valleys_.undo(frames_[first].mark, none);
    options_.resize(first == 0 ? 0 : frames_[first - 1].end), frames_.resize(first);
  }

  // Luby sequence: 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...
  static int64_t luby(int64_t i) {
    int64_t k = 1;
    while (k - 1 < i) k *= 2;
    return k - 1 == i ? k / 2 : luby(i - k / 2 + 1);
  }

  void step() {
    int32_t best = -1;
    double score = std::numeric_limits<double>::max();
    steps_ += 8;
    for (int32_t r = valleys_.run_at(0); r >= 0; r = valleys_.run(r).after) {
      const Valleys::Run& run = valleys_.run(r);
      ++steps_;
      if (run.options == Valleys::no_valley || run.score >= score) continue;
      score = run.score, best = r;
      if (run.options == 1) break;
    }
    const Valleys::Run& run = valleys_.run(best);
    if (run.options > 1) return decide(best);
    int32_t job = skip;
    if (run.skip < 0) valleys_.options(run, [&](int32_t only) { job = only; });
    if (!apply(job, best)) back();
  }

  // Branches over the options of a valley.
  void decide(int32_t index) {
    const Valleys::Run& run = valleys_.run(index);
    const size_t first = options_.size();
    valleys_.options(run, [&](int32_t job) { options_.push_back({job, value(job, run)}); });
    const auto sooner = [](const Option& a, const Option& b) {
      return a.value > b.value || (a.value == b.value && a.job < b.job);
    };
    std::sort(options_.begin() + static_cast<std::ptrdiff_t>(first), options_.end(), sooner);
    if (run.skip >= 0) options_.push_back({skip, 0});
    steps_ += 8 * static_cast<int64_t>(options_.size() - first);
    frames_.push_back({index, valleys_.mark(), first, options_.size(), {valleys_.sections(), 0}});
    if (!try_next()) back();
  }

  // Preference for placing a job in a valley: by the job's length, size and area, and by how well the job
  // fits the walls.
  double value(int32_t job, const Valleys::Run& run) {
    const Valleys::Item& item = valleys_.item(job);
    const double length = static_cast<double>(item.end - item.begin) / (run.end - run.begin);
    const double size = static_cast<double>(item.bytes) / biggest_;
    const bool at_left = item.begin == run.begin, at_right = item.end == run.end;
    const int64_t top = run.height + item.size;
    const int level = (at_left && !valleys_.is_cut(run.begin) && valleys_.run(run.before).height == top) +
                      (at_right && !valleys_.is_cut(run.end) && valleys_.run(run.after).height == top);
    return 2 * preference_[0] * length + 2 * preference_[1] * size + preference_[2] * length * size +
           0.5 * preference_[3] * (at_left + at_right) + preference_[4] * level + preference_[5] * random_.unit();
  }

  bool apply(int32_t job, int32_t run) {
    ++nodes_;
    if (job == skip ? !valleys_.skip(run) : !valleys_.place(job, run)) {
      ++failed_, failure_ = valleys_.conflict();
      return false;
    }
    if (valleys_.jobs_left() == 0) state_ = State::found;
    return true;
  }

  // After a failure, goes back to the latest decision that contributed to it and has an alternative left.
  void back() {
    Piece conflict = failure_;
    for (; !frames_.empty(); frames_.pop_back()) {
      Frame& frame = frames_.back();
      bool part = valleys_.undo(frame.mark, conflict);
      options_.resize(frame.end);
      while (part || !(rules_ & rule_jumps)) {
        frame.conflict = conflict = Valleys::hull(frame.conflict, conflict);
        if (frame.option == frame.end) break;
        if (try_next()) return;
        conflict = failure_;
        part = valleys_.undo(frame.mark, conflict);
      }
    }
    state_ = State::infeasible;
  }

  // Takes the next alternative of the latest decision.
  bool try_next() {
    Frame& frame = frames_.back();
    return apply(options_[frame.option++].job, frame.run);
  }

  Valleys valleys_;
  const uint32_t rules_;
  const int64_t shortest_try_;  // failures
  Random random_;
  State state_ = State::open;
  std::vector<Frame> frames_;
  std::vector<Option> options_;
  std::vector<size_t> touching_;  // decisions that touch the sections of the last failure
  double preference_[6] = {}, biggest_ = 1;
  Piece failure_{0, 0};  // sections of the last failure
  int64_t nodes_ = 0, steps_ = 0, rounds_ = 0;
  int64_t spent_ = 0, round_ = 0, tries_ = 0;  // failures, largest number of failures, and tries of this round
  int64_t failed_ = 0, limit_ = 0;             // failures of this try, and their largest number
};

}  // namespace packing
