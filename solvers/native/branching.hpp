// A complete search for offsets within a capacity, or for the proof that there are none.
#pragma once

#include "random.hpp"
#include "valleys.hpp"

namespace packing {

// The states that have been searched to the end without a plan, by a hash of 64 bits; forgets the older of two that
// fall together.
class Failures {
 public:
  explicit Failures(size_t bits) : keys_(size_t{1} << bits, 0), mask_(keys_.size() - 1) {}
  bool has(uint64_t key) const { return keys_[key & mask_] == key; }
  void add(uint64_t key) { keys_[key & mask_] = key; }

 private:
  std::vector<uint64_t> keys_;
  uint64_t mask_;
};

class Branching {
 public:
  enum class State { open, found, infeasible };

  Branching(const Jobs& jobs, int64_t capacity, uint64_t seed, uint32_t rules = every_rule, int64_t restart = 500)
      : jobs_(jobs), random_(seed), failures_(16), rules_(rules), restart_(restart) {
    for (int32_t j = 0; j < jobs.count(); ++j) key_.push_back(random_.next());
    begin(capacity);
  }

  void begin(int64_t capacity) {
    state_ = valleys_.begin(jobs_, capacity, rules_) ? State::open : State::infeasible;
    if (state_ == State::open) restart();
  }

  State state() const { return state_; }
  int64_t nodes() const { return nodes_; }
  int64_t work() const { return valleys_.work(); }
  int64_t restarts() const { return restarts_; }
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result;
    for (int32_t j = 0; j < jobs_.count(); ++j) result.push_back(valleys_.offset(j));
    return result;
  }

  State advance(int64_t budget) {
    const int64_t until = nodes_ + budget;
    while (state_ == State::open && nodes_ < until) {
      if (restart_ > 0 && nodes_ >= limit_) restart();
      step();
    }
    return state_;
  }

 private:
  static constexpr int32_t idle = -1;
  struct Option {
    int32_t job;
    double value;
  };
  struct Field {          // a stretch of sections without a cut, to be filled
    int32_t left, right;
    int32_t parent;       // the latest decision without which it would not be, or -1
    int32_t next;         // another that is to be filled too, or -1
  };
  struct Frame {          // a decision that has alternatives left
    int32_t left, right;  // where
    int32_t parent;       // the decision without which this one would not be; what fails here fails that
    int32_t next;         // fields to fill after this one
    int32_t run;
    size_t mark, fields;  // to go back to
    size_t option, end;   // alternatives left
    uint64_t key;
  };

  void restart() {
    valleys_.undo(0);
    frames_.clear(), fields_.clear(), options_.clear();
    parent_ = next_ = -1;
    for (double& w : taste_) w = random_.unit();
    ++restarts_;
    limit_ = nodes_ + restart_;
    valleys_.blame_less(0.5);
    split(0, valleys_.sections());
    if (!pop()) state_ = State::found;
  }

  // Puts the fields between the cuts of [left, right) on the list of what is to be filled.
  void split(int32_t left, int32_t right) {
    for (int32_t b = left + 1, from = left; b <= right; ++b) {
      if (b < right && !(valleys_.is_cut(b) && (rules_ & rule_cuts))) continue;
      bool empty = true;
      for (int32_t s = from; s < b && empty; ++s) empty = !valleys_.has_jobs(s);
      if (!empty) {
        fields_.push_back({from, b, parent_, next_});
        next_ = static_cast<int32_t>(fields_.size()) - 1;
      }
      from = b;
    }
  }

  bool pop() {
    if (next_ < 0) return false;
    const Field& field = fields_[next_];
    left_ = field.left, right_ = field.right, parent_ = field.parent, next_ = field.next;
    return true;
  }

  void step() {
    ++nodes_;
    int32_t best = -1;
    double score = std::numeric_limits<double>::max();
    uint64_t key = 0;
    for (int32_t r = valleys_.run_at(left_); r >= 0 && valleys_.run(r).begin < right_; r = valleys_.run(r).after) {
      const auto& run = valleys_.run(r);
      key = mix(key ^ static_cast<uint64_t>(run.height) * 0x9e3779b97f4a7c15ULL ^ static_cast<uint64_t>(run.begin));
      if (run.options > 0 && run.score < score) score = run.score, best = r;
    }
    const auto& run = valleys_.run(best);
    if (run.options == 1) {
      int32_t job = idle;
      if (run.idle < 0) valleys_.options(run, [&](int32_t j) { job = j; });
      if (!apply(job, best)) back();
      return;
    }
    if (rules_ & rule_failures) {
      valleys_.each(left_, right_, [&](int32_t j) { key ^= key_[j]; });
      key = mix(key ^ static_cast<uint64_t>(left_) << 32 ^ static_cast<uint64_t>(right_));
      if (failures_.has(key)) return back();
    }
    const size_t first = options_.size();
    valleys_.options(run, [&](int32_t j) { options_.push_back({j, value(j, run)}); });
    if (run.idle >= 0) options_.push_back({idle, -1e9});
    std::sort(options_.begin() + first, options_.end(), [](const Option& a, const Option& b) {
      return a.value > b.value || (a.value == b.value && a.job > b.job);
    });
    frames_.push_back({left_, right_, parent_, next_, best, valleys_.mark(), fields_.size(), first, options_.size(), key});
    parent_ = static_cast<int32_t>(frames_.size()) - 1;
    back();
  }

  // How promising it is to place a job in a valley.
  double value(int32_t job, const Valleys::Run& run) {
    const auto& item = valleys_.item(job);
    const double width = run.end - run.begin;
    double result = taste_[0] * 2 * (item.end - item.begin) / width + taste_[1] * 2 * static_cast<double>(item.size) / 1048576;
    result += taste_[2] * ((item.begin == run.begin) + (item.end == run.end));
    result += taste_[3] * 0.5 * random_.unit();
    return result;
  }

  bool apply(int32_t job, int32_t run) {
    if (job == idle) return valleys_.idle(run);
    if (!valleys_.place(job, run)) return false;
    const int32_t left = left_, right = right_;
    split(left, right);
    if (!pop()) state_ = State::found;
    return true;
  }

  // Tries the next alternative of the latest decision that matters here.
  void back() {
    while (parent_ >= 0) {
      Frame& frame = frames_[parent_];
      const int32_t me = parent_;
      valleys_.undo(frame.mark);
      frames_.resize(me + 1);
      fields_.resize(frame.fields);
      options_.resize(frame.end);
      left_ = frame.left, right_ = frame.right, next_ = frame.next;
      while (frame.option < frame.end) {
        if (apply(options_[frame.option++].job, frame.run)) return;
        valleys_.undo(frame.mark);
      }
      if (rules_ & rule_failures) failures_.add(frame.key);
      parent_ = frame.parent;
      options_.resize(frame.end);
    }
    state_ = State::infeasible;
  }

  const Jobs jobs_;
  Random random_;
  Failures failures_;
  uint32_t rules_;
  int64_t restart_, limit_ = 0, nodes_ = 0, restarts_ = 0;
  Valleys valleys_;
  std::vector<uint64_t> key_;
  std::vector<Frame> frames_;
  std::vector<Field> fields_;
  std::vector<Option> options_;
  double taste_[4] = {};
  int32_t left_ = 0, right_ = 0, parent_ = -1, next_ = -1;
  State state_ = State::open;

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
};

}  // namespace packing
