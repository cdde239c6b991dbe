// Numbers for per-thread default streams. The driver has one handle for them, which means another stream in
// each thread. Here each stream has a negative number, which no handle is. A number is not reused after the
// thread has ended, because work queued there may still run.
#pragma once

#include <set>

#include "devices/device.hpp"
#include "core/sync.hpp"

namespace mempool {

class ThreadStream {
 public:
  static constexpr Stream kHandle = 2;  // the driver's handle, which means the calling thread's stream

  static Stream mine() noexcept {
    Stream& stream = per_thread<Number>().stream;
    if (stream == 0) stream = numbers().give();
    return stream;
  }
  // Return true for another thread's stream: from here no work can be queued and no event recorded there.
  static bool elsewhere(Stream stream) noexcept { return stream < 0 && stream != per_thread<Number>().stream; }
  // Return true if the stream's thread has ended, so that no further work is queued there.
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
      } catch (...) {  // the stream counts as ended, so that waits are longer than needed
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
    // never destroyed, because threads may end after the objects destroyed at process end
    static auto* const all = new Numbers;
    return *all;
  }
};

}  // namespace mempool
