// Local search on an offload schedule: small changes, each judged by the resulting stall.
//
// Late acceptance (Burke and Bykov, European Journal of Operational Research 258, 2017): a change is kept if
// the schedule is no worse than the schedule some steps ago. Deterministic; stops after an amount of work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "offload/offload_planner.hpp"

namespace offload {

// Release and fetch of one absence; the absence is not used if release >= fetch.
struct Move {
  int64_t out, release, fetch;

  bool taken() const { return release < fetch; }
};

class ScheduleSearch {
 public:
  ScheduleSearch(const Planner& planner, int64_t limit, uint64_t seed)
      : p_(planner), a_(planner.absences()), k_(planner.operations()), limit_(limit), late_(seed & 2 ? 1024 : 64), state_(seed) {
    begins_.assign(1, 0.0);
    for (const double s : p_.seconds()) begins_.push_back(begins_.back() + s);
    by_use_.resize(a_.count());
    std::iota(by_use_.begin(), by_use_.end(), 0);
    std::stable_sort(by_use_.begin(), by_use_.end(), [&](int x, int y) { return a_.use[x] < a_.use[y]; });
    rank_.resize(a_.count());
    for (int i = 0; i < a_.count(); ++i) rank_[by_use_[i]] = i;
    for (auto* heads : {&release_at_, &fetch_at_, &use_at_, &out_at_}) heads->assign(k_, -1);
    for (auto* next : {&release_next_, &fetch_next_, &use_next_, &out_next_}) next->assign(a_.count(), -1);
    for (int t = 0; t < 2; ++t) out_done_[t].assign(a_.count(), 0.0), in_done_[t].assign(a_.count(), 0.0);
  }

  // Returns the best schedule found within `work`, counted in operations and absences examined; also starts from
  // an empty schedule.
  std::vector<Move> improve(const std::vector<Move>& first, double work) {
    moves_ = first;
    load_ = p_.load();
    for (int c = 0; c < a_.count(); ++c) {
      if (moves_[c].taken()) p_.each(moves_[c].release, moves_[c].fetch, [&](int64_t op) { load_[op] -= a_.size[c]; });
    }
    double now = cost();
    causes_ = waits_;
    std::vector<Move> best = moves_;
    double least = now;
    std::vector<double> late(late_, now);
    const double each = static_cast<double>(k_ + 6 * a_.count()) * turns_;
    const auto turns = std::min(kMostChanges, static_cast<int64_t>(work / each));
    for (int64_t turn = 0; turn < turns && stall_ > 0; ++turn) {
      undo_.clear();
      for (change(); !below(3);) change();
      if (!repair()) {
        revert();
        continue;
      }
      if (below(2)) relax();
      const double then = cost();
      double& before = late[turn % late_];
      if (then <= now || then <= before) {
        now = then;
        causes_.swap(waits_);
        if (now <= least) least = now, best = moves_;
      } else {
        revert();
      }
      before = now;
    }
    return best;
  }

  double stall() const { return stall_; }

 private:

  static constexpr int64_t kMostChanges = 20000;

  struct Cause {
    int64_t op;
    int c;
    bool back;
  };

  // SplitMix64.
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

  void set(int c, const Move& to) {
    Move& m = moves_[c];
    undo_.push_back({c, m});
    if (m.taken()) p_.each(m.release, m.fetch, [&](int64_t op) { load_[op] += a_.size[c]; });
    m = to;
    if (m.taken()) p_.each(m.release, m.fetch, [&](int64_t op) { load_[op] -= a_.size[c]; });
    m.out = m.taken() ? std::min(std::max(m.out, a_.last[c]), m.release - 1) : a_.last[c];
  }

  void revert() {
    while (!undo_.empty()) {
      const auto [c, to] = undo_.back();
      set(c, to);
      undo_.pop_back();
      undo_.pop_back();
    }
  }

  // after_last: the operation, counted on into the next turn if needed, so that it lies after the absence's
  // last access. spans: whether the operation lies within the absence.
  int64_t after_last(int c, int64_t op) const { return op > a_.last[c] ? op : op + k_; }
  bool spans(int c, int64_t op) const {
    const int64_t x = after_last(c, op);
    return x < a_.use[c] && (x < k_ || p_.circular());
  }

  // Makes one move shorter, longer, earlier, later, or removes it; mostly a move that an operation waits for.
  void change() {
    const int n = a_.count();
    int c = static_cast<int>(below(n));
    bool back = below(2);
    if (!causes_.empty() && below(4)) {
      const Cause& cause = causes_[below(static_cast<int64_t>(causes_.size()))];
      c = cause.c, back = cause.back;
      if (!below(3)) {  // an absence whose copy is made near this one
        const auto& order = back ? by_use_ : p_.by_last();
        const int64_t at = back ? rank_[c] : std::find(order.begin(), order.end(), c) - order.begin();
        c = order[std::clamp<int64_t>(at + between(-4, 4), 0, n - 1)];
      }
    }
    Move m = moves_[c];
    const int64_t first = a_.last[c] + 1, use = a_.use[c];
    if (!m.taken()) {
      m.release = between(first, use - 1), m.fetch = between(m.release + 1, use);
      m.out = a_.last[c];
      set(c, m);
      return;
    }
    switch (below(9)) {
      case 0: m.release = m.fetch; break;
      case 1: m.release = between(first, m.fetch - 1); break;
      case 2: m.fetch = between(m.release + 1, use); break;
      case 3: m.out = between(a_.last[c], m.release - 1); break;
      case 4:
        m.release = between(first, m.fetch - 1);
        m.out = between(a_.last[c], m.release - 1);
        break;
      default:
        if (back) {
          m.fetch -= 1 + below(std::min<int64_t>(m.fetch - m.release, 8));
        } else {
          m.release += 1 + below(std::min<int64_t>(m.fetch - m.release, 8));
        }
    }
    set(c, m);
  }

  // Where the load exceeds the limit, lengthens other absences or uses unused ones.
  bool repair() {
    const int changed = undo_.back().c;
    for (int64_t guard = 0; guard < 64; ++guard) {
      const int64_t op = first_over();
      if (op < 0) return true;
      int best = -1;
      double most = -1;
      for (int c = 0; c < a_.count(); ++c) {
        if (c == changed || !spans(c, op)) continue;
        const int64_t x = after_last(c, op);
        const Move& m = moves_[c];
        if (m.taken() && m.release <= x && x < m.fetch) continue;
        // Random choice that favours absences away at nearby operations.
        const double distance = !m.taken() ? static_cast<double>(k_)
                                : x < m.release ? static_cast<double>(m.release - x)
                                                : static_cast<double>(x - m.fetch + 1);
        const double score = static_cast<double>(below(1 << 20) + 1) / (1.0 + distance);
        if (score > most) best = c, most = score;
      }
      if (best < 0) return false;
      const int64_t x = after_last(best, op);
      Move m = moves_[best];
      if (m.taken()) {
        m.release = std::min(m.release, x), m.fetch = std::max(m.fetch, x + 1);
      } else {
        m = {a_.last[best], x, x + 1};
        while (m.fetch < a_.use[best] && load_[m.fetch % k_] > limit_) ++m.fetch;
      }
      set(best, m);
    }
    return false;
  }

  int64_t first_over() const {
    for (int64_t op = 0; op < k_; ++op) {
      if (load_[op] > limit_) return op;
    }
    return -1;
  }

  // Keeps buffers on the device for longer where memory allows: later releases, earlier fetches, in two
  // orders.
  void relax() {
    const bool back_first = below(2);
    for (int pass = 0; pass < 2; ++pass) {
      const bool back = (pass == 0) == back_first;
      const auto& order = back ? by_use_ : p_.by_last();
      for (size_t i = 0; i < order.size(); ++i) {
        const int c = back ? order[i] : order[order.size() - 1 - i];
        Move m = moves_[c];
        if (!m.taken()) continue;
        const auto room = [&](int64_t op) { return load_[op % k_] + a_.size[c] <= limit_; };
        if (back) {
          while (m.release < m.fetch && room(m.fetch - 1)) --m.fetch;
        } else {
          while (m.release < m.fetch && room(m.release)) ++m.release;
        }
        if (m.release != moves_[c].release || m.fetch != moves_[c].fetch) set(c, m);
      }
    }
  }

  template <class Before>
  void insert(std::vector<int32_t>& heads, std::vector<int32_t>& next, int64_t op, int c, Before before) {
    int32_t* at = &heads[op];
    while (*at >= 0 && before(*at, c)) at = &next[*at];
    next[c] = *at;
    *at = c;
  }

  // Cost of the schedule: the stall; ties are broken by the seconds of the copies.
  double cost() {
    for (auto* heads : {&release_at_, &fetch_at_, &use_at_, &out_at_}) std::fill(heads->begin(), heads->end(), -1);
    double outs = 0, ins = 0, plain = begins_[k_];
    const auto used_first = [&](int x, int y) { return rank_[x] < rank_[y]; };
    for (int c = 0; c < a_.count(); ++c) {
      const Move& m = moves_[c];
      if (!m.taken()) continue;
      const auto none = [](int, int) { return false; };
      insert(release_at_, release_next_, m.release % k_, c, none);
      insert(use_at_, use_next_, a_.use[c] % k_, c, none);
      insert(fetch_at_, fetch_next_, m.fetch % k_, c, used_first);
      insert(out_at_, out_next_, m.out % k_, c, [&](int x, int y) {
        return moves_[x].release != moves_[y].release ? moves_[x].release < moves_[y].release : rank_[x] < rank_[y];
      });
      outs += free(c) ? 0 : a_.out[c], ins += a_.in[c];
    }
    const bool duplex = p_.duplex();
    const double pace = std::max(plain, duplex ? std::max(outs, ins) : outs + ins);
    double out_free = 0, in_free = 0, begin = 0, duration = plain;
    for (int turn = 0; turn < (p_.circular() ? 24 : 1); ++turn) {
      waits_.clear();
      const double end = replay(turn, begin, out_free, duplex ? in_free : out_free);
      const double before = duration;
      duration = end - begin, begin = end;
      turns_ = turn + 1;
      if (turn && std::abs(duration - before) <= 1e-9 * duration && duration >= pace * (1 - 1e-9)) break;
    }
    if (p_.circular()) duration = std::max(duration, pace);
    stall_ = duration <= plain * (1 + 1e-12) ? 0.0 : duration - plain;
    return stall_ + 1e-6 * (outs + ins);
  }

  double replay(int64_t turn, double begin, double& out_free, double& in_free) {
    double late = begin;
    for (int64_t op = 0; op < k_; ++op) {
      const auto waits = [&](double done, int c, bool back) {
        const double now = begins_[op] + late;
        if (done <= now) return;
        late += done - now;
        waits_.push_back({op, c, back});
      };
      for (int c = release_at_[op]; c >= 0; c = release_next_[c]) {
        const int64_t moved = turn - moves_[c].release / k_;
        if (moved >= 0) waits(out_done_[moved & 1][c], c, false);
      }
      for (int c = fetch_at_[op]; c >= 0; c = fetch_next_[c]) {
        const int64_t moved = turn - moves_[c].fetch / k_;
        if (moved >= 0) in_done_[moved & 1][c] = in_free = std::max(in_free, begins_[op] + late) + a_.in[c];
      }
      for (int c = use_at_[op]; c >= 0; c = use_next_[c]) {
        const int64_t moved = turn - a_.use[c] / k_;
        if (moved >= 0) waits(in_done_[moved & 1][c], c, true);
      }
      const double ended = begins_[op + 1] + late;
      for (int c = out_at_[op]; c >= 0; c = out_next_[c]) {
        const int64_t moved = turn - moves_[c].out / k_;
        if (moved < 0) continue;
        out_done_[moved & 1][c] = free(c) ? ended : out_free = std::max(out_free, ended) + a_.out[c];
      }
    }
    return begins_[k_] + late;
  }

  bool free(int c) const { return a_.source[c] >= 0 && moves_[a_.source[c]].taken(); }

  struct Undo {
    int c;
    Move to;
  };

  const Planner& p_;
  const Absences& a_;
  int64_t k_, limit_;
  std::vector<double> begins_, out_done_[2], in_done_[2];
  std::vector<int64_t> load_;
  std::vector<int32_t> by_use_, rank_;
  std::vector<int32_t> release_at_, fetch_at_, use_at_, out_at_, release_next_, fetch_next_, use_next_, out_next_;
  std::vector<Move> moves_;
  std::vector<Undo> undo_;
  std::vector<Cause> causes_, waits_;
  double stall_ = 0;
  int turns_ = 1;
  int64_t late_;
  uint64_t state_;
};

}  // namespace offload
