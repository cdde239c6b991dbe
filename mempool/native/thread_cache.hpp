// What a thread remembers: the sequence it used last, and whether it bypasses the pool. Ends with the thread.
#pragma once

#include <cstdint>

#include "client.hpp"

namespace mempool {

class ThreadCache {
 public:
  static ThreadCache& mine() noexcept { return per_thread<ThreadCache>(); }
  ~ThreadCache();

  // Registered clients can be found by number from a thread's end, when they may be gone.
  static std::uint64_t enlist(Client* client);
  static void strike(std::uint64_t uid) noexcept;
  static std::uint64_t fresh_number() noexcept;  // of nobody's caches
  static void reset_after_fork() noexcept;

  std::uint64_t client = 0;  // its Client::caches_; 0: none
  Stream stream = 0;
  Client::Sequence* sequence = nullptr;
  unsigned bypass = 0;
  OutOfMemory out_of_memory;
};

}  // namespace mempool
