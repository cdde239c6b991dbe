// The per-thread default stream has one handle and is another stream in each thread. Here each has a number of its own,
// below zero, which no handle is. It is not given again when its thread has ended: what was queued there may still run.
#pragma once

#include <set>

#include "device.hpp"
#include "sync.hpp"

namespace mempool {

class ThreadStream {
 public:
  static constexpr Stream kHandle = 2;  // of the thread that calls

  static Stream mine() noexcept {
    Stream& stream = per_thread<Number>().stream;
    if (stream == 0) stream = numbers().give();
    return stream;
  }
  // Whether it is another thread's: nothing can be queued there, and nothing recorded, from here.
  static bool elsewhere(Stream stream) noexcept { return stream < 0 && stream != per_thread<Number>().stream; }
  // Whether its thread has ended: nothing more is queued there by anybody.
  static bool ended(Stream stream) noexcept { return stream < 0 && numbers().ended(stream); }

 private:
  struct Number {
    Stream stream = 0;  // none yet
    ~Number() {
      if (stream != 0) numbers().end(stream);
    }
  };
  class Numbers {
   public:
    Stream give() noexcept {
      const Guarded guard(lock_);
      try {
        given_.insert(next_);
      } catch (...) {  // counts as ended, so more is waited for than needed
      }
      return next_--;
    }
    void end(Stream stream) noexcept {
      const Guarded guard(lock_);
      given_.erase(stream);
    }
    bool ended(Stream stream) noexcept {
      const Guarded guard(lock_);
      return stream > next_ && given_.count(stream) == 0;
    }

   private:
    Lock lock_;
    Stream next_ = -1;
    std::set<Stream> given_;  // of threads that have not ended
  };
  static Numbers& numbers() noexcept {
    static auto* const all = new Numbers;  // never destroyed: threads may end after what a process ends with
    return *all;
  }
};

}  // namespace mempool
