// Events as they happen, in fixed-size records: a bounded ring for the planner, the memory of a tape (tape.hpp).
// Tens of nanoseconds an event of the tape, most of them the clock's; a few of the ring, which asks for no time.
#pragma once

#include <time.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "device.hpp"

namespace mempool {

struct RecordedEvent {
  // handover: a free, of a buffer whose memory the next event's allocation has: it grew or shrank in place, and in the
  // program's eyes the new one was there before the old one's end. use: by a stream that is not the buffer's own. Then the
  // marks. What follows is of a history only: memory that the device gave (all of a reservation, or pages of one) or got
  // back, and a request that nobody served.
  enum Kind : std::uint32_t {
    alloc, free, handover, use, step, begin, end, segment_alloc, segment_free, segment_map, segment_unmap, refused,
    found,  // of a tape: a step that nobody marked
  };

  std::uint64_t index;     // how many events the recorder had seen before this one, dropped ones included
  std::uint64_t address;   // tells which free belongs to which allocation
  std::uint64_t size;      // bytes requested; of a tape, 0 for others than alloc
  std::uint64_t time_ns;   // monotonic clock
  std::int64_t stream;
  std::uint32_t sequence;  // of the allocation: one for each (thread, stream)
  std::uint32_t kind;
};

// What the planner needs of an event: half the memory.
struct BriefEvent {
  std::uint64_t address;
  std::uint64_t size;      // of a use: its stream
  std::uint32_t sequence;  // of the allocation, whose stream follows from it
  std::uint32_t kind;
};

template <class Event>
class Recorder {
 public:
  static constexpr std::size_t kUnbounded = ~std::size_t{0};

  // Keeps the last `capacity` events.
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

  // Replaces `events` by the kept ones from the `first`-th on, oldest first; in its own memory if that is enough.
  void copy_from(std::size_t first, std::vector<Event>& events) const {
    events.resize(events_.size() - first);
    for (std::size_t i = 0; i < events.size(); ++i) events[i] = (*this)[first + i];
  }
  // All kept events, where nothing was ever dropped; forgets them.
  std::vector<Event> take() noexcept {
    std::vector<Event> events;
    events.swap(events_);
    oldest_ = 0;
    return events;
  }
  // The i-th oldest of those kept.
  const Event& operator[](std::size_t i) const noexcept {
    const std::size_t at = oldest_ + i;
    return events_[at < events_.size() ? at : at - events_.size()];
  }
  // Calls `use` with each kept event, oldest first.
  template <class Use>
  void each(Use use) const {
    for (std::size_t i = oldest_; i < events_.size(); ++i) use(events_[i]);
    for (std::size_t i = 0; i < oldest_; ++i) use(events_[i]);
  }
  // Keeps as many from now on as `events` has room for, which is more than before.
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

}  // namespace mempool
