// Which buffer lives at which address of a device, while its events are read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "fields.hpp"
#include "held.hpp"

namespace traces {

// Addresses and sizes are from 0 to 2^62. What is refused is not alive, and not taken for what was there before when it
// is freed.
class Living {
 public:
  void alloc(int64_t address, int64_t size, int64_t buffer) {
    int64_t& here = buffers_.try_emplace(address, kGone).first->second;
    if (here != kGone) fault(address, "allocated again without a free");
    if (!ranges_.add(address, size, 0)) fault(address, "allocated over a buffer that is alive");
    here = buffer;
  }
  // The buffer that is freed; `unknown`, of so many bytes, where none was ever seen: it was there before.
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
  // Whether what is alive at the end was never seen: it was there before.
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

  // Of each address that was seen the buffer there, or kGone; ordered, so that no choice of addresses is slow.
  std::map<int64_t, int64_t> buffers_;
  Held ranges_;  // of what is alive
};

}  // namespace traces
