// The per-thread default stream has one handle and is another stream in each thread. Here each has a number of its own,
// below zero, which no handle is. It is not given again when its thread has ended: what was queued there may still run.
#pragma once

#include "device.hpp"
#include "sync.hpp"

namespace mempool {

class ThreadStream {
 public:
  static constexpr Stream kHandle = 2;  // of the thread that calls

  static Stream mine() noexcept {
    Stream& stream = per_thread<Number>().stream;
    if (stream == 0) stream = next().fetch_sub(1, std::memory_order_relaxed);
    return stream;
  }
  // Whether it is another thread's: nothing can be queued there, and nothing recorded, from here.
  static bool elsewhere(Stream stream) noexcept { return stream < 0 && stream != per_thread<Number>().stream; }

 private:
  struct Number {
    Stream stream = 0;  // none yet
  };
  static Atomic<Stream>& next() noexcept {
    static Atomic<Stream> number{-1};
    return number;
  }
};

}  // namespace mempool
