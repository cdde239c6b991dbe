// One bell for all planners: rung rarely, so that it may be a heavy one.
#pragma once

#include <condition_variable>
#include <mutex>

namespace mempool {

struct Bell {
  std::mutex mutex;
  std::condition_variable rung;

  static Bell& one() { return *slot(); }
  // In a forked child: the old one may be held by a thread that no longer exists.
  static void replace() { slot() = new Bell; }

 private:
  static Bell*& slot() {
    static Bell* bell = new Bell;
    return bell;
  }
};

}  // namespace mempool
