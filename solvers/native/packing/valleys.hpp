// Search state: the skyline of a packing built from below, its valleys, and the possible next steps in each
// valley.
//
// The skyline is a chain of runs: maximal groups of adjacent sections of one height. A *valley* is a run
// lower than both neighbours, its walls. A job placed at a valley's height lies within the valley. So at any
// section of a valley there are few options: place one of the jobs within the valley that cover the section,
// or *skip* the section: no job stands at this section at this height, and the section rises. If no job still to be
// placed crosses a boundary between sections, the two sides are independent: such a boundary is a *cut*, and
// acts as a wall of infinite height.
//
// Completeness: move all jobs of a plan down as far as possible, and place them by offset. Then each job
// stands on the ground or on top of another job that meets it. If in a valley of height h no job within
// covers section s at h, consider the next job above s. It reaches beyond the valley and stands no lower than
// the lower wall; or it lies within the valley and stands on a job within that does not cover s and has its
// own size above h; or its alignment or fixed offset has kept it from h. The smallest of these heights is the
// height to which s rises.
#pragma once

#include <limits>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "packing/sections.hpp"

namespace packing {

// Optional rules that only save work. Each can be switched off without changing the answer.
enum Rules : uint32_t {
  rule_merge = 1,          // use sections, maximal groups of instants, instead of instants
  rule_fill_bound = 2,     // fail if filling a valley up to its walls must lose more bytes than the slack
  rule_skip_section = 4,   // a skipped section rises to the lowest possible top, not byte by byte
  rule_jumps = 8,          // after a failure, decisions that have not contributed to it are undone without trying others
  rule_height_bound = 16,  // the jobs left at a section must fit above it with their alignments and fixed offsets
  every_rule = 31,
};

class Valleys {
 public:
  static constexpr int64_t no_wall = std::numeric_limits<int64_t>::max();
  static constexpr int64_t most = int64_t{1} << 62;  // largest sum of bytes anywhere
  static constexpr int32_t no_valley = -1;
  static constexpr double must_rise = -1;  // score of a section that no job within its valley covers
  static constexpr int64_t most_pinned = int64_t{1} << 26;  // sections of all fixed jobs together

  struct Item {
    int32_t begin, end;  // sections
    int64_t size;        // bytes, padded to the coarsest alignment common to all jobs
    int64_t bytes;       // bytes without padding
    int64_t mask;        // alignment - 1
    int64_t fixed;       // required offset, or -1
  };

  struct Run {
    int32_t begin, end;     // sections
    int64_t height;
    int32_t before, after;  // neighbours, or -1
    int32_t options;        // options at `section`: jobs, plus skip if `skip` >= 0; or no_valley
    int32_t section;        // best section to branch on
    int32_t until;          // to skip raises the sections [section, until)
    int64_t skip;           // to this height, or -1 if they cannot
    double score;           // number of options over the section's weight; the lowest is branched on first
  };

  // The jobs must have one piece each.
  Valleys(const Jobs& jobs, int64_t capacity, uint32_t rules);

  // False if the capacity is proven too small before any job is placed.
  bool promising() const { return promising_; }

  int32_t sections() const { return static_cast<int32_t>(slack_.size()); }
  int32_t run_at(int32_t section) const { return run_at_[section]; }
  const Run& run(int32_t index) const { return runs_[index]; }
  const Item& item(int32_t job) const { return items_[job]; }
  bool is_cut(int32_t boundary) const { return crossing_[boundary] == 0; }
  int32_t jobs_left() const { return jobs_left_; }
  // In the order of the given jobs; -1 for jobs not yet placed.
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result(order_.size());
    for (size_t k = 0; k < order_.size(); ++k) result[order_[k]] = offset_[k];
    return result;
  }
  int64_t steps() const { return steps_; }

  // Calls take(job) for the jobs that may stand in the valley and cover its section.
  template <class Take>
  void options(const Run& run, Take take) const {
    for (int32_t s = run.begin; s <= run.section; ++s)
      for (int32_t job = first_[s]; job >= 0 && items_[job].end <= run.end; job = next_[job])
        if (items_[job].end > run.section && stands(items_[job], run.height)) take(job);
  }

  // place() and skip() return false when a rule proves a dead end; undo() reverts them in either case.
  bool place(int32_t job, int32_t run);
  bool skip(int32_t run);
  // Sections of the dead end: no plan exists with the heights of these sections and the jobs not yet placed there.
  Piece conflict() const { return conflict_; }

  size_t mark() const { return trail_.size(); }
  // Sections that the first step since the mark has filled or raised.
  Piece filled_at(size_t mark) const { return {trail_[mark].begin, trail_[mark].end}; }
  // Reverts all steps since the mark. Each that filled or raised a section of the conflict adds the sections that its
  // valley depended on, so that the conflict holds before the step, too. Returns whether the first step did.
  bool undo(size_t mark, Piece& conflict);
  static Piece hull(Piece a, Piece b) { return {std::min(a.start, b.start), std::max(a.end, b.end)}; }
  void forget() { std::fill(weight_.begin(), weight_.end(), 1.0); }

 private:
  struct Step {
    int32_t job;          // placed, or -1: sections rose
    int32_t begin, end;   // sections filled or raised
    Piece cause;          // sections that the options of the valley depended on
    int64_t by;           // by this many bytes
    int32_t first, last;  // runs that were replaced
    int32_t runs;         // number of runs before
  };
  struct Part {
    int32_t begin, end;
    int64_t height;
  };

  bool stands(const Item& item, int64_t height) const {
    return (height & item.mask) == 0 && (item.fixed < 0 || item.fixed == height);
  }
  // Sections that the options of a valley depend on: the valley and its walls.
  Piece cause(const Run& run) const { return {run.begin - !is_cut(run.begin), run.end + !is_cut(run.end)}; }
  bool replace(int32_t run, int32_t begin, int32_t end, int64_t height);
  void widen(int32_t& first, int32_t& last);
  bool link(int32_t first, int32_t last);
  bool evaluate(Run& run);
  int64_t gather(const Run& run);
  bool below_pinned(int32_t begin, int32_t end, int64_t height) const;
  void measure(const Jobs& jobs, const Sections& sections);
  void sort(const std::vector<Item>& items);
  void chain();
  void pin();
  void build_height_bounds();
  bool holds(int32_t begin, int32_t end, int64_t height);
  std::vector<int64_t> stand();
  void take_out(int32_t job);

  uint32_t rules_;
  bool promising_ = true;
  int64_t capacity_;
  int64_t grain_ = 1;  // all heights are multiples of this many bytes
  int64_t steps_ = 0;   // sections and jobs examined
  int32_t jobs_left_ = 0;  // not yet placed
  std::vector<Item> items_;      // jobs by begin, then end: those of a valley are adjacent in memory
  std::vector<int32_t> order_;   // the job of each item
  std::vector<int64_t> offset_;                // per job: offset, or -1
  // linked lists of jobs not yet placed, by begin, then end; last_ links back
  std::vector<int32_t> first_, next_, last_;
  std::vector<int64_t> slack_;                 // per section: capacity - height - bytes not yet placed
  std::vector<int32_t> crossing_;              // per boundary: number of jobs not yet placed that cross it
  // jobs with a fixed offset, lowest first; those of section s start at pinned_at_[s]
  std::vector<int32_t> pinned_, pinned_at_;
  HeightBounds height_bounds_;                          // per section, or empty
  std::vector<double> weight_;                 // per section: 1 + failures there since the last forget()
  std::vector<Run> runs_;
  std::vector<int32_t> run_at_;                // the run that begins at a section
  std::vector<Step> trail_;
  Piece conflict_{0, 0};
  std::vector<Part> parts_;
  // Scratch of evaluate(), by section of the run.
  struct Column {
    // differences in the number of jobs within that cover the section, and that may stand there
    int32_t covers = 0, stands = 0;
    int64_t load = 0;                // differences of their bytes
    int64_t least_begin = no_wall, least_end = no_wall;  // smallest job within that begins, or ends, here
  };
  std::vector<Column> columns_;
};

inline Valleys::Valleys(const Jobs& jobs, int64_t capacity, uint32_t rules) : rules_(rules), capacity_(capacity) {
  const Sections sections = sections_of(jobs, rules & rule_merge);
  measure(jobs, sections);
  chain();
  pin();
  const int32_t count = sections.count;
  columns_.assign(count + 1, Column());
  weight_.assign(count, 1);
  run_at_.assign(count, -1);
  for (const int64_t slack : slack_) promising_ = promising_ && slack >= 0;
  if (rules & rule_height_bound) build_height_bounds();
  const std::vector<int64_t> ground = stand();
  for (int32_t s = 0; s < count; ++s) promising_ = promising_ && height_bounds_.holds(s, ground[s]);
  for (int32_t s = 0, from = 0; s < count; ++s) {
    if (!is_cut(s + 1) && ground[s] == ground[s + 1]) continue;
    const auto index = static_cast<int32_t>(runs_.size());
    run_at_[from] = index;
    runs_.push_back({from, s + 1, ground[s], index - 1, s + 1 < count ? index + 1 : -1, no_valley, from, from, -1, 0});
    from = s + 1;
  }
  for (Run& run : runs_) promising_ = promising_ && evaluate(run);
}

// Stands the jobs fixed at offset 0. Returns the height of each section, plus one more entry.
inline std::vector<int64_t> Valleys::stand() {
  std::vector<int64_t> ground(slack_.size() + 1, 0);
  for (int32_t job = 0; job < static_cast<int32_t>(items_.size()); ++job) {
    const Item& item = items_[job];
    if (item.fixed != 0) continue;
    promising_ = promising_ && item.bytes <= capacity_;
    take_out(job);
    offset_[job] = 0;
    for (int32_t s = item.begin; s < item.end; ++s) {
      promising_ = promising_ && ground[s] == 0;
      ground[s] = item.size;
    }
  }
  return ground;
}

// Removes a job from the lists of jobs not yet placed.
inline void Valleys::take_out(int32_t job) {
  const Item& item = items_[job];
  --jobs_left_;
  if (last_[job] >= 0) next_[last_[job]] = next_[job];
  else first_[item.begin] = next_[job];
  if (next_[job] >= 0) last_[next_[job]] = last_[job];
  for (int32_t b = item.begin + 1; b < item.end; ++b) --crossing_[b];
}

// Creates the items, and sums their bytes and counts at each section and boundary.
inline void Valleys::measure(const Jobs& jobs, const Sections& sections) {
  const int32_t n = jobs.count(), count = sections.count;
  // A job at a multiple of an alignment with its size rounded up to the alignment ends at a multiple.
  int64_t coarse = n > 0 ? most - 1 : 0;
  for (int32_t j = 0; j < n; ++j) {
    if (jobs.fixed[j] < 0) coarse = std::min(coarse, jobs.mask[j]);
    else if (jobs.fixed[j] > 0) coarse = std::min(coarse, (jobs.fixed[j] & -jobs.fixed[j]) - 1);
  }
  if (coarse == most - 1) coarse = 0;
  grain_ = coarse + 1;
  int64_t padding = 0, total = 0;
  std::vector<Item> items;
  items.reserve(n);
  for (int32_t j = 0; j < n; ++j) {
    if (!jobs.single(j)) throw std::invalid_argument("a job of several pieces");
    const int64_t largest = std::max({jobs.size[j], jobs.mask[j], jobs.fixed[j]});
    if (largest > most) throw std::invalid_argument("too many bytes");
    const int64_t padded = (jobs.size[j] + coarse) & ~coarse;
    padding = std::max(padding, padded - jobs.size[j]);
    if (padded > most - total) throw std::invalid_argument("too many bytes");
    total += padded;
    const Piece span = sections.span[j];
    items.push_back({span.start, span.end, padded, jobs.size[j], jobs.mask[j], jobs.fixed[j]});
  }
  sort(items);
  capacity_ = std::clamp<int64_t>(capacity_, 0, most);
  offset_.assign(n, -1);
  std::vector<int64_t> load(count + 1, 0);
  crossing_.assign(count + 2, 0);
  for (const Item& item : items_) {
    load[item.begin] += item.size, load[item.end] -= item.size;
    ++crossing_[item.begin + 1], --crossing_[item.end];
  }
  // The topmost job of a section may end beyond the capacity with its padding.
  for (int32_t s = 0; s < count; ++s) {
    slack_.push_back(((capacity_ + padding) & ~coarse) - load[s]);
    load[s + 1] += load[s], crossing_[s + 1] += crossing_[s];
  }
}

inline void Valleys::sort(const std::vector<Item>& items) {
  const auto key = [](const Item& i) { return std::tuple(i.begin, i.end, -i.size); };
  order_.resize(items.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return key(items[a]) < key(items[b]); });
  items_.reserve(items.size());
  for (const int32_t job : order_) items_.push_back(items[job]);
}

// Builds the lists of jobs not yet placed.
inline void Valleys::chain() {
  const auto n = static_cast<int32_t>(items_.size());
  jobs_left_ = n;
  first_.assign(slack_.size(), -1);
  next_.assign(n, -1);
  last_.assign(n, -1);
  for (int32_t k = n; k-- > 0;) {
    int32_t& head = first_[items_[k].begin];
    next_[k] = head;
    if (head >= 0) last_[head] = k;
    head = k;
  }
}

// Lists jobs with a fixed offset by section: no section may rise into its next fixed job.
inline void Valleys::pin() {
  std::vector<int32_t> pinned;
  int64_t places = 0;
  for (size_t j = 0; j < items_.size(); ++j)
    if (items_[j].fixed > 0) pinned.push_back(static_cast<int32_t>(j)), places += items_[j].end - items_[j].begin;
  if (pinned.empty()) return;
  if (places > most_pinned) throw std::invalid_argument("too many fixed offsets");
  std::stable_sort(pinned.begin(), pinned.end(),
                   [&](int32_t a, int32_t b) { return items_[a].fixed < items_[b].fixed; });
  pinned_at_.assign(slack_.size() + 2, 0);
  for (const int32_t job : pinned)
    for (int32_t s = items_[job].begin; s < items_[job].end; ++s) ++pinned_at_[s + 2];
  for (size_t s = 2; s < pinned_at_.size(); ++s) pinned_at_[s] += pinned_at_[s - 1];
  pinned_.resize(places);
  for (const int32_t job : pinned)
    for (int32_t s = items_[job].begin; s < items_[job].end; ++s) pinned_[pinned_at_[s + 1]++] = job;
}

// Needed where the slack is too weak: with different alignments or fixed offsets. Jobs fixed at 0 stand
// already.
inline void Valleys::build_height_bounds() {
  bool uneven = false;
  for (const Item& item : items_) uneven = uneven || (item.fixed < 0 ? item.mask >= grain_ : item.fixed > 0);
  if (!uneven || !promising_) return;
  std::vector<int32_t> alive;
  const auto count = static_cast<int32_t>(items_.size());
  for (int32_t s = 0, next = 0; s < sections(); ++s) {
    const auto ended = [&](int32_t job) { return items_[job].end <= s; };
    alive.erase(std::remove_if(alive.begin(), alive.end(), ended), alive.end());
    for (; next < count && items_[next].begin == s; ++next)
      if (items_[next].fixed != 0) alive.push_back(next);
    height_bounds_.add(alive, capacity_, [&](int32_t job) { return items_[job]; });
    steps_ += static_cast<int64_t>(alive.size());
  }
  steps_ += height_bounds_.steps() / 4;
}

// Returns whether the jobs not yet placed have room above the sections at this height.
inline bool Valleys::holds(int32_t begin, int32_t end, int64_t height) {
  if (height_bounds_.empty()) return true;
  bool all = true;
  for (int32_t s = begin; s < end; ++s)
    if (!height_bounds_.holds(s, height)) all = false, weight_[s] += 1;
  return all;
}

// Returns whether the sections [begin, end) may rise to a height without meeting a fixed job not yet placed.
inline bool Valleys::below_pinned(int32_t begin, int32_t end, int64_t height) const {
  if (pinned_.empty()) return true;
  for (int32_t s = begin; s < end; ++s)
    for (int32_t k = pinned_at_[s]; k < pinned_at_[s + 1] && items_[pinned_[k]].fixed < height; ++k)
      if (offset_[pinned_[k]] < 0) return false;
  return true;
}

inline bool Valleys::place(int32_t job, int32_t run) {
  const Item& item = items_[job];
  offset_[job] = runs_[run].height;
  trail_.push_back({job, item.begin, item.end, cause(runs_[run]), 0, -1, -1, static_cast<int32_t>(runs_.size())});
  conflict_ = {item.begin, item.end};
  take_out(job);
  height_bounds_.flip(item.begin, item.end, job);
  const int64_t top = offset_[job] + item.size;
  if (offset_[job] > capacity_ - item.bytes || !below_pinned(item.begin, item.end, top)) return false;
  return holds(item.begin, item.end, top) && replace(run, item.begin, item.end, top);
}

inline bool Valleys::skip(int32_t index) {
  const Run run = runs_[index];
  const int64_t by = run.skip - run.height;
  trail_.push_back({-1, run.section, run.until, cause(run), by, -1, -1, static_cast<int32_t>(runs_.size())});
  conflict_ = {run.section, run.until};
  bool fits = below_pinned(run.section, run.until, run.skip);
  for (int32_t s = run.section; s < run.until; ++s)
    if ((slack_[s] -= by) < 0) fits = false, weight_[s] += 1;
  return fits && holds(run.section, run.until, run.skip) && replace(index, run.section, run.until, run.skip);
}

inline bool Valleys::undo(size_t mark, Piece& conflict) {
  bool part = false;
  for (; trail_.size() > mark; trail_.pop_back()) {
    const Step& step = trail_.back();
    part = step.begin < conflict.end && conflict.start < step.end;
    if (part) conflict = hull(conflict, step.cause);
    if (step.first >= 0) {
      const int32_t before = runs_[step.first].before, after = runs_[step.last].after;
      if (before >= 0) runs_[before].after = step.first;
      if (after >= 0) runs_[after].before = step.last;
      for (int32_t k = step.first; k != after; k = runs_[k].after) run_at_[runs_[k].begin] = k;
    }
    runs_.resize(step.runs);
    if (step.job < 0) {
      for (int32_t s = step.begin; s < step.end; ++s) slack_[s] += step.by;
      continue;
    }
    const Item& item = items_[step.job];
    offset_[step.job] = -1;
    ++jobs_left_;
    for (int32_t b = item.begin + 1; b < item.end; ++b) ++crossing_[b];
    height_bounds_.flip(item.begin, item.end, step.job);
    if (last_[step.job] >= 0) next_[last_[step.job]] = step.job;
    else first_[item.begin] = step.job;
    if (next_[step.job] >= 0) last_[next_[step.job]] = step.job;
  }
  return part;
}

// Gives the sections [begin, end) of a run another height, and re-evaluates the affected valleys.
inline bool Valleys::replace(int32_t run, int32_t begin, int32_t end, int64_t height) {
  const Run old = runs_[run];
  int32_t first = run, last = run;    // runs that are replaced
  int32_t left = begin, right = end;  // sections at `height` afterwards
  parts_.clear();
  if (old.begin < begin) parts_.push_back({old.begin, begin, old.height});
  else if (!is_cut(begin) && runs_[old.before].height == height) first = old.before, left = runs_[first].begin;
  if (end == old.end && !is_cut(end) && runs_[old.after].height == height) last = old.after, right = runs_[last].end;
  for (int32_t b = begin + 1; b < end; ++b)
    if (is_cut(b)) parts_.push_back({left, b, height}), left = b;
  parts_.push_back({left, right, height});
  if (end < old.end) parts_.push_back({end, old.end, old.height});
  widen(first, last);
  trail_.back().first = first;
  trail_.back().last = last;
  return link(first, last);
}

// Extends the range to neighbours with a changed wall that are or were valleys.
inline void Valleys::widen(int32_t& first, int32_t& last) {
  const auto changed = [&](int32_t neighbour, int64_t was, int64_t is) {
    return was != is && runs_[neighbour].height < std::max(was, is);
  };
  const int32_t before = runs_[first].before, after = runs_[last].after;
  if (!is_cut(runs_[first].begin) && changed(before, runs_[first].height, parts_.front().height)) {
    parts_.insert(parts_.begin(), {runs_[before].begin, runs_[before].end, runs_[before].height});
    first = before;
  }
  if (!is_cut(runs_[last].end) && changed(after, runs_[last].height, parts_.back().height)) {
    parts_.push_back({runs_[after].begin, runs_[after].end, runs_[after].height});
    last = after;
  }
}

// Replaces the runs from first to last by the parts.
inline bool Valleys::link(int32_t first, int32_t last) {
  const int32_t before = runs_[first].before, after = runs_[last].after;
  const auto base = static_cast<int32_t>(runs_.size()), many = static_cast<int32_t>(parts_.size());
  for (int32_t k = 0; k < many; ++k) {
    const Part& part = parts_[k];
    runs_.push_back({part.begin, part.end, part.height, k == 0 ? before : base + k - 1,
                     k + 1 == many ? after : base + k + 1, no_valley, part.begin, part.begin, -1, 0});
    run_at_[part.begin] = base + k;
  }
  if (before >= 0) runs_[before].after = base;
  if (after >= 0) runs_[after].before = base + many - 1;
  for (int32_t k = 0; k < many; ++k)
    if (!evaluate(runs_[base + k])) return false;
  return true;
}

// Finds the section of a valley with fewest options. Returns false if some section has none.
inline bool Valleys::evaluate(Run& run) {
  const int64_t left = is_cut(run.begin) ? no_wall : runs_[run.before].height;
  const int64_t right = is_cut(run.end) ? no_wall : runs_[run.after].height;
  const int64_t wall = std::min(left, right);
  if (wall <= run.height) return true;
  const int64_t later = gather(run);
  const int32_t width = run.end - run.begin;
  int64_t least = no_wall;
  for (int32_t k = width; k-- > 0;) {  // suffix minimum: least_begin becomes the least of all later begins
    const int64_t here = columns_[k].least_begin;
    columns_[k].least_begin = least;
    least = std::min(least, here);
  }
  bool possible = later > run.height;
  int32_t failed = run.begin;
  int32_t covers = 0, stands = 0;
  int64_t load = 0, ended = no_wall;
  run.score = std::numeric_limits<double>::max();
  const auto choose = [&](double score, int32_t options, int32_t section, int64_t skip) {
    run.score = score, run.options = options, run.section = section, run.until = section + 1, run.skip = skip;
  };
  for (int32_t k = 0; k < width; ++k) {
    Column& column = columns_[k];
    const int32_t s = run.begin + k;
    covers += column.covers, stands += column.stands, load += column.load;
    ended = std::min(ended, column.least_end);
    const int64_t other = std::min(ended, column.least_begin);  // smallest job within that does not cover s
    column = Column();
    if (covers == 0) {
      if (wall == no_wall) continue;  // no job is left to be placed here
      possible = possible && wall - run.height <= slack_[s] && height_bounds_.holds(s, wall);
      if (run.score > must_rise) choose(must_rise, 1, s, wall);
      else if (run.until == s) run.until = s + 1;
      continue;
    }
    if ((rules_ & rule_fill_bound) && wall < no_wall && wall - run.height - load > slack_[s]) possible = false, failed = s;
    int64_t skip = std::min({wall, later, other < no_wall ? run.height + other : no_wall});
    if (skip < no_wall && !(rules_ & rule_skip_section)) skip = run.height + grain_;
    const bool may = skip < no_wall && skip - run.height <= slack_[s] && height_bounds_.holds(s, skip);
    const int32_t options = stands + (may ? 1 : 0);
    if (options == 0) possible = false, failed = s;
    const double score = options <= 1 ? 0 : (options + 0.5 * width / sections()) / weight_[s];
    if (score >= run.score) continue;
    choose(score, options, s, may ? skip : -1);
  }
  columns_[width] = Column();
  if (!possible) weight_[failed] += 1, conflict_ = cause(run);
  return possible;
}

// Fills the columns of a run. Returns the lowest height at which a job within that cannot stand at the
// valley's height may stand.
inline int64_t Valleys::gather(const Run& run) {
  int64_t later = no_wall, inside = 0;
  for (int32_t s = run.begin; s < run.end; ++s) {
    for (int32_t job = first_[s]; job >= 0 && items_[job].end <= run.end; job = next_[job]) {
      const Item& item = items_[job];
      Column &from = columns_[item.begin - run.begin], &to = columns_[item.end - run.begin];
      ++from.covers, --to.covers;
      from.load += item.size, to.load -= item.size;
      from.least_begin = std::min(from.least_begin, item.size);
      to.least_end = std::min(to.least_end, item.size);
      if (stands(item, run.height)) ++from.stands, --to.stands;
      else if (item.fixed >= 0) later = std::min(later, item.fixed);
      else if ((run.height & item.mask) != 0) later = std::min(later, (run.height + item.mask) & ~item.mask);
      ++inside;
    }
  }
  steps_ += 4 * (run.end - run.begin) + 2 * inside + 8;
  return later;
}

}  // namespace packing
