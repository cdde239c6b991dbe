// The memo of a pickle, by the numbers that the pickle gives: half a word per entry, since nearly all entries
// are texts, lists and dicts, which have numbers of their own.
#pragma once

#include <cstdint>

#include "chunked.hpp"
#include "value.hpp"

namespace traces {

class Memo {
 public:
  explicit Memo(Budget& budget) : entries_(budget), others_(budget) {}

  size_t size() const { return entries_.size(); }

  // Writers number entries from 0 on, without gaps.
  void put(size_t index, Value value) {
    const uint32_t entry = entry_of(value);
    if (index > entries_.size()) throw Damaged{};
    if (index == entries_.size()) return entries_.push(entry);
    entries_[index] = entry;
  }
  Value operator[](size_t index) const {
    if (index >= entries_.size()) throw Damaged{};
    const uint32_t entry = entries_[index];
    const auto number = static_cast<int64_t>(entry >> 2);
    if ((entry & 3) == kOther) return others_[static_cast<size_t>(number)];
    return {(entry & 3) == kObject ? Value::kObject : Value::kText, number};
  }
  void clear() { entries_.clear(), others_.clear(); }

 private:
  enum Kind : uint32_t { kObject, kText, kOther };  // the lowest bits of an entry

  uint32_t entry_of(Value value) {
    const Kind kind = value.is(Value::kObject) ? kObject : value.is(Value::kText) ? kText : kOther;
    const uint64_t number = kind == kOther ? others_.size() : static_cast<uint64_t>(value.payload());
    if (number >= uint64_t{1} << 30) throw Refused("it holds too many values");
    if (kind == kOther) others_.push(value);
    return static_cast<uint32_t>(number) << 2 | kind;
  }

  Chunked<uint32_t> entries_;
  Chunked<Value> others_;
};

}  // namespace traces
