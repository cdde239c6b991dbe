// Events in fixed-size records as they occur: a bounded ring for the planner, and the memory of a trace buffer
// (TraceBuffer). A trace event costs tens of nanoseconds, most of them for the clock; a ring event, without a
// time, a few.
#pragma once

#include <time.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "devices/device.hpp"

namespace mempool {

struct RecordedEvent {
  // handover: the free of a buffer that was resized in place; the next event is the allocation of the resized buffer in
  // the same memory, which the program sees before the end of the old buffer. use: by a stream other than the
  // buffer's own. step, begin, end: marks. The following kinds occur in a history only: memory that the
  // device gave (a whole reservation, or pages of one) or got back.
  enum Kind : std::uint32_t {
    alloc, free, handover, use, step, begin, end, segment_alloc, segment_free, segment_map, segment_unmap,
    refused,  // in a history and on a trace: a request that got no memory
    found,    // on a trace only: a step detected by the pool
  };

  std::uint64_t index;     // number of earlier events seen by the recorder, including dropped ones
  std::uint64_t address;   // connects a free with the allocation
  std::uint64_t size;      // bytes requested; on a trace, 0 for events other than alloc and refused
  std::uint64_t time_ns;   // monotonic clock
  std::int64_t stream;
  std::uint32_t sequence;  // of the allocation: one for each (thread, stream)
  std::uint32_t kind;
};

// The fields of an event that the planner needs, in half the memory.
struct BriefEvent {
  std::uint64_t address;
  std::uint64_t size;      // for a use event: the stream
  std::uint32_t sequence;  // of the allocation; implies the stream
  std::uint32_t kind;
};

template <class Event>
class Recorder {
 public:
  static constexpr std::size_t kUnbounded = ~std::size_t{0};

  // Keep the last `capacity` events.
  explicit Recorder(std::size_t capacity) : capacity_(capacity) {}

  bool on() const noexcept { return on_; }
  std::size_t capacity() const noexcept { return capacity_; }
  void set_on(bool on) noexcept { on_ = on; }

  // Never throws: an event that cannot be kept is counted as dropped.
  void add(RecordedEvent::Kind kind, Address address, std::size_t size, [[maybe_unused]] Stream stream,
           std::uint32_t sequence) noexcept {
    Event event;
    if constexpr (std::is_same_v<Event, BriefEvent>) {
      event = {address, size, sequence, kind};
    } else {
      event = {seen_, address, size, now_ns(), stream, sequence, kind};
    }
    ++seen_;
    if (events_.size() < capacity_) {
      try {
        events_.push_back(event);
        return;
      } catch (...) {
        ++dropped_;
        return;
      }
    }
    events_[oldest_] = event;
    oldest_ = oldest_ + 1 == events_.size() ? 0 : oldest_ + 1;
    ++dropped_;
  }

  // Replace `events` by the kept events from the `first`-th on, oldest first; reuses the memory of `events`
  // if that suffices.
  void copy_from(std::size_t first, std::vector<Event>& events) const {
    events.resize(events_.size() - first);
    for (std::size_t i = 0; i < events.size(); ++i) events[i] = (*this)[first + i];
  }
  // Return all kept events and forget them. Valid only if no event was ever dropped.
  std::vector<Event> take() noexcept {
    std::vector<Event> events;
    events.swap(events_);
    oldest_ = 0;
    return events;
  }
  // The i-th oldest kept event.
  const Event& operator[](std::size_t i) const noexcept {
    const std::size_t at = oldest_ + i;
    return events_[at < events_.size() ? at : at - events_.size()];
  }
  // Call `use` with each kept event, oldest first.
  template <class Use>
  void each(Use use) const {
    for (std::size_t i = oldest_; i < events_.size(); ++i) use(events_[i]);
    for (std::size_t i = 0; i < oldest_; ++i) use(events_[i]);
  }
  // Enlarge the capacity to that of `events`, which must be larger than before.
  void grow_into(std::vector<Event>& events) {
    copy_from(0, events);
    events_.swap(events);
    oldest_ = 0;
    capacity_ = events_.capacity();
  }
  void clear() noexcept {
    std::vector<Event>().swap(events_);
    oldest_ = 0;
  }

  std::uint64_t seen() const noexcept { return seen_; }
  std::uint64_t dropped() const noexcept { return dropped_; }
  std::size_t kept() const noexcept { return events_.size(); }

 private:
  static std::uint64_t now_ns() noexcept {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
  }

  bool on_ = false;
  std::size_t capacity_;
  std::size_t oldest_ = 0;
  std::vector<Event> events_;
  std::uint64_t seen_ = 0;
  std::uint64_t dropped_ = 0;
};

// All events of a client's buffers, for a trace file: in memory up to a bound, then in an unnamed file, so
// that a program that does nothing but allocate can be recorded as long as the disk has room.
class TraceBuffer {
 public:
  static constexpr std::size_t kPiece = std::size_t{1} << 18;  // events: 14 MiB

  TraceBuffer() = default;
  ~TraceBuffer() { forget_file(); }
  TraceBuffer(const TraceBuffer&) = delete;
  TraceBuffer& operator=(const TraceBuffer&) = delete;

  bool on() const noexcept { return on_; }
  // `folder`: folder of the file; empty: all events stay in memory, as they do if the file cannot be created.
  // Events that cannot be written to the file are lost and counted.
  void set_on(bool on, const std::string& folder = {}, std::size_t piece = kPiece);
  void add(RecordedEvent::Kind kind, Address address, std::size_t size, Stream stream, std::uint32_t sequence) noexcept {
    events_.add(kind, address, size, stream, sequence);
    if (events_.kept() >= piece_ && !folder_.empty()) spill();
  }
  // Detach from the parent's trace, in a forked child.
  void leave() noexcept;

  // The oldest events not yet taken: at most one piece of those in the file, else all those in memory. A
  // piece is read without the pool's lock, and before the next one is taken.
  struct Taken {
    std::vector<RecordedEvent> events;
    std::size_t in_file = 0;  // number of events in the file; then `events` is empty until they are read
    std::size_t at = 0;       // bytes; position in the file
  };
  Taken take() noexcept;
  void read(Taken& taken);  // may throw std::bad_alloc
  void has_read(const Taken& taken) noexcept;
  std::uint64_t lost() const noexcept { return events_.dropped() + lost_; }
  std::size_t spilt() const noexcept { return written_ - taken_; }  // events in the file

 private:
  void spill() noexcept;
  bool open() noexcept;
  void close_file() noexcept;
  void forget_file() noexcept;

  bool on_ = false;
  std::size_t piece_ = kPiece;
  Recorder<RecordedEvent> events_{Recorder<RecordedEvent>::kUnbounded};
  std::string folder_;
  int file_ = -1;
  std::size_t written_ = 0, taken_ = 0;  // events of the file
  bool reading_ = false;
  std::uint64_t lost_ = 0;
};

}  // namespace mempool
