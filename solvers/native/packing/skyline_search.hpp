// Complete search for offsets within a capacity, or for the proof that there are none.
//
// The search is depth-first: over the sections of all valleys, the search branches on the section with the
// fewest options and most failures (Boussemart, Hemery, Lecoutre and Sais, 2004), and tries the options one
// after the other. The order of the options uses random preferences, drawn anew at each restart (Gomes,
// Selman and Kautz, 1998); the failure weights are reset then, or all tries would be alike. The length of
// tries follows the sequence of Luby, Sinclair and Zuckerman (1993), so that the search ends. Sections and
// splitting at cuts are from MiniMalloc (Moffitt, 2023).
#pragma once

#include "packing/random.hpp"
#include "packing/valleys.hpp"

namespace packing {

// Hash table of exhausted states without a plan, by a hash of 63 bits. Of two states in the same slot, the
// table forgets the older. A collision of two states of one search is as unlikely as a memory fault.
class Failures {
 public:
  bool has(uint64_t key) const { return !keys_.empty() && keys_[place(key)] == (key | 1); }
  void add(uint64_t key) {
    if (keys_.empty()) keys_.assign(size_t{1} << bits, 0);
    keys_[place(key)] = key | 1;
  }

 private:
  static constexpr int bits = 16;
  static size_t place(uint64_t key) { return key >> (64 - bits); }
  std::vector<uint64_t> keys_;
};

class SkylineSearch {
 public:
  enum class State { open, found, infeasible };

  // Throws std::invalid_argument for jobs of several pieces or more than 2^62 bytes.
  SkylineSearch(const Jobs& jobs, int64_t capacity, uint64_t seed, uint32_t rules = every_rule)
      : valleys_(jobs, capacity, rules), rules_(rules), random_(seed) {
    steps_ = steps_a_job * jobs.count();
    for (int32_t j = 0; j < jobs.count(); ++j) {
      key_.push_back(random_.next());
      biggest_ = std::max(biggest_, static_cast<double>(jobs.size[j]));
    }
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
  static constexpr int32_t most_hashed = 4096;  // sections; wider states do not recur

  struct Option {
    int32_t job;  // job number, or skip
    double value;
  };
  struct Field {  // independent sections to be filled
    int32_t left, right;
    int32_t parent;  // the latest decision that this field depends on, or -1
    int32_t next;    // another field to fill, or -1
  };
  struct Frame {  // a decision
    Field field;
    int32_t run;
    size_t mark, fields;  // trail length and number of fields before the decision
    size_t option, end;   // alternatives left
    uint64_t key;         // hash of the state, or 0
  };

  void restart() {
    valleys_.undo(0);
    frames_.clear(), fields_.clear(), options_.clear();
    for (double& weight : preference_) weight = random_.unit();
    valleys_.forget();
    failed_ = 0;
    limit_ = (64 + static_cast<int64_t>(key_.size()) / 16) * luby(++tries_);  // measured on many problems
    current_ = {0, 0, -1, -1};
    for (int32_t from = 0, b = 1; b <= valleys_.sections(); ++b) {
      if (b < valleys_.sections() && !cut(b)) continue;
      add_field(from, b);
      from = b;
    }
    next_field();
  }

  // Luby sequence: 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...
  static int64_t luby(int64_t i) {
    int64_t k = 1;
    while (k - 1 < i) k *= 2;
    return k - 1 == i ? k / 2 : luby(i - k / 2 + 1);
  }

  static uint64_t mix(uint64_t state) { return Random(state).next(); }
  bool cut(int32_t boundary) const { return (rules_ & rule_cuts) && valleys_.is_cut(boundary); }

  void add_field(int32_t left, int32_t right) {
    for (int32_t s = left; s < right; ++s) {
      if (!valleys_.has_jobs(s)) continue;
      fields_.push_back({left, right, current_.parent, current_.next});
      current_.next = static_cast<int32_t>(fields_.size()) - 1;
      return;
    }
  }

  void next_field() {
    if (current_.next < 0) state_ = State::found;
    else current_ = fields_[current_.next];
  }

  // After a job has been placed, continues with the parts into which the job has split the field.
  void split(const Valleys::Item& item) {
    const int32_t left = current_.left, right = current_.right;
    if (!valleys_.has_jobs(left) || !(rules_ & rule_cuts) || has_cut(item)) {
      int32_t from = left;
      for (int32_t b = item.begin + 1; b < item.end; ++b)
        if (cut(b)) add_field(from, b), from = b;
      add_field(from, right);
      next_field();
    }
  }

  bool has_cut(const Valleys::Item& item) const {
    for (int32_t b = item.begin + 1; b < item.end; ++b)
      if (cut(b)) return true;
    return false;
  }

  void step() {
    int32_t best = -1;
    double score = std::numeric_limits<double>::max();
    steps_ += 8;
    for (int32_t r = valleys_.run_at(current_.left); r >= 0; r = valleys_.run(r).after) {
      const Valleys::Run& run = valleys_.run(r);
      if (run.begin >= current_.right) break;
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
    const uint64_t key = state_key();
    if (key != 0 && failures_.has(key)) return back();
    const Valleys::Run& run = valleys_.run(index);
    const size_t first = options_.size();
    valleys_.options(run, [&](int32_t job) { options_.push_back({job, value(job, run)}); });
    const auto sooner = [](const Option& a, const Option& b) {
      return a.value > b.value || (a.value == b.value && a.job < b.job);
    };
    std::sort(options_.begin() + static_cast<std::ptrdiff_t>(first), options_.end(), sooner);
    if (run.skip >= 0) options_.push_back({skip, 0});
    steps_ += 8 * static_cast<int64_t>(options_.size() - first);
    frames_.push_back({current_, index, valleys_.mark(), fields_.size(), first, options_.size(), key});
    current_.parent = static_cast<int32_t>(frames_.size()) - 1;
    try_next();
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

  // Hash of the jobs not yet placed in this field and of the skyline under them; 0 if the hash would cost too
  // much.
  uint64_t state_key() {
    if (!(rules_ & rule_failures) || current_.right - current_.left > most_hashed) return 0;
    uint64_t key = mix(static_cast<uint64_t>(current_.left) << 32 | static_cast<uint64_t>(current_.right));
    for (int32_t r = valleys_.run_at(current_.left); r >= 0; r = valleys_.run(r).after) {
      const Valleys::Run& run = valleys_.run(r);
      if (run.begin >= current_.right) break;
      key = mix(key ^ mix(static_cast<uint64_t>(run.height)) ^ static_cast<uint64_t>(run.begin));
    }
    valleys_.each(current_.left, current_.right, [&](int32_t job) { key ^= key_[job]; });
    steps_ += current_.right - current_.left;
    return mix(key) | 1;
  }

  bool apply(int32_t job, int32_t run) {
    ++nodes_;
    if (job == skip ? !valleys_.skip(run) : !valleys_.place(job, run)) {
      ++failed_;
      return false;
    }
    if (job != skip) split(valleys_.item(job));
    return true;
  }

  // The field is infeasible: backtracks to the latest decision that contributed to the field.
  void back() {
    if (current_.parent < 0) state_ = State::infeasible;
    else try_next();
  }

  // Takes the next alternative of the decision current_.parent, or of the decision before if none is left.
  void try_next() {
    for (int32_t at = current_.parent; at >= 0; at = current_.parent) {
      Frame& frame = frames_[at];
      valleys_.undo(frame.mark);
      frames_.resize(at + 1);
      fields_.resize(frame.fields);
      options_.resize(frame.end);
      current_ = frame.field;
      current_.parent = at;
      if (frame.option < frame.end) {
        if (apply(options_[frame.option++].job, frame.run)) return;
        continue;
      }
      if (frame.key != 0) failures_.add(frame.key);
      current_.parent = frame.field.parent;
    }
    state_ = State::infeasible;
  }

  Valleys valleys_;
  const uint32_t rules_;
  Random random_;
  Failures failures_;
  State state_ = State::open;
  Field current_{0, 0, -1, -1};      // the field being filled
  std::vector<Frame> frames_;
  std::vector<Field> fields_;
  std::vector<Option> options_;
  std::vector<uint64_t> key_;     // per job
  double preference_[6] = {}, biggest_ = 1;
  int64_t nodes_ = 0, steps_ = 0, tries_ = 0;
  int64_t failed_ = 0, limit_ = 0;  // of this try
};

}  // namespace packing
