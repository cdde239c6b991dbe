// All events of a client's buffers, for a trace file: in memory up to a bound, then in an unnamed file, so
// that a program that does nothing but allocate can be recorded as long as the disk has room.
#pragma once

#include <string>
#include <vector>

#include "core/recorder.hpp"

namespace mempool {

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
  // Detach from the parent's tape, in a forked child.
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
