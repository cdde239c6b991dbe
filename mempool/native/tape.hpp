// Everything that happens to a client's buffers, for a trace file: in memory up to a bound, and beyond it in a file without
// a name, so that a program that does nothing but allocate can be recorded for as long as there is room on the disk.
#pragma once

#include <string>
#include <vector>

#include "recorder.hpp"

namespace mempool {

class Tape {
 public:
  static constexpr std::size_t kPiece = std::size_t{1} << 18;  // events: 14 MiB

  Tape() = default;
  ~Tape() { forget_file(); }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool on() const noexcept { return on_; }
  // `folder`: for the file; empty: all stays in memory. So it does where the file cannot be made or written.
  void set_on(bool on, const std::string& folder = {}, std::size_t piece = kPiece);
  void add(RecordedEvent::Kind kind, Address address, std::size_t size, Stream stream, std::uint32_t sequence) noexcept {
    events_.add(kind, address, size, stream, sequence);
    if (events_.kept() >= piece_ && !folder_.empty()) spill();
  }
  // What a forked child does with its parent's.
  void leave() noexcept;

  // Where the oldest events are that nobody has taken yet, which takes them: at most a piece of those in the file, else all
  // that are in memory. A piece is read without the pool's lock, and before the next one is taken.
  struct Taken {
    std::vector<RecordedEvent> events;
    std::size_t in_file = 0;  // how many; then `events` is empty until they are read
    std::size_t at = 0;       // bytes
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
