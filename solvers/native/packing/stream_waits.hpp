// Counts how often one stream waits for another when a plan is replayed, by the rule of the pool: a buffer
// placed on memory last freed by another stream waits for that free, unless its stream has already waited for
// this or a later free of that stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace packing {

struct ReplayedPlan {
  std::vector<int64_t> start, end;  // of each buffer, in iteration 0; half-open
  std::vector<int64_t> size, stream;
  std::vector<int64_t> offset;      // [buffer * columns + iteration % columns]; negative: not in the arena
  int64_t columns = 1;
  int64_t period = 0;               // 0: there is one iteration only

  int64_t offset_in(size_t buffer, int64_t iteration) const {
    return offset[buffer * static_cast<size_t>(columns) + static_cast<size_t>(iteration % columns)];
  }
};

// The zones of the arena, cut at the ends of buffers, that more than one stream uses: [begin, end), sorted.
class SharedZones {
 public:
  SharedZones(const ReplayedPlan& plan, size_t streams) {
    struct Border {
      int64_t at;
      size_t stream;
      int change;
    };
    std::vector<Border> borders;
    for (size_t b = 0; b < plan.start.size(); ++b) {
      for (int64_t column = 0; column < plan.columns; ++column) {
        const int64_t offset = plan.offset_in(b, column);
        if (offset < 0) continue;
        borders.push_back({offset, static_cast<size_t>(plan.stream[b]), 1});
        borders.push_back({offset + plan.size[b], static_cast<size_t>(plan.stream[b]), -1});
      }
    }
    std::sort(borders.begin(), borders.end(), [](const Border& x, const Border& y) { return x.at < y.at; });
    std::vector<int> held(streams, 0);
    size_t holders = 0;
    for (size_t i = 0; i < borders.size();) {
      const int64_t at = borders[i].at;
      if (holders > 1) ends_.push_back(at);
      for (; i < borders.size() && borders[i].at == at; ++i) {
        int& count = held[borders[i].stream];
        holders -= count != 0 ? 1 : 0;
        count += borders[i].change;
        holders += count != 0 ? 1 : 0;
      }
      if (holders > 1) begins_.push_back(at);
    }
  }
  size_t count() const { return begins_.size(); }
  // First zone that [begin, end) touches; the touched zones continue while a zone's begin is below `end`.
  size_t first(int64_t begin) const {
    return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  }
  bool begins_below(size_t zone, int64_t end) const { return zone < count() && begins_[zone] < end; }

 private:
  std::vector<int64_t> begins_, ends_;
};

// Counts the waits of `columns` consecutive iterations in steady state.
inline int64_t count_waits(const ReplayedPlan& plan) {
  size_t streams = 0;
  int64_t longest = 0;
  for (size_t b = 0; b < plan.start.size(); ++b) {
    streams = std::max(streams, static_cast<size_t>(plan.stream[b]) + 1);
    longest = std::max(longest, plan.end[b] - plan.start[b]);
  }
  const SharedZones zones(plan, streams);
  if (zones.count() == 0) return 0;

  struct Event {
    int64_t time;
    bool begins;    // at one time, ends come before begins, the oldest buffers first
    int64_t later;  // iterations after the buffer's own
    size_t buffer;
  };
  std::vector<Event> events;  // of each iteration
  for (size_t b = 0; b < plan.start.size(); ++b) {
    bool touches = false;
    for (int64_t column = 0; column < plan.columns && !touches; ++column) {
      const int64_t offset = plan.offset_in(b, column);
      touches = offset >= 0 && zones.begins_below(zones.first(offset), offset + plan.size[b]);
    }
    if (!touches) continue;
    const auto put = [&](int64_t time, bool begins) {
      const int64_t later = plan.period == 0 ? 0 : time / plan.period;
      events.push_back({time - later * plan.period, begins, later, b});
    };
    put(plan.start[b], true);
    put(plan.end[b], false);
  }
  std::sort(events.begin(), events.end(), [](const Event& x, const Event& y) {
    return std::tuple(x.time, x.begins, -x.later, x.buffer) < std::tuple(y.time, y.begins, -y.later, y.buffer);
  });

  // Warm-up in whole turns of the columns: enough iterations for all long-lived buffers to be alive, and one
  // turn in which all memory is reused.
  const int64_t fill = plan.period == 0 ? 0 : longest / plan.period + 2;
  const int64_t before = plan.period == 0 ? 0 : (fill + plan.columns - 1) / plan.columns * plan.columns + plan.columns;
  const int64_t iterations = before + (plan.period == 0 ? 1 : plan.columns);
  std::vector<int64_t> freed(zones.count() * streams, 0);  // [zone * streams + stream], stream's clock
  std::vector<int64_t> waited(streams * streams, 0), clock(streams, 0), due(streams, 0);
  int64_t waits = 0;
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    for (const Event& event : events) {
      const int64_t instance = iteration - event.later;
      const int64_t offset = instance < 0 ? -1 : plan.offset_in(event.buffer, instance);
      if (offset < 0) continue;
      const auto mine = static_cast<size_t>(plan.stream[event.buffer]);
      const int64_t end = offset + plan.size[event.buffer];
      if (!event.begins) ++clock[mine];
      std::fill(due.begin(), due.end(), 0);
      for (size_t zone = zones.first(offset); zones.begins_below(zone, end); ++zone) {
        if (!event.begins) freed[zone * streams + mine] = clock[mine];
        for (size_t other = 0; event.begins && other < streams; ++other) {
          due[other] = std::max(due[other], freed[zone * streams + other]);
        }
      }
      for (size_t other = 0; other < streams; ++other) {
        if (other == mine || due[other] <= waited[mine * streams + other]) continue;
        waited[mine * streams + other] = due[other];
        waits += iteration >= before ? 1 : 0;
      }
    }
  }
  return waits;
}

}  // namespace packing
