#include "core/arena_streams.hpp"

#include <algorithm>
#include <utility>

#include "core/live.hpp"

namespace mempool {
namespace {

unsigned bit_of(std::vector<Stream>& known, Stream stream, std::size_t most) {
  const auto found = std::find(known.begin(), known.end(), stream);
  if (found != known.end()) return static_cast<unsigned>(found - known.begin());
  if (known.size() < most) known.push_back(stream);
  // streams beyond the limit share the last bit and wait for more than needed
  return static_cast<unsigned>(known.size() - 1);
}

bool is_shared(unsigned mask) noexcept { return (mask & (mask - 1)) != 0; }

}  // namespace

// Divide the arena into zones: at borders where the set of planned streams changes, and in shared ranges at
// every border.
void ArenaStreams::cut(const std::vector<Planned>& plans, std::vector<Stream>& known, std::vector<Offset>& begins,
                       std::vector<Mask>& planned) {
  struct Border {
    Offset at;
    unsigned bit;
    int change;
  };
  std::vector<Border> borders;
  borders.reserve(2 * plans.size());
  for (const Planned& one : plans) {
    const unsigned bit = bit_of(known, one.stream, kMostStreams);
    borders.push_back({one.begin, bit, 1});
    borders.push_back({one.end, bit, -1});
  }
  std::sort(borders.begin(), borders.end(), [](const Border& a, const Border& b) { return a.at < b.at; });
  std::array<int, kMostStreams> counts{};
  planned[0] = 0;
  for (std::size_t i = 0; i < borders.size();) {
    const Offset at = borders[i].at;
    unsigned mask = planned.back();
    for (; i < borders.size() && borders[i].at == at; ++i) {
      const int count = counts[borders[i].bit] += borders[i].change;
      mask = count != 0 ? mask | (1u << borders[i].bit) : mask & ~(1u << borders[i].bit);
    }
    if (at == begins.back()) {
      planned.back() = static_cast<Mask>(mask);
    } else if (mask != planned.back() || is_shared(mask)) {
      begins.push_back(at);
      planned.push_back(static_cast<Mask>(mask));
    }
  }
  // Merge neighbouring zones if there are too many.
  const std::size_t together = (begins.size() + kMostZones - 1) / kMostZones;
  if (together == 1) return;
  std::size_t zones = 0;
  for (std::size_t i = 0; i < begins.size(); ++zones) {
    begins[zones] = begins[i];
    unsigned mask = 0;
    for (const std::size_t last = std::min(i + together, begins.size()); i < last; ++i) mask |= planned[i];
    planned[zones] = static_cast<Mask>(mask);
  }
  begins.resize(zones);
  planned.resize(zones);
}

ArenaStreams::ArenaStreams(MemorySource& source, bool share, unsigned most)
    : source_(source), share_(share), most_streams_(std::min(most, kMostStreams)) {}

void ArenaStreams::set_plans(const std::vector<Planned>& plans) {
  std::vector<Stream> known;
  for (const Planned& one : plans) bit_of(known, one.stream, kMostStreams);
  std::vector<Offset> begins{0};
  std::vector<Mask> planned{static_cast<Mask>(known.empty() ? 0 : 1)};
  if (known.size() > 1) cut(plans, known, begins, planned);
  // Each new zone inherits the latest frees of the overlapping old zones.
  std::vector<FreeClocks> uses(begins.size(), FreeClocks{});
  for (std::size_t zone = 0, old = 0; zone < begins.size(); ++zone) {
    const Offset end = zone + 1 < begins.size() ? begins[zone + 1] : ~Offset{0};
    while (old + 1 < begins_.size() && begins_[old + 1] <= begins[zone]) ++old;
    for (std::size_t i = old; i < begins_.size() && begins_[i] < end; ++i) {
      for (unsigned index = 0; index < kTimelines; ++index) uses[zone][index] = std::max(uses[zone][index], free_clocks_[i][index]);
    }
  }
  begins_ = std::move(begins);
  planned_ = std::move(planned);
  free_clocks_ = std::move(uses);
  planned_streams_ = std::move(known);
}

StreamIndex ArenaStreams::find(Stream stream) const noexcept {
  for (unsigned index = 0; index < count_; ++index) {
    if (timelines_[index].stream == stream) return static_cast<StreamIndex>(index);
  }
  return kNone;
}

StreamIndex ArenaStreams::index_of(Stream stream) noexcept {
  const StreamIndex found = find(stream);
  if (found != kNone || count_ == most_streams_) return found;
  // the first stream's frees have not been counted so far
  if (count_ == 1 && MEMPOOL_GUARDED("first_clock")) {
    for (FreeClocks& uses : free_clocks_) uses[0] = timelines_[0].clock;
  }
  timelines_[count_].stream = stream;
  sole_stream_ = count_ == 0 ? stream : kNobody;
  return static_cast<StreamIndex>(count_++);
}

std::size_t ArenaStreams::zone_at(Offset offset) const noexcept {
  return static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

bool ArenaStreams::plans_only(Offset begin, Offset end, Stream stream) const noexcept {
  const auto known = std::find(planned_streams_.begin(), planned_streams_.end(), stream);
  if (known == planned_streams_.end()) return false;
  const unsigned others = ~(1u << (known - planned_streams_.begin()));
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    if ((planned_[zone] & others) != 0) return false;
  }
  return true;
}

StreamIndex ArenaStreams::prepare(Offset begin, Offset end, Stream stream) noexcept {
  const StreamIndex index = index_of(stream);
  if (index == kNone || count_ == 1) return index;
  ++entered_;
  Timeline& mine = timelines_[index];
  FreeClocks due{};
  bool any = false;
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    for (unsigned other = 0; other < kTimelines; other = other + 1 == count_ ? kUndistinguished : other + 1) {
      const std::uint64_t clock = free_clocks_[zone][other];
      if (other == index || clock <= mine.waited[other] || clock <= due[other]) continue;
      due[other] = clock;
      any = true;
    }
  }
  if (!any || !MEMPOOL_GUARDED("arena_stream")) return index;
  if (source_.held()) return kNone;
  if (!share_ && MEMPOOL_GUARDED("late_order")) {
    if (waited_at_ != 0 && entered_ - waited_at_ < kEntriesBetweenSyncs) return kNone;
    waited_at_ = entered_;
    return wait_for_device() ? index : kNone;
  }
  if (due[kUndistinguished] != 0 && MEMPOOL_GUARDED("undistinguished")) return wait_for_device() ? index : kNone;
  for (unsigned other = 0; other < count_; ++other) {
    if (due[other] != 0 && !wait(mine, static_cast<StreamIndex>(other), due[other])) return wait_for_device() ? index : kNone;
  }
  return index;
}

// Make a stream wait for another stream's frees. False: impossible. An event that became part of a graph is useless,
// and replaced by a new event.
bool ArenaStreams::wait(Timeline& waiting, StreamIndex other, std::uint64_t clock) noexcept {
  Timeline& past = timelines_[other];
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::size_t i = 0;
    while (i < past.events_kept && past.events[i].clock < clock && MEMPOOL_GUARDED("early_event")) ++i;
    if (i == past.events_kept) {
      record(past);
      i = past.events_kept - 1;
    }
    if (source_.device().wait(waiting.stream, past.events[i].event) || !MEMPOOL_GUARDED("failed_wait")) {
      waiting.waited[other] = past.events[i].clock;
      ++waits_;
      return true;
    }
    forget_events(past);
  }
  return false;
}

bool ArenaStreams::wait_for_device() noexcept {
  if (!source_.device().synchronize()) return false;
  synchronized();
  ++waits_;
  return true;
}

void ArenaStreams::record(Timeline& timeline) noexcept {
  if (timeline.events_kept == kMostEvents) {  // the oldest event is dropped: its waiters wait for a later event
    LiveEvents::forget(source_.device(), timeline.events[0].event);
    std::move(timeline.events.begin() + 1, timeline.events.end(), timeline.events.begin());
    --timeline.events_kept;
  }
  timeline.events[timeline.events_kept++] = {timeline.clock, LiveEvents::record(source_.device(), timeline.stream)};
}

void ArenaStreams::note_free(Offset begin, Offset end, Stream stream) noexcept {
  StreamIndex index = index_of(stream);
  if (index == kNone) index = kUndistinguished;
  if (count_ == 1) return;
  Timeline& mine = timelines_[index];
  ++mine.clock;
  unsigned planned = 0;
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    free_clocks_[zone][index] = mine.clock;
    planned |= is_shared(planned_[zone]) ? 1u : 0u;
  }
  if (planned != 0 && index != kUndistinguished && share_ && !source_.held()) record(mine);
}

void ArenaStreams::synchronized() noexcept {
  forget_events();
  for (unsigned index = 0; index < count_; ++index) {
    for (unsigned other = 0; other < kTimelines; ++other) timelines_[index].waited[other] = timelines_[other].clock;
  }
}

void ArenaStreams::forget_events(Timeline& timeline) noexcept {
  for (std::size_t i = 0; i < timeline.events_kept; ++i) LiveEvents::forget(source_.device(), timeline.events[i].event);
  timeline.events_kept = 0;
}

void ArenaStreams::forget_events() noexcept {
  for (unsigned index = 0; index < count_; ++index) forget_events(timelines_[index]);
}

void ArenaStreams::clear() noexcept {
  forget_events();
  std::fill(free_clocks_.begin(), free_clocks_.end(), FreeClocks{});
  timelines_.fill(Timeline{});
  count_ = 0;
  sole_stream_ = kNobody;
}

}  // namespace mempool
