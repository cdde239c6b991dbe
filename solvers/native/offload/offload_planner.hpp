// Offload planner: chooses which absences to use for a limit in bytes, and when each buffer is released and
// fetched.
//
// Times are numbers of operations; `begins_` holds the start of each operation in seconds. On a circle an
// absence may reach into the next turn: `last` lies in [0, K), everything after it in (last, last + K].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "offload/load_tree.hpp"

namespace offload {

// Seconds added to each copy, so that a schedule without stalls has no stalls under other roundings either.
constexpr double kSlack = 1e-9;

struct Absences {
  std::vector<int64_t> last, use, size;
  std::vector<double> out, in;  // seconds of the copies
  std::vector<int32_t> source;  // the absence whose host copy is still valid when this absence begins, or -1

  int count() const { return static_cast<int>(size.size()); }
};

struct Windows {
  std::vector<int64_t> release, fetch;  // away in [release, fetch); empty if release >= fetch
};

struct Result {
  std::vector<uint8_t> chosen;
  Windows away;
  double stall = std::numeric_limits<double>::infinity();
  int64_t peak = std::numeric_limits<int64_t>::max();
  std::vector<double> waits;  // per operation, in seconds
};

class Planner {
 public:
  Planner(std::vector<double> seconds, std::vector<int64_t> load, Absences absences, bool circular, bool duplex)
      : a_(std::move(absences)), seconds_(std::move(seconds)), load_(std::move(load)), circular_(circular),
        duplex_(duplex), k_(static_cast<int64_t>(seconds_.size())),
        large_(static_cast<double>(k_ + 8 * a_.count()) * a_.count() > kSmallWork) {
    by_last_ = sorted([&](int c) { return a_.last[c]; });
    by_use_ = sorted([&](int c) { return a_.use[c] % k_; });
    dilate({}, 0);
  }

  // Lengthens each operation by `share` of these waits.
  void dilate(const std::vector<double>& waits, double share) {
    begins_.assign(1, 0.0);
    for (int64_t op = 0; op < k_; ++op)  {
      if (!waits.empty()) begins_.back() += share * waits[op];
      begins_.push_back(begins_.back() + seconds_[op]);
    }
  }

  // Best windows of the chosen absences without stalls: copies out as early as possible, copies back as late
  // as possible.
  Windows windows(const std::vector<uint8_t>& chosen) {
    Windows w{std::vector<int64_t>(a_.count()), std::vector<int64_t>(a_.count())};
    busy_.clear();
    outs(chosen, w);
    ins(chosen, w);
    return w;
  }

  // Bytes on the device during each operation.
  std::vector<int64_t> loads(const std::vector<uint8_t>& chosen, const Windows& w) const {
    std::vector<int64_t> change(k_ + 1, 0);
    for (int c = 0; c < a_.count(); ++c) {
      if (chosen[c]) add(change, w.release[c], w.fetch[c], -a_.size[c]);
    }
    int64_t sum = 0;
    for (int64_t op = 0; op < k_; ++op) {
      sum += change[op];
      change[op] = load_[op] + sum;
    }
    change.pop_back();
    return change;
  }

  // Bytes over the limit, summed over operations.
  static double excess(const std::vector<int64_t>& loads, int64_t limit) {
    double sum = 0;
    for (const int64_t load : loads) sum += static_cast<double>(std::max<int64_t>(load - limit, 0));
    return sum;
  }

  // Chooses absences in the given order, each if it reduces the bytes over the limit without stalls; several
  // at once for a large step.
  std::vector<uint8_t> select_without_stall(const std::vector<int32_t>& order, int64_t limit) {
    Selection t{limit, std::vector<uint8_t>(a_.count(), 0), {}, 0};
    t.now = loads(t.chosen, windows(t.chosen));
    t.over = excess(t.now, limit);
    const auto n = static_cast<int64_t>(order.size());
    t.left = std::max(kLeastEvaluations, static_cast<int64_t>(kSmallWork / static_cast<double>(k_ + 8 * a_.count())));
    const int64_t each = large_ ? 2 * n / t.left + 1 : 1;
    for (int64_t first = 0; first < n && t.over > 0; first += each) {
      take(std::vector<int32_t>(order.begin() + first, order.begin() + std::min(first + each, n)), t);
    }
    return t.chosen;
  }

  // Chooses more absences in the given order until the load would be within the limit if copies took no time.
  // Returns false if no choice suffices.
  bool cover(const std::vector<int32_t>& order, int64_t limit, std::vector<uint8_t>& chosen) const {
    LoadTree now(loads(chosen, instant_windows()));
    for (const int32_t c : order) {
      if (chosen[c] || !covers(c, now, limit)) continue;
      chosen[c] = 1;
      now.add(a_.last[c] + 1, a_.use[c], -a_.size[c]);
    }
    return now.first_over(0, k_, limit) == k_;
  }

  // Removes absences that are not needed, the last of the order first.
  void prune(const std::vector<int32_t>& order, int64_t limit, std::vector<uint8_t>& chosen, const Windows& w) const {
    LoadTree now(loads(chosen, w));
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      const int32_t c = *it;
      if (!chosen[c] || now.first_over(w.release[c], w.fetch[c], limit - a_.size[c]) < w.fetch[c]) continue;
      now.add(w.release[c], w.fetch[c], a_.size[c]);
      chosen[c] = 0;
    }
  }

  // Uses spare memory: delays the waits for copies out, the last copies of the queue first, and starts copies
  // back earlier, the first uses first, none before a copy that is used earlier.
  void relax(int64_t limit, const std::vector<uint8_t>& chosen, Windows& w) const {
    LoadTree now(loads(chosen, w));
    for (auto it = by_last_.rbegin(); it != by_last_.rend(); ++it) {
      const int32_t c = *it;
      if (!chosen[c] || w.release[c] + 1 >= w.fetch[c]) continue;
      const int64_t from = w.release[c];
      w.release[c] = now.first_over(from, w.fetch[c] - 1, limit - a_.size[c]);
      now.add(from, w.release[c], a_.size[c]);
    }
    int64_t before = 0;  // within the turn
    for (const int32_t c : by_use_) {
      if (!chosen[c] || w.release[c] >= w.fetch[c]) continue;
      const int64_t turn = a_.use[c] / k_ * k_, to = w.fetch[c];
      w.fetch[c] = std::min(now.last_over(std::max(w.release[c] + 1, turn + before), to, limit - a_.size[c]) + 1, to);
      now.add(w.fetch[c], to, a_.size[c]);
      before = std::max(before, w.fetch[c] - turn);
    }
  }

  // Enforces the limit at any cost: where the load exceeds the limit, waits for copies out or postpones
  // copies back.
  void hold(int64_t limit, const std::vector<uint8_t>& chosen, Windows& w) {
    auto now = loads(chosen, w);
    CheapestMoves cheapest(*this, chosen, w);
    for (int64_t op = 0; op < k_; ++op) {
      cheapest.at(op);
      double later = 0;  // seconds that the operation waits already
      double queued = 0;  // seconds of copies back that were postponed to the next operation
      while (now[op] > limit) {
        int best = -1;
        double least = std::numeric_limits<double>::infinity();
        cheapest.each([&](int c) {
          const int64_t x = within(c, op);
          double cost = 0;
          if (w.release[c] > x) cost += std::max(out_end_[c] - time(x) - later, 0.0);
          if (w.fetch[c] <= x) cost += std::max(time(x + 1) + later + queued + a_.in[c] - time(a_.use[c]), 0.0);
          if (cost > least) return false;  // the following absences cost no less
          if (cost < least || a_.size[c] > a_.size[best] || (a_.size[c] == a_.size[best] && c < best)) best = c, least = cost;
          return true;
        });
        if (best < 0) return;
        const int64_t x = within(best, op);
        const int64_t from = std::min(w.release[best], x);
        int64_t to = std::max(w.fetch[best], x + 1);
        // In a large step the buffer stays away as long as memory is short and nothing waits for the copy
        // back.
        while (large_ && to < a_.use[best] && now[to % k_] > limit && time(to + 1) + a_.in[best] <= time(a_.use[best])) ++to;
        if (w.release[best] > x) later = std::max(later, out_end_[best] - time(x));
        if (w.fetch[best] <= x) queued += a_.in[best];
        const auto leaves = [&](int64_t o) { now[o] -= a_.size[best]; };
        const bool away = w.release[best] < w.fetch[best];
        each(from, away ? w.release[best] : to, leaves);
        if (away) each(w.fetch[best], to, leaves);
        w.release[best] = from;
        w.fetch[best] = to;
        cheapest.changed(best);
      }
    }
  }

  // Sets the cost of a wait for a copy back relative to a copy out.

  // Returns the seconds that operations wait for copies, in steady state on a circle; `waits` receives the
  // wait of each operation.
  double stall(const std::vector<uint8_t>& chosen, const Windows& w, std::vector<double>& waits) const;

  // Returns the best of a few rounds for this order: operations that wait in one round count as longer in the
  // next.
  Result plan(const std::vector<int32_t>& order, int64_t limit, int rounds);

  int count() const { return a_.count(); }
  int64_t operations() const { return k_; }
  const Absences& absences() const { return a_; }
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<int64_t>& load() const { return load_; }
  const std::vector<int32_t>& by_last() const { return by_last_; }
  bool circular() const { return circular_; }
  bool duplex() const { return duplex_; }

  template <class Visit>
  void each(int64_t from, int64_t to, Visit visit) const {
    for (int64_t op = from; op < to; ++op) visit(op < k_ ? op : op - k_);
  }

 private:
  template <class Key>
  std::vector<int32_t> sorted(Key key) const {
    std::vector<int32_t> order(a_.count());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return key(x) < key(y); });
    return order;
  }

  double time(int64_t op) const {
    if (op < k_) return begins_[op];
    return begins_[op % k_] + begins_[k_] * static_cast<double>(op / k_);
  }

  // first_from: the first operation that begins at `at` or later; last_until: the last that begins at `at` or
  // earlier.
  int64_t first_from(double at) const {
    const double turn = circular_ ? std::floor(at / begins_[k_]) : 0;
    const double within = at - turn * begins_[k_];
    const int64_t op = std::lower_bound(begins_.begin(), begins_.end() - 1, within) - begins_.begin();
    return op + static_cast<int64_t>(turn) * k_;
  }
  int64_t last_until(double at) const {
    const double turn = circular_ ? std::floor(at / begins_[k_]) : 0;
    const double within = at - turn * begins_[k_];
    const int64_t op = std::upper_bound(begins_.begin(), begins_.end() - 1, within) - begins_.begin() - 1;
    return op + static_cast<int64_t>(turn) * k_;
  }

  void add(std::vector<int64_t>& change, int64_t from, int64_t to, int64_t size) const {
    if (from >= to) return;
    if (from >= k_) from -= k_, to -= k_;
    change[from] += size;
    if (to <= k_) {
      change[to] -= size;
    } else {
      change[0] += size;
      change[to - k_] -= size;
    }
  }

  // Returns the operation, counted on into the next turn if needed, so that it lies after the absence's last
  // access.
  int64_t within(int c, int64_t op) const { return op > a_.last[c] ? op : op + k_; }

  bool covers(int c, const LoadTree& now, int64_t limit) const {
    return now.first_over(a_.last[c] + 1, a_.use[c], limit) < a_.use[c];
  }

  // Absences chosen so far without stalls.
  struct Selection {
    int64_t limit;
    std::vector<uint8_t> chosen;
    std::vector<int64_t> now;
    double over, out = 0, in = 0;
    int64_t left = 0;  // number of schedules that may still be evaluated
  };

  // Chooses these absences if they reduce the bytes over the limit; otherwise tries each half of them.
  void take(std::vector<int32_t> rows, Selection& t) {
    double out = t.out, in = t.in;
    const bool many = rows.size() > 16;
    const LoadTree now(many ? t.now : std::vector<int64_t>());
    const auto useful = [&](int32_t c) {
      if (t.chosen[c]) return false;
      if (many) return covers(c, now, t.limit);
      bool any = false;
      each(a_.last[c] + 1, a_.use[c], [&](int64_t op) { any |= t.now[op] > t.limit; });
      return any;
    };
    std::vector<int32_t> kept;
    for (const int32_t c : rows) {
      if (!useful(c)) continue;
      // On a circle the copy engines must complete the copies of a turn within a turn.
      const double outs = out + a_.out[c] + kSlack, ins = in + a_.in[c] + kSlack;
      if (circular_ && (duplex_ ? std::max(outs, ins) : outs + ins) > begins_[k_]) continue;
      out = outs, in = ins;
      kept.push_back(c);
    }
    if (kept.empty()) return;
    for (const int32_t c : kept) t.chosen[c] = 1;
    auto with = loads(t.chosen, windows(t.chosen));
    const double then = excess(with, t.limit);
    --t.left;
    if (then < t.over) {
      t.over = then, t.out = out, t.in = in;
      t.now.swap(with);
      return;
    }
    for (const int32_t c : kept) t.chosen[c] = 0;
    if (kept.size() == 1 || t.left <= 0) return;
    const auto half = kept.begin() + static_cast<int64_t>(kept.size() / 2);
    take({kept.begin(), half}, t);
    take({half, kept.end()}, t);
  }

  // The chosen absences whose buffers are on the device at an operation but could be away, by increasing cost
  // of their copies.
  class CheapestMoves {
   public:
    CheapestMoves(const Planner& planner, const std::vector<uint8_t>& chosen, const Windows& w)
        : p_(planner), w_(w), update_at_(planner.k_), key_(planner.a_.count()), queue_of_(planner.a_.count(), 0),
          most_visited_(planner.large_ ? 64 : planner.a_.count()) {
      for (int c = 0; c < p_.a_.count(); ++c) {
        if (!chosen[c]) continue;
        for (const int64_t op : {int64_t{0}, p_.a_.last[c] + 1, w.release[c], w.fetch[c], p_.a_.use[c]})
          if (op < p_.k_ || p_.circular_) update_at_[op % p_.k_].push_back(c);
      }
    }

    void at(int64_t op) {
      op_ = op;
      for (const int32_t c : update_at_[op]) update(c);
    }

    void changed(int c) {
      update(c);
      const int64_t to = w_.fetch[c] % p_.k_;
      if (to > op_ && w_.fetch[c] < p_.a_.use[c]) update_at_[to].push_back(c);
    }

    // Calls visit(absence) on the leaving and then on the returned buffers, as long as `visit` returns true.
    template <class Visit>
    void each(Visit visit) const {
      for (const auto* some : {&leaving_, &returned_}) {
        int left = most_visited_;
        for (auto it = some->begin(); it != some->end() && left > 0 && visit(it->second); ++it) --left;
      }
    }

   private:
    void update(int c) {
      if (queue_of_[c]) (queue_of_[c] == 1 ? leaving_ : returned_).erase({key_[c], c});
      queue_of_[c] = 0;
      const int64_t x = p_.within(c, op_);
      if (x >= p_.a_.use[c] || (!p_.circular_ && x >= p_.k_) || (w_.release[c] <= x && x < w_.fetch[c])) return;
      const double turn = x >= p_.k_ ? p_.begins_[p_.k_] : 0;
      queue_of_[c] = w_.release[c] > x ? 1 : 2;
      key_[c] = queue_of_[c] == 1 ? p_.out_end_[c] - turn : p_.a_.in[c] + turn - p_.time(p_.a_.use[c]);
      (queue_of_[c] == 1 ? leaving_ : returned_).insert({key_[c], c});
    }

    const Planner& p_;
    const Windows& w_;
    std::vector<std::vector<int32_t>> update_at_;
    std::vector<double> key_;
    std::vector<uint8_t> queue_of_;
    std::set<std::pair<double, int>> leaving_, returned_;
    int64_t op_ = 0;
    int most_visited_;
  };

  static constexpr int64_t kLeastEvaluations = 64;
  static constexpr double kSmallWork = 12e6;

  Windows instant_windows() const {
    Windows w{a_.last, a_.use};
    for (auto& op : w.release) ++op;
    return w;
  }

  bool reuses_copy(int c, const std::vector<uint8_t>& chosen) const {
    return a_.source[c] >= 0 && chosen[a_.source[c]];
  }

  void outs(const std::vector<uint8_t>& chosen, Windows& w) {
    double free = -std::numeric_limits<double>::infinity();
    out_end_.resize(a_.count());
    for (int pass = circular_ ? 0 : 1; pass < 2; ++pass) {
      if (circular_ && pass) free -= begins_[k_];
      for (const int32_t c : by_last_) {
        if (!chosen[c]) continue;
        const double ready = begins_[a_.last[c]] + seconds_[a_.last[c]];
        double end = ready;
        if (!reuses_copy(c, chosen)) {
          const double start = std::max(free, ready);
          end = free = start + a_.out[c] + kSlack;
          if (pass && !duplex_) busy_.push_back({start, end});
        }
        if (!pass) continue;
        out_end_[c] = end;
        w.release[c] = std::min(std::max(first_from(end), a_.last[c] + 1), a_.use[c]);
      }
    }
  }

  void ins(const std::vector<uint8_t>& chosen, Windows& w) {
    double free = std::numeric_limits<double>::infinity();
    for (int pass = circular_ ? 0 : 1; pass < 2; ++pass) {
      if (circular_ && pass) free += begins_[k_];
      for (auto it = by_use_.rbegin(); it != by_use_.rend(); ++it) {
        const int32_t c = *it;
        if (!chosen[c]) continue;
        const int64_t within = a_.use[c] % k_;
        double end = std::min(free, begins_[within]);
        if (!duplex_) end = before_busy(end, a_.in[c] + kSlack);
        free = end - a_.in[c] - kSlack;
        if (!pass) continue;
        const int64_t op = free < 0 && !circular_ ? 0 : last_until(free);
        w.fetch[c] = std::max(op + a_.use[c] - within, a_.last[c] + 1);
      }
    }
  }

  // Latest end of a copy of `seconds` that is no later than `end` and overlaps no copy out.
  double before_busy(double end, double seconds) const {
    const double turn = circular_ ? std::floor((end - seconds) / begins_[k_]) * begins_[k_] : 0;
    for (auto it = busy_.rbegin(); it != busy_.rend(); ++it) {
      if (it->first + turn < end && it->second + turn > end - seconds) end = it->first + turn;
    }
    return end;
  }

  Absences a_;
  std::vector<double> seconds_, begins_, out_end_;
  std::vector<int64_t> load_;
  bool circular_, duplex_;
  int64_t k_;
  bool large_;  // too many operations and absences to examine one by one
  std::vector<int32_t> by_last_, by_use_;
  std::vector<std::pair<double, double>> busy_;
};

inline double Planner::stall(const std::vector<uint8_t>& chosen, const Windows& w, std::vector<double>& waits) const {
  struct Event {
    int64_t op;
    int action, c;  // 0 release, 1 fetch, 2 use, 3 out
    int64_t turns;
  };
  std::vector<Event> events;
  double plain = 0, all_out = 0, all_in = 0;
  for (const double s : seconds_) plain += s;
  for (int c = 0; c < a_.count(); ++c) {
    if (!chosen[c] || w.release[c] >= w.fetch[c]) continue;
    const int64_t at[] = {w.release[c], w.fetch[c], a_.use[c], a_.last[c]};
    for (int action = 0; action < 4; ++action) events.push_back({at[action] % k_, action, c, at[action] / k_});
    if (!reuses_copy(c, chosen)) all_out += a_.out[c];
    all_in += a_.in[c];
  }
  std::sort(events.begin(), events.end(), [&](const Event& x, const Event& y) {
    if (x.op != y.op) return x.op < y.op;
    if (x.action != y.action) return x.action < y.action;
    if (x.action == 1 && a_.use[x.c] != a_.use[y.c]) return a_.use[x.c] < a_.use[y.c];
    if (x.action == 3 && w.release[x.c] != w.release[y.c]) return w.release[x.c] < w.release[y.c];
    return x.c < y.c;
  });
  std::vector<double> plain_begins(1, 0.0);
  for (const double s : seconds_) plain_begins.push_back(plain_begins.back() + s);
  // End of each absence's copies, for even and odd turns.
  std::vector<double> out_done[2], in_done[2];
  for (int t = 0; t < 2; ++t) out_done[t].assign(a_.count(), 0.0), in_done[t].assign(a_.count(), 0.0);
  double out_free = 0, in_free = 0, begin = 0, duration = plain, before = -1;
  const double pace = std::max(plain, duplex_ ? std::max(all_out, all_in) : all_out + all_in);
  for (int turn = 0; turn < (circular_ ? 24 : 1); ++turn) {
    waits.assign(k_, 0.0);
    double late = begin;
    for (const Event& e : events) {
      const double now = plain_begins[e.action == 3 ? e.op + 1 : e.op] + late;
      const int64_t moved = turn - e.turns;
      if (moved < 0) continue;
      double& in_free_of = duplex_ ? in_free : out_free;
      double done = 0;
      switch (e.action) {
        case 3:
          out_done[moved & 1][e.c] =
              reuses_copy(e.c, chosen) ? now : out_free = std::max(out_free, now) + a_.out[e.c];
          continue;
        case 1:
          in_done[moved & 1][e.c] = in_free_of = std::max(in_free_of, now) + a_.in[e.c];
          continue;
        case 0: done = out_done[moved & 1][e.c]; break;
        default: done = in_done[moved & 1][e.c];
      }
      if (done > now) waits[e.op] += done - now, late += done - now;
    }
    const double end = plain_begins[k_] + late;
    before = duration, duration = end - begin, begin = end;
    if (turn && std::abs(duration - before) <= 1e-9 * duration && duration >= pace * (1 - 1e-9)) break;
  }
  if (circular_) duration = std::max(duration, pace);
  double sum = 0;
  for (const double wait : waits) sum += wait;
  return sum == 0 && duration <= plain * (1 + 1e-12) ? 0.0 : std::max(duration - plain, 0.0);
}

inline Result Planner::plan(const std::vector<int32_t>& order, int64_t limit, int rounds) {
  Result best;
  std::vector<double> waits;
  const auto attempt = [&](double share) {
    dilate(waits, share);
    Result result;
    result.chosen = select_without_stall(order, limit);
    if (excess(loads(result.chosen, windows(result.chosen)), limit) > 0 && !cover(order, limit, result.chosen))
      return result;
    result.away = windows(result.chosen);
    hold(limit, result.chosen, result.away);
    prune(order, limit, result.chosen, result.away);
    relax(limit, result.chosen, result.away);
    result.stall = stall(result.chosen, result.away, result.waits);
    const auto now = loads(result.chosen, result.away);
    result.peak = now.empty() ? 0 : *std::max_element(now.begin(), now.end());
    if (result.stall < best.stall) best = result;
    return result;
  };
  Result last = attempt(0);
  for (int round = 1; round < rounds && best.stall > 0 && std::isfinite(last.stall); ++round) {
    waits = last.waits;
    last = attempt(1);
  }
  double low = 0, high = 1;  // bisects for the smallest share of the best schedule's waits that helps
  for (int round = 1; round < rounds && best.stall > 0 && std::isfinite(best.stall); ++round) {
    waits = best.waits;
    const double share = (low + high) / 2, before = best.stall;
    attempt(share);
    if (best.stall < before) {
      low = 0, high = 1;
    } else {
      low = share;
    }
  }
  dilate({}, 0);
  return best;
}

}  // namespace offload
