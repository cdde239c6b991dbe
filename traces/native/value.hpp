// The value made by a pickle opcode, in one word.
#pragma once

#include <cstdint>

namespace traces {

class Value {
 public:
  enum Kind : uint64_t {
    kMissing,   // a key missing from a dict
    kNone,
    kBool,
    kNumber,    // from -2^59 to 2^59 - 1
    kLarge,     // any other whole number
    kFloat,     // index into the reals
    kText,      // index into the texts
    kLongText,  // too long to be a known key or name
    kBytes,
    kTuple,     // a pair of small numbers has a payload, other tuples none; the elements of a set are not kept
    kSet,
    kObject,    // index of a list or a dict
  };

  constexpr Value() = default;
  constexpr Value(Kind kind, int64_t payload = 0) : bits_(static_cast<uint64_t>(payload) << 4 | kind) {}
  static constexpr Value whole(int64_t number) {
    const Value value(kNumber, number);
    return value.payload() == number ? value : Value(kLarge);
  }

  // Returns a tuple of two values: each pair of whole numbers below 2^29 has a unique payload, from 1 on.
  static constexpr Value pair(Value first, Value second) {
    constexpr int64_t most = int64_t{1} << 29;
    const auto small = [](Value value) { return value.is(kNumber) && value.payload() >= 0 && value.payload() < most; };
    return {kTuple, small(first) && small(second) ? first.payload() * most + second.payload() + 1 : 0};
  }

  constexpr Kind kind() const { return static_cast<Kind>(bits_ & 15); }
  constexpr bool is(Kind kind) const { return this->kind() == kind; }
  constexpr int64_t payload() const { return static_cast<int64_t>(bits_) >> 4; }
  constexpr uint64_t bits() const { return bits_; }

 private:
  uint64_t bits_ = kMissing;
};

}  // namespace traces
