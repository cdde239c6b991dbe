// Event that is set once. Unlike in Python's module `threading`, Ctrl-C cannot interrupt a wait halfway.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace mempool {

class Signal {
 public:
  void set() {
    {
      const std::lock_guard lock(mutex_);
      is_set_ = true;
    }
    changed_.notify_all();
  }

  bool is_set() const {
    const std::lock_guard lock(mutex_);
    return is_set_;
  }

  // Wait until the event is set, or for so many seconds; return whether it is set.
  bool wait(double seconds) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return is_set_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_set_ = false;
};

}  // namespace mempool
