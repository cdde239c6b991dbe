#include "core/arena_streams.hpp"

#include <algorithm>
#include <utility>

#include "core/live_events.hpp"

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
    const unsigned bit = bit_of(known, one.stream, kMost);
    borders.push_back({one.begin, bit, 1});
    borders.push_back({one.end, bit, -1});
  }
  std::sort(borders.begin(), borders.end(), [](const Border& a, const Border& b) { return a.at < b.at; });
  std::array<int, kMost> counts{};
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
    : source_(source), share_(share), most_(std::min(most, kMost)) {}

void ArenaStreams::set_plans(const std::vector<Planned>& plans) {
  std::vector<Stream> known;
  for (const Planned& one : plans) bit_of(known, one.stream, kMost);
  std::vector<Offset> begins{0};
  std::vector<Mask> planned{static_cast<Mask>(known.empty() ? 0 : 1)};
  if (known.size() > 1) cut(plans, known, begins, planned);
  // Each new zone inherits the latest frees of the overlapping old zones.
  std::vector<Uses> uses(begins.size(), Uses{});
  for (std::size_t zone = 0, old = 0; zone < begins.size(); ++zone) {
    const Offset end = zone + 1 < begins.size() ? begins[zone + 1] : ~Offset{0};
    while (old + 1 < begins_.size() && begins_[old + 1] <= begins[zone]) ++old;
    for (std::size_t i = old; i < begins_.size() && begins_[i] < end; ++i) {
      for (unsigned line = 0; line < kLines; ++line) uses[zone][line] = std::max(uses[zone][line], uses_[i][line]);
    }
  }
  begins_ = std::move(begins);
  planned_ = std::move(planned);
  uses_ = std::move(uses);
  known_ = std::move(known);
}

Line ArenaStreams::find(Stream stream) const noexcept {
  for (unsigned line = 0; line < count_; ++line) {
    if (lines_[line].stream == stream) return static_cast<Line>(line);
  }
  return kNone;
}

Line ArenaStreams::line_of(Stream stream) noexcept {
  const Line found = find(stream);
  if (found != kNone || count_ == most_) return found;
  // the first stream's frees have not been counted so far
  if (count_ == 1 && MEMPOOL_GUARDED("first_line")) {
    for (Uses& uses : uses_) uses[0] = lines_[0].clock;
  }
  lines_[count_].stream = stream;
  only_ = count_ == 0 ? stream : kNobody;
  return static_cast<Line>(count_++);
}

std::size_t ArenaStreams::zone_at(Offset offset) const noexcept {
  return static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

bool ArenaStreams::plans(Offset begin, Offset end, Stream stream) const noexcept {
  const auto known = std::find(known_.begin(), known_.end(), stream);
  if (known == known_.end()) return false;
  const unsigned others = ~(1u << (known - known_.begin()));
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    if ((planned_[zone] & others) != 0) return false;
  }
  return true;
}

Line ArenaStreams::enter(Offset begin, Offset end, Stream stream) noexcept {
  const Line line = line_of(stream);
  if (line == kNone || count_ == 1) return line;
  ++entered_;
  State& mine = lines_[line];
  Uses due{};
  bool any = false;
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    for (unsigned other = 0; other < kLines; other = other + 1 == count_ ? kRest : other + 1) {
      const std::uint64_t clock = uses_[zone][other];
      if (other == line || clock <= mine.waited[other] || clock <= due[other]) continue;
      due[other] = clock;
      any = true;
    }
  }
  if (!any || !MEMPOOL_GUARDED("arena_stream")) return line;
  if (source_.held()) return kNone;
  if (!share_ && MEMPOOL_GUARDED("late_order")) {
    if (waited_at_ != 0 && entered_ - waited_at_ < kRarely) return kNone;
    waited_at_ = entered_;
    return wait_for_device() ? line : kNone;
  }
  if (due[kRest] != 0 && MEMPOOL_GUARDED("rest")) return wait_for_device() ? line : kNone;
  for (unsigned other = 0; other < count_; ++other) {
    if (due[other] != 0 && !wait(mine, static_cast<Line>(other), due[other])) return wait_for_device() ? line : kNone;
  }
  return line;
}

// Let a line wait for another line's frees. False: impossible. If an event became part of a graph and is
// therefore useless, a new event is tried.
bool ArenaStreams::wait(State& waiting, Line other, std::uint64_t clock) noexcept {
  State& past = lines_[other];
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::size_t i = 0;
    while (i < past.events_kept && past.events[i].clock < clock && MEMPOOL_GUARDED("early_event")) ++i;
    if (i == past.events_kept) {
      record(past);
      i = past.events_kept - 1;
    }
    if (source_.device().wait(waiting.stream, past.events[i].event) || !MEMPOOL_GUARDED("no_wait")) {
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

void ArenaStreams::record(State& line) noexcept {
  if (line.events_kept == kMostEvents) {  // a wait for the oldest event becomes a wait for a later one
    LiveEvents::forget(source_.device(), line.events[0].event);
    std::move(line.events.begin() + 1, line.events.end(), line.events.begin());
    --line.events_kept;
  }
  line.events[line.events_kept++] = {line.clock, LiveEvents::record(source_.device(), line.stream)};
}

void ArenaStreams::note_free(Offset begin, Offset end, Stream stream) noexcept {
  Line line = line_of(stream);
  if (line == kNone) line = kRest;
  if (count_ == 1) return;
  State& mine = lines_[line];
  ++mine.clock;
  unsigned planned = 0;
  for (std::size_t zone = zone_at(begin); zone < begins_.size() && begins_[zone] < end; ++zone) {
    uses_[zone][line] = mine.clock;
    planned |= is_shared(planned_[zone]) ? 1u : 0u;
  }
  if (planned != 0 && line != kRest && share_ && !source_.held()) record(mine);
}

void ArenaStreams::synchronized() noexcept {
  forget_events();
  for (unsigned line = 0; line < count_; ++line) {
    for (unsigned other = 0; other < kLines; ++other) lines_[line].waited[other] = lines_[other].clock;
  }
}

void ArenaStreams::forget_events(State& line) noexcept {
  for (std::size_t i = 0; i < line.events_kept; ++i) LiveEvents::forget(source_.device(), line.events[i].event);
  line.events_kept = 0;
}

void ArenaStreams::forget_events() noexcept {
  for (unsigned line = 0; line < count_; ++line) forget_events(lines_[line]);
}

void ArenaStreams::clear() noexcept {
  forget_events();
  std::fill(uses_.begin(), uses_.end(), Uses{});
  lines_.fill(State{});
  count_ = 0;
  only_ = kNobody;
}

}  // namespace mempool
