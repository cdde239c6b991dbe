// The live buffers of a harness by address, which share no data structure with the pool, and its way to fail.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "devices/device.hpp"

namespace stress {

using mempool::Address;
using mempool::Stream;

[[noreturn]] inline void fail(const char* what, Address address, std::size_t bytes) {
  std::fprintf(stderr, "FAILED: %s (address %#zx, %zu bytes)\n", what, static_cast<std::size_t>(address), bytes);
  std::fflush(stderr);
  std::_Exit(1);
}

// All live buffers of the program.
class Ledger {
 public:
  void insert(Address address, std::size_t bytes) {
    const std::lock_guard guard(mutex);
    const auto after = live_.lower_bound(address);
    if (after != live_.end() && after->first < address + bytes) fail("two live buffers overlap", address, bytes);
    if (after != live_.begin() && std::prev(after)->first + std::prev(after)->second > address) {
      fail("two live buffers overlap", address, bytes);
    }
    live_[address] = bytes;
    bytes_ += bytes;
  }
  void erase(Address address) {
    const std::lock_guard guard(mutex);
    const auto found = live_.find(address);
    bytes_ -= found->second;
    live_.erase(found);
  }
  std::size_t bytes() {
    const std::lock_guard guard(mutex);
    return bytes_;
  }
  std::size_t count() {
    const std::lock_guard guard(mutex);
    return live_.size();
  }

  std::mutex mutex;  // held over a fork, so that the child finds a whole ledger

 private:
  std::map<Address, std::size_t> live_;
  std::size_t bytes_ = 0;
};

}  // namespace stress
