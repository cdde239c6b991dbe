// Streams that use the arena, and the waits needed before a stream reuses memory there: host order is not device order,
// so memory freed on one stream serves another stream only after a wait on an event recorded at the free.
//
// Each stream that uses the arena has a *timeline*, whose clock counts the stream's frees there. The arena is
// divided into zones; each zone stores, by that clock, when each stream last freed memory there. Where plans of several
// streams share addresses, every piece between two borders of planned buffers is a zone, and a free records an event at
// once, so that no stream waits for more than that free. In other zones, an event is recorded only when a stream has to
// wait. While a single stream uses the arena, all of this is skipped.
//
// An event at the free covers the uses that the buffer's own stream has waited for before the free. PyTorch guarantees
// less to allocators: the own stream must wait for another stream's use only before it *allocates* again. With PyTorch,
// streams therefore do not share: memory of another stream is reused only after a device synchronization, which is rare
// because it blocks the host.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "devices/memory_source.hpp"
#include "core/occupancy.hpp"

namespace mempool {

class ArenaStreams {
 public:
  static constexpr unsigned kMostStreams = 15;            // streams distinguished
#ifdef MEMPOOL_WORLD  // the simulated world's programs are small
  static constexpr std::size_t kMostZones = 24, kMostEvents = 4;
#else
  static constexpr std::size_t kMostZones = 4096, kMostEvents = 32;
#endif
  static constexpr StreamIndex kNone = 0xFF;

  struct Planned {  // planned range of a stream's buffer
    Offset begin, end;
    Stream stream;
  };

  // `most`: streams distinguished, at most kMost.
  ArenaStreams(MemorySource& source, bool share, unsigned most);
  ~ArenaStreams() { forget_events(); }
  ArenaStreams(const ArenaStreams&) = delete;
  ArenaStreams& operator=(const ArenaStreams&) = delete;

  // Set all present plans. May throw std::bad_alloc; then nothing has changed.
  void set_plans(const std::vector<Planned>& plans);
  // Return true if this stream is the only one that has used the arena; the stream's index is then 0.
  bool is_sole(Stream stream) const noexcept { return stream == sole_stream_; }
  // Return false if no stream, or a single one, has used the arena.
  bool shared() const noexcept { return count_ > 1; }
  // Prepare memory for a stream: the stream's later work runs after all work queued on buffers freed there.
  // Return the stream's index, or kNone if the stream cannot get the memory now: a graph is being captured,
  // more streams use the arena than are distinguished, or streams do not share and the device was
  // synchronized a short while ago.
  StreamIndex prepare(Offset begin, Offset end, Stream stream) noexcept;
  void freed(Offset begin, Offset end, Stream stream) noexcept {
    if (!is_sole(stream)) note_free(begin, end, stream);
  }
  Stream stream_of(StreamIndex index) const noexcept { return timelines_[index].stream; }
  Stream first() const noexcept { return timelines_[0].stream; }
  // Return true if plans place buffers of this stream there, and of no other stream.
  bool plans_only(Offset begin, Offset end, Stream stream) const noexcept;
  void synchronized() noexcept;  // all queued work has completed
  void clear() noexcept;         // the arena no longer exists
  std::uint64_t waits() const noexcept { return waits_; }  // waits of one stream for another, in total
  std::size_t table_bytes() const noexcept { return begins_.capacity() * (sizeof(Offset) + sizeof(Mask) + sizeof(FreeClocks)); }

 private:
  using Mask = std::uint16_t;                       // set of planned streams
  static constexpr StreamIndex kUndistinguished = kMostStreams;  // the common index of all streams that are not distinguished
  static constexpr unsigned kTimelines = kMostStreams + 1;
  // by stream index, the stream's clock at the last free in the zone; 0: none
  using FreeClocks = std::array<std::uint64_t, kTimelines>;
  struct Past {
    std::uint64_t clock = 0;  // covers all frees up to this clock
    Event event = 0;
  };
  struct Timeline {  // of one stream
    Stream stream = 0;
    std::uint64_t clock = 1;  // starts at 1 so that frees before counting began have a time
    std::array<Past, kMostEvents> events;  // oldest first
    std::size_t events_kept = 0;
    // by stream index, the clock up to which that stream's frees have been waited for
    std::array<std::uint64_t, kTimelines> waited{};
  };
  static void cut(const std::vector<Planned>& plans, std::vector<Stream>& known, std::vector<Offset>& begins,
                  std::vector<Mask>& planned);
  StreamIndex index_of(Stream stream) noexcept;
  StreamIndex find(Stream stream) const noexcept;
  std::size_t zone_at(Offset offset) const noexcept;
  void note_free(Offset begin, Offset end, Stream stream) noexcept;
  void record(Timeline& timeline) noexcept;
  bool wait(Timeline& waiting, StreamIndex other, std::uint64_t clock) noexcept;
  bool wait_for_device() noexcept;
  void forget_events(Timeline& timeline) noexcept;
  void forget_events() noexcept;

  static constexpr std::uint64_t kEntriesBetweenSyncs = 1024;  // least entries between two device synchronizations

  MemorySource& source_;
  bool share_;
  unsigned most_streams_;
  // number of entries; the entry of the last device synchronization, 0: never
  std::uint64_t entered_ = 0, waited_at_ = 0;
  std::array<Timeline, kTimelines> timelines_;
  unsigned count_ = 0;
  static constexpr Stream kNobody = std::numeric_limits<Stream>::min();
  Stream sole_stream_ = kNobody;          // the only stream that uses the arena, if there is just one
  std::vector<Offset> begins_{0};  // of the zones; each zone ends where the next begins
  std::vector<Mask> planned_{0};   // planned streams, by zone
  std::vector<FreeClocks> free_clocks_{FreeClocks{}};
  std::vector<Stream> planned_streams_;      // planned streams, by their bits in `planned_`
  std::uint64_t waits_ = 0;
};

}  // namespace mempool
