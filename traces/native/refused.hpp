// The error for an unusable file, in one line, and the budget for memory taken by a file's content.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace traces {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Damaged {};  // thrown for inconsistent opcodes; the reader of the pickle adds the position

// Limits on memory kept for a file, against files that unfold: free bytes, plus a multiple of the bytes read.
constexpr uint64_t kFreeBytes = uint64_t{256} << 20, kTimesRead = 4;

class Budget {
 public:
  void read(uint64_t bytes) { allowed_ = kFreeBytes + kTimesRead * bytes; }
  void take(uint64_t bytes) {
    used_ += bytes;
    if (used_ > allowed_) throw Refused("it unfolds to more than " + std::to_string(allowed_) + " bytes");
  }
  void give(uint64_t bytes) { used_ -= bytes; }

 private:
  uint64_t used_ = 0, allowed_ = kFreeBytes;
};

}  // namespace traces
