// The living buffer at each address of a device, while its events are read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "fields.hpp"
#include "held.hpp"

namespace traces {

// Addresses and sizes are from 0 to 2^62. A refused buffer is not alive, and its free does not make it a
// buffer from before the recording.
class Living {
 public:
  void alloc(int64_t address, int64_t size, int64_t buffer) {
    int64_t& here = buffers_.try_emplace(address, kGone).first->second;
    if (here != kGone) fault(address, "allocated again without a free");
    if (!ranges_.add(address, size, 0)) fault(address, "allocated over a buffer that is alive");
    here = buffer;
  }
  // Returns the freed buffer; `unknown`, a buffer of `size` bytes from before the recording, if the address
  // is new.
  int64_t free(int64_t address, int64_t size, int64_t unknown) {
    const auto [found, before] = buffers_.try_emplace(address, kGone);
    if (before) {
      if (!ranges_.fits(address, size)) fault(address, "freed, but overlaps a buffer that is alive");
      return unknown;
    }
    if (found->second == kGone) fault(address, "freed again without an alloc");
    ranges_.remove(address);
    return std::exchange(found->second, kGone);
  }
  // Registers a buffer alive at the end; returns true if the address is new: the buffer is older than the
  // recording.
  bool alive(int64_t address, int64_t size, int64_t buffer) {
    const auto [found, before] = buffers_.try_emplace(address, kGone);
    if (!before && found->second == kGone) fault(address, "freed, and alive at the end");
    if (!before) return false;
    if (!ranges_.add(address, size, 0)) fault(address, "alive at the end, but overlaps another");
    found->second = buffer;
    return true;
  }

 private:
  static constexpr int64_t kGone = -1;

  [[noreturn]] static void fault(int64_t address, const char* kind) {
    constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (int64_t rest = address; rest > 0 || hex.empty(); rest >>= 4) hex.insert(hex.begin(), digits[rest & 15]);
    throw Fault(kind, "address 0x" + hex + " is " + kind);
  }

  // The buffer at each known address, or kGone; ordered, so that no choice of addresses is slow.
  std::map<int64_t, int64_t> buffers_;
  Held ranges_;  // of the living buffers
};

}  // namespace traces
