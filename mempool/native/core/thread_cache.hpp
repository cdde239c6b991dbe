// Per-thread state: the sequence used last, and whether the thread bypasses the pool. Destroyed with the
// thread.
#pragma once

#include <cstdint>

#include "core/client.hpp"

namespace mempool {

class ThreadCache {
 public:
  static ThreadCache& mine() noexcept { return per_thread<ThreadCache>(); }
  ~ThreadCache();

  // Numbers of registered clients, by which an ending thread finds the clients that still exist.
  static std::uint64_t enlist(Client* client);
  static void strike(std::uint64_t uid) noexcept;
  static std::uint64_t fresh_number() noexcept;  // a number that no cache holds
  static void reset_after_fork() noexcept;

  std::uint64_t client = 0;  // the client's Client::caches_; 0: none
  Stream stream = 0;
  Client::Sequence* sequence = nullptr;
  unsigned bypass = 0;
  OutOfMemory out_of_memory;
};

}  // namespace mempool
