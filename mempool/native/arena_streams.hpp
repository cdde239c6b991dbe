// Which streams have used the arena, and what a stream waits for before it gets memory there: host order is not device
// order, so memory freed on one stream is another's only after a wait on an event recorded at the free.
//
// Each stream that uses the arena has a *line*, whose clock counts its frees there. The arena is cut into zones; of each is
// known when, by its line's clock, each stream last freed something in it. Where the plans of several streams share
// addresses, every piece between two borders of planned buffers is a zone of its own, and a free records its event at once,
// so that nobody waits for more than for that. Elsewhere an event is recorded when somebody has to wait. While a single
// stream uses the arena nothing of this is done.
//
// An event at the free covers the uses that the buffer's own stream has waited for by then. PyTorch promises less to whoever
// writes for it: a use by another stream need only be waited for before the own stream *allocates* again. Where that is so
// streams do not share: what was another's is had after a wait for the device, and rarely, for that holds up the host.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "memory_source.hpp"
#include "occupancy.hpp"

namespace mempool {

class ArenaStreams {
 public:
  static constexpr unsigned kMost = 15;            // streams that are told apart
#ifdef MEMPOOL_WORLD  // where programs are small
  static constexpr std::size_t kMostZones = 24, kMostEvents = 4;
#else
  static constexpr std::size_t kMostZones = 4096, kMostEvents = 32;
#endif
  static constexpr Line kNone = 0xFF;

  struct Planned {  // where a stream's buffer is planned
    Offset begin, end;
    Stream stream;
  };

  // `most`: streams that are told apart, at most kMost.
  ArenaStreams(MemorySource& source, bool share, unsigned most);
  ~ArenaStreams() { forget_events(); }
  ArenaStreams(const ArenaStreams&) = delete;
  ArenaStreams& operator=(const ArenaStreams&) = delete;

  // All plans there are now. May throw std::bad_alloc; then nothing has changed.
  void set_plans(const std::vector<Planned>& plans);
  // Whether nobody else has ever used the arena; its line is then the first.
  bool alone(Stream stream) const noexcept { return stream == only_; }
  // The stream gets memory: what it does from now on comes after all that was queued on what was freed there. Its line, or
  // kNone: it cannot get it now, since a graph is captured, more streams use the arena than are told apart, or streams do not
  // share and the device was waited for a short while ago.
  Line enter(Offset begin, Offset end, Stream stream) noexcept;
  void freed(Offset begin, Offset end, Stream stream) noexcept {
    if (!alone(stream)) note_free(begin, end, stream);
  }
  Stream stream_of(Line line) const noexcept { return lines_[line].stream; }
  Stream first() const noexcept { return lines_[0].stream; }
  // Whether a plan gives the stream memory that lies there.
  bool plans(Offset begin, Offset end, Stream stream) const noexcept;
  void synchronized() noexcept;  // all that was ever queued is through
  void clear() noexcept;         // there is no arena any more
  std::uint64_t waits() const noexcept { return waits_; }  // of one stream for another, ever
  std::size_t table_bytes() const noexcept { return begins_.capacity() * (sizeof(Offset) + sizeof(Mask) + sizeof(Uses)); }

 private:
  using Mask = std::uint16_t;                       // of streams of the plans
  static constexpr Line kRest = kMost;              // of all streams that are not told apart
  static constexpr unsigned kLines = kMost + 1;
  using Uses = std::array<std::uint64_t, kLines>;  // by line, its clock at its last free there; 0: none
  struct Past {
    std::uint64_t clock = 0;  // covers all frees up to it
    Event event = 0;
  };
  struct State {  // of one line
    Stream stream = 0;
    std::uint64_t clock = 1;  // so that what was freed while nobody counted has a time
    std::array<Past, kMostEvents> events;  // oldest first
    std::size_t events_kept = 0;
    std::array<std::uint64_t, kLines> waited{};  // by line, for all frees up to this clock
  };
  static void cut(const std::vector<Planned>& plans, std::vector<Stream>& known, std::vector<Offset>& begins,
                  std::vector<Mask>& planned);
  Line line_of(Stream stream) noexcept;
  Line find(Stream stream) const noexcept;
  std::size_t zone_at(Offset offset) const noexcept;
  void note_free(Offset begin, Offset end, Stream stream) noexcept;
  void record(State& line) noexcept;
  bool wait(State& waiting, Line other, std::uint64_t clock) noexcept;
  bool wait_for_device() noexcept;
  void forget_events(State& line) noexcept;
  void forget_events() noexcept;

  static constexpr std::uint64_t kRarely = 1024;  // times that memory is had

  MemorySource& source_;
  bool share_;
  unsigned most_;
  std::uint64_t entered_ = 0, waited_at_ = 0;  // times; in which the device was waited for last, 0: never
  std::array<State, kLines> lines_;
  unsigned count_ = 0;
  static constexpr Stream kNobody = std::numeric_limits<Stream>::min();
  Stream only_ = kNobody;          // the one that uses the arena, if it is one
  std::vector<Offset> begins_{0};  // of the zones; each ends where the next begins
  std::vector<Mask> planned_{0};   // by zone: for whom
  std::vector<Uses> uses_{Uses{}};
  std::vector<Stream> known_;      // streams of the plans, by the bits of `planned_`
  std::uint64_t waits_ = 0;
};

}  // namespace mempool
