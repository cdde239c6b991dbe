// What is wrong with a file, in one line, and how much memory its content may take.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace traces {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Damaged {};  // the same of opcodes that do not fit each other; who reads them knows the place

// Of what is kept of a file, against files that unfold: so much, and so many times the bytes that were read.
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
