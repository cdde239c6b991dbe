// Maximum load first: the load decides which job fills a valley. The chosen job is the longest one that
// covers the instant of highest load (the fullest instant) of the valley, or the longest one of all if none
// covers that instant. The job may not rise above a wall under which the load is higher than in the valley.
//
// An arena is as small as the peak load if no bytes are lost at the instants of highest load. If a job ends
// higher than the wall beside it, the run under the wall becomes a valley in turn, and bytes not filled there
// are lost; if the job stays below the wall, bytes are lost in this valley, where the load is lower. So the
// fullest instants end up on the tops of hills, and their jobs are stacked nearly without a gap. Lost bytes
// count as load from then on; if the loss would make the arena too large, the job may rise above the wall
// after all.
#pragma once

#include "packing/random.hpp"
#include "packing/skyline.hpp"

namespace packing {

// Bytes that each instant needs, with queries for the fullest instant of an interval: a tree of maxima over
// blocks of instants.
class LoadTree {
 public:
  explicit LoadTree(std::vector<int64_t> load) : load_(std::move(load)) {
    while (leaves_ * width < count()) leaves_ *= 2;
    nodes_.resize(2 * leaves_);
    for (int32_t block = 0; block < leaves_; ++block) nodes_[leaves_ + block].most = most_in(block);
    for (int32_t k = leaves_; k-- > 1;) nodes_[k].most = most_below(k);
  }

  int64_t operator[](int32_t instant) const {
    int64_t load = load_[instant];
    for (auto k = static_cast<uint32_t>(leaves_ + instant / width); k >= 1; k /= 2) load += nodes_[k].added;
    return load;
  }

  // Adds bytes to all of [from, to).
  void add(int32_t from, int32_t to, int64_t bytes) {
    if (from >= to) return;
    const Part part = around(from, to);
    add(part, from, to, bytes);
    for (int32_t k = part.node / 2; k >= 1; k /= 2) {
      const int64_t most = most_below(k) + nodes_[k].added;
      if (nodes_[k].most == most) break;
      nodes_[k].most = most;
    }
  }

  // Bytes at the fullest instant.
  int64_t most() const { return nodes_[1].most; }

  // The fullest instant of [from, to), which must not be empty.
  int32_t fullest(int32_t from, int32_t to) const {
    Best best{-1, from};
    find(around(from, to), from, to, 0, best);
    return best.instant;
  }

 private:
  static constexpr int32_t width = 16;
  struct Node {
    int64_t most = -1;  // maximum below this node, without `added` of the nodes above
    int64_t added = 0;  // bytes added to all instants below
  };
  struct Part {  // a node and the blocks [low, high) below it
    int32_t node, low, high;
    int32_t middle() const { return (low + high) / 2; }
    Part left() const { return {2 * node, low, middle()}; }
    Part right() const { return {2 * node + 1, middle(), high}; }
  };
  struct Best {
    int64_t load;
    int32_t instant;
  };

  int32_t count() const { return static_cast<int32_t>(load_.size()); }
  int64_t most_in(int32_t block) const {
    int64_t most = -1;
    for (int32_t t = block * width; t < std::min(count(), (block + 1) * width); ++t) most = std::max(most, load_[t]);
    return most;
  }
  int64_t most_below(int32_t node) const { return std::max(nodes_[2 * node].most, nodes_[2 * node + 1].most); }

  // The lowest node that holds all of [from, to).
  Part around(int32_t from, int32_t to) const {
    auto first = static_cast<uint32_t>(leaves_ + from / width), last = static_cast<uint32_t>(leaves_ + (to - 1) / width);
    int32_t blocks = 1;
    for (; first != last; first /= 2, last /= 2) blocks *= 2;
    const auto node = static_cast<int32_t>(first);
    return {node, node * blocks - leaves_, (node + 1) * blocks - leaves_};
  }

  void add(Part part, int32_t from, int32_t to, int64_t bytes) {
    if (part.low * width >= to || part.high * width <= from) return;
    Node& node = nodes_[part.node];
    if (from <= part.low * width && part.high * width <= to) {
      node.added += bytes, node.most += bytes;
      return;
    }
    if (part.node >= leaves_) {
      for (int32_t t = std::max(from, part.low * width); t < std::min({to, count(), part.high * width}); ++t)
        load_[t] += bytes;
      node.most = most_in(part.low) + node.added;
      return;
    }
    add(part.left(), from, to, bytes);
    add(part.right(), from, to, bytes);
    node.most = most_below(part.node) + node.added;
  }

  void find(Part part, int32_t from, int32_t to, int64_t above, Best& best) const {
    if (part.low * width >= to || part.high * width <= from || nodes_[part.node].most + above <= best.load) return;
    above += nodes_[part.node].added;
    if (part.node >= leaves_) {
      for (int32_t t = std::max(from, part.low * width); t < std::min({to, count(), part.high * width}); ++t)
        if (load_[t] + above > best.load) best = {load_[t] + above, t};
      return;
    }
    const bool right_first = nodes_[2 * part.node + 1].most > nodes_[2 * part.node].most;
    for (const bool right : {right_first, !right_first})
      find(right ? part.right() : part.left(), from, to, above, best);
  }

  std::vector<int64_t> load_;
  std::vector<Node> nodes_;
  int32_t leaves_ = 1;
};

// The jobs not yet placed as points (start, end), found by rectangle queries.
class IntervalIndex {
 public:
  struct Match {
    int32_t slot = -1;    // slot of the job, or -1
    int32_t length = 0;
    int64_t size = 0;
  };

  IntervalIndex(const Jobs& jobs, const std::vector<int32_t>& candidates) {
    // Sorted along a Z-order curve (Morton, 1966), so that near points are near in memory.
    std::vector<std::pair<uint64_t, int32_t>> order;
    order.reserve(candidates.size());
    for (const int32_t job : candidates) {
      const Piece piece = arc(jobs, job);
      order.emplace_back(spread(piece.start) << 1 | spread(piece.end), job);
    }
    std::sort(order.begin(), order.end());
    for (const auto& [code, job] : order) {
      const Piece piece = arc(jobs, job);
      entries_.push_back({piece.start, piece.end, jobs.size[job], job});
    }
    while (leaves_ * bucket < entries_.size()) leaves_ *= 2;
    boxes_.assign(2 * leaves_, Box{});
    for (size_t leaf = 0; leaf * bucket < entries_.size(); ++leaf) boxes_[leaves_ + leaf] = box_of(leaf);
    for (size_t k = leaves_; k-- > 1;) boxes_[k] = join(boxes_[2 * k], boxes_[2 * k + 1]);
  }

  // Finds the longest job with start in [from, start_by], end in [end_from, to] and at most `most` bytes, if
  // it is longer than `found`.
  void longest(int32_t from, int32_t start_by, int32_t end_from, int32_t to, int64_t most, Match& found) const {
    find(1, {from, start_by, end_from, to, most}, found);
  }

  // Returns whether the found job is alive at an instant of a circle of this length; the instant may be one
  // turn ahead.
  bool covers(const Match& found, int32_t instant, int32_t circle) const {
    const Entry& e = entries_[found.slot];
    const int32_t since = (instant - e.start + circle) % circle;
    return since < e.end - e.start;
  }

  // Removes the found job and returns it.
  int32_t take(const Match& found) {
    Entry& entry = entries_[found.slot];
    const int32_t job = entry.job;
    entry.job = -1;
    renew(found.slot);
    return job;
  }

 private:
  // a search stops if a longer job could gain at most 1 / good_enough of its length
  static constexpr int32_t good_enough = 64;
  static constexpr int32_t bucket = 8, none = std::numeric_limits<int32_t>::max();
  struct Entry {
    int32_t start, end;
    int64_t size;
    int32_t job;  // -1: taken
  };
  struct Box {
    int32_t first_start = none, last_start = -1, first_end = none, last_end = -1;
    int64_t least = std::numeric_limits<int64_t>::max();
    bool operator==(const Box& other) const {
      return first_start == other.first_start && last_start == other.last_start && first_end == other.first_end &&
             last_end == other.last_end && least == other.least;
    }
  };
  struct Wanted {
    int32_t from, start_by, end_from, to;
    int64_t most;  // largest size
  };

  static uint64_t spread(int32_t value) {
    uint64_t x = static_cast<uint32_t>(value);
    x = (x | x << 16) & 0x0000ffff0000ffffu;
    x = (x | x << 8) & 0x00ff00ff00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
    x = (x | x << 2) & 0x3333333333333333u;
    return (x | x << 1) & 0x5555555555555555u;
  }
  static Box join(const Box& a, const Box& b) {
    return {std::min(a.first_start, b.first_start), std::max(a.last_start, b.last_start),
            std::min(a.first_end, b.first_end), std::max(a.last_end, b.last_end), std::min(a.least, b.least)};
  }
  void renew(int32_t slot) {
    size_t k = leaves_ + slot / bucket;
    boxes_[k] = box_of(slot / bucket);
    for (k /= 2; k >= 1; k /= 2) {
      const Box box = join(boxes_[2 * k], boxes_[2 * k + 1]);
      if (box == boxes_[k]) break;
      boxes_[k] = box;
    }
  }
  Box box_of(size_t leaf) const {
    Box box;
    for (size_t k = leaf * bucket; k < std::min((leaf + 1) * bucket, entries_.size()); ++k) {
      const Entry& e = entries_[k];
      if (e.job >= 0) box = join(box, {e.start, e.start, e.end, e.end, e.size});
    }
    return box;
  }
  // Upper bound on the length of a wanted job in the box; not positive if the box has none.
  static int32_t promise(const Box& box, const Wanted& w) {
    if (box.first_start > w.start_by || box.last_start < w.from || box.last_end < w.end_from || box.first_end > w.to ||
        box.least > w.most)
      return 0;
    return std::min(box.last_end, w.to) - std::max(box.first_start, w.from);
  }
  void find(size_t node, const Wanted& wanted, Match& found) const {
    if (node >= leaves_) {
      for (size_t k = (node - leaves_) * bucket; k < std::min((node - leaves_ + 1) * bucket, entries_.size()); ++k) {
        const Entry& e = entries_[k];
        const int32_t length = e.end - e.start;
        if (e.job < 0 || e.start < wanted.from || e.start > wanted.start_by || e.end < wanted.end_from ||
            e.end > wanted.to || e.size > wanted.most)
          continue;
        if (length < found.length || (length == found.length && e.size <= found.size)) continue;
        found = {static_cast<int32_t>(k), length, e.size};
      }
      return;
    }
    const int32_t left = promise(boxes_[2 * node], wanted), right = promise(boxes_[2 * node + 1], wanted);
    const bool right_first = right > left;
    for (const bool second : {right_first, !right_first})
      if (const int32_t most = second ? right : left; most - most / good_enough > found.length)
        find(2 * node + second, wanted, found);
  }

  std::vector<Entry> entries_;
  std::vector<Box> boxes_;
  size_t leaves_ = 1;
};

// Chooses jobs for an arena of at most `goal` bytes. `noise` is the largest fraction of the goal by which the
// load of intervals is overestimated at random, to get different choices.
class MaxLoadFirst {
 public:
  MaxLoadFirst(const Jobs& jobs, const std::vector<int32_t>& candidates, int64_t goal, double noise, Random& random)
      : goal_(goal), length_(jobs.instants - 1), load_(with_noise(load_of(jobs), noise * static_cast<double>(goal), random)),
        index_(jobs, candidates) {}

  // Takes and returns the job for a valley, or -1 if the valley should rise.
  int32_t take(const Valley& valley) {
    const bool alone = valley.to - valley.from == length_;  // then a job may lie anywhere on the circle
    const int32_t from = alone ? 0 : valley.from, to = alone ? 2 * length_ : valley.to;
    const int32_t fullest = fullest_of(valley);
    const int64_t here = load_[fullest % length_], wall = std::min(valley.before, valley.after);
    const int64_t room = std::numeric_limits<int64_t>::max() - valley.height;
    int64_t most = room;
    if (!alone) {
      if (load_[from > 0 ? from - 1 : length_ - 1] >= here) most = std::min(most, valley.before - valley.height);
      if (load_[to % length_] >= here) most = std::min(most, valley.after - valley.height);
    }
    IntervalIndex::Match found = longest(from, to, most);
    if (found.slot < 0 && most < room && here + wall - valley.height > goal_) found = longest(from, to, most = room);
    if (found.slot < 0) {
      if (alone) return -1;
      load_.add(valley.from, std::min(valley.to, length_), wall - valley.height);
      if (valley.to > length_) load_.add(0, valley.to - length_, wall - valley.height);
      return -1;
    }
    if (!index_.covers(found, fullest, length_)) {
      IntervalIndex::Match covering;
      for (const int32_t turn : {0, length_})
        if (to > turn) index_.longest(from - turn, fullest - turn, fullest - turn + 1, to - turn, most, covering);
      if (alone) index_.longest(from, fullest + length_, fullest + length_ + 1, to, most, covering);
      if (covering.slot >= 0) found = covering;
    }
    return index_.take(found);
  }

 private:
  static std::vector<int64_t> with_noise(std::vector<int64_t> load, double noise, Random& random) {
    if (noise <= 0) return load;
    const auto count = static_cast<int32_t>(load.size());
    for (int32_t t = 0; t < count;) {
      const auto more = static_cast<int64_t>(noise * random.unit());
      for (const int32_t until = std::min(count, t + 1 + random.below(1 + count / 8)); t < until; ++t) load[t] += more;
    }
    return load;
  }

  // Instant of highest load in a valley; may lie beyond the circle's length, as the valley's end may.
  int32_t fullest_of(const Valley& valley) const {
    const int32_t first = load_.fullest(valley.from, std::min(valley.to, length_));
    if (valley.to <= length_) return first;
    const int32_t second = load_.fullest(0, valley.to - length_);
    return load_[second] > load_[first] ? second + length_ : first;
  }

  // The longest job within [from, to) of at most `most` bytes.
  IntervalIndex::Match longest(int32_t from, int32_t to, int64_t most) const {
    IntervalIndex::Match found;
    for (const int32_t turn : {0, length_})
      if (to > turn) index_.longest(from - turn, to - turn, from - turn, to - turn, most, found);
    return found;
  }

  int64_t goal_;
  int32_t length_;
  LoadTree load_;
  IntervalIndex index_;
};

// Places all jobs: jobs that are fixed or have gaps by first fit, and above them the others, maximum load
// first. Returns no offsets when the arena would be above `limit`, or when cancelled.
inline std::vector<int64_t> pack_max_load_first(const Jobs& jobs, const std::vector<int32_t>& order, int64_t goal,
                                         int64_t limit, double noise, Random& random,
                                         const Cancel& cancel = Cancel()) {
  ValleyPacker packer(jobs);
  MaxLoadFirst chooser(jobs, packer.candidates(), goal, noise, random);
  const auto take = [&](const Valley& valley) { return chooser.take(valley); };
  return packer.pack(order, limit, cancel, take) < 0 ? std::vector<int64_t>() : packer.offsets();
}

}  // namespace packing
