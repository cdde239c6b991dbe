// The host's memory, which runs out inside the core when the seed says so.
#pragma once

#include <array>
#include <cstdint>

#include "core/client.hpp"
#include "world/fibers.hpp"

namespace world {

struct HostMemory {
  static constexpr std::uint64_t kPlenty = ~std::uint64_t{0};
  std::uint64_t left = kPlenty;  // allocations inside the core that are served,
  std::uint64_t failing = 0;     // before so many fail
  std::array<bool, kMostThreads> inside{};
  std::uint64_t failed = 0;      // ever
  bool fibers = false;           // threads are fibers, and between them somebody decides who goes on

  bool fails() noexcept {
    if (left == kPlenty || !inside[current] || (fibers && !in_fiber())) return false;
    if (left != 0) {
      --left;
      return false;
    }
    if (failing-- != 0) {
      ++failed;
      return true;
    }
    left = kPlenty;
    return false;
  }
};
extern HostMemory host_memory;

// This thread is inside the core, or in the world for a while, until the end of the scope.
class Where {
 public:
  explicit Where(bool inside) noexcept : flag_(host_memory.inside[current]), before_(flag_) { flag_ = inside; }
  Where(const Where&) = delete;
  ~Where() { flag_ = before_; }

 private:
  bool& flag_;
  bool before_;
};

// A client: what is called through it is inside the core.
class Core {
 public:
  Core() = default;
  explicit Core(mempool::Client* client) noexcept : client_(client) {}
  struct Call {
    mempool::Client* client;
    Where where{true};
    mempool::Client* operator->() const noexcept { return client; }
  };
  Call operator->() const noexcept { return {client_}; }
  mempool::Client& operator*() const noexcept { return *client_; }
  bool operator==(const Core& other) const noexcept { return client_ == other.client_; }

 private:
  mempool::Client* client_ = nullptr;
};

}  // namespace world
