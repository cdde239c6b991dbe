// Reader of the opcodes of a pickle that plain data need (CPython's Lib/pickletools.py), protocols 2 to 5. No
// code here can name or call anything.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "byte_reader.hpp"
#include "chunked.hpp"
#include "memo.hpp"
#include "records.hpp"
#include "value.hpp"

namespace traces {

class Pickle {
 public:
  static constexpr size_t kLongestText = size_t{1} << 16;

  Pickle(Budget& budget, ByteReader& bytes, Records& records)
      : budget_(budget), bytes_(bytes), records_(records), memo_(budget), reals_(budget) {}

  // Returns the value of the pickle. Refused: truncated, damaged, or an opcode for anything but plain data.
  Value read() {
    try {
      while (step()) {}
      return pop();
    } catch (const Truncated&) {
      truncated_ = true;
      refuse("the pickle is truncated");
    } catch (const Damaged&) {
      refuse("the pickle is damaged");
    }
  }
  bool truncated() const { return truncated_; }

  // Returns the part of a truncated file's dict before the end: each list as far as it was read, and whole
  // dicts. None if that part cannot be determined.
  Value begun() {
    try {
      if (marks_.empty()) return pop();  // the value is whole, and the file ends just after
      if (stack_.size() > marks_.back() && records_.has_shape(stack_.back(), Records::kDict)) pop();  // maybe incomplete
      while (marks_.size() > 1) {
        const size_t first = above_mark();
        if (first > marks_.back() && records_.has_shape(stack_[first - 1], Records::kList))
          extend(first);
        else
          stack_.resize(std::max(first, marks_.back() + 1) - 1);
      }
      const size_t first = above_mark(), count = stack_.size() - first;
      const auto is_list = [&](size_t at) { return records_.has_shape(stack_[at], Records::kList); };
      if (count % 2 == 1 && count > 2 && is_list(stack_.size() - 1) && is_list(stack_.size() - 2))
        extend(stack_.size() - 1);  // the element of a list with a single element
      else if (count % 2 == 1)
        stack_.pop_back();
      set_items(first);
      return pop();
    } catch (const Damaged&) {
      return Value::kNone;
    }
  }
  double real(Value value) const { return reals_[static_cast<size_t>(value.payload())]; }
  // Releases the memo and the stack, which the result of `read` does not need.
  void forget() { memo_.clear(), std::vector<Value>().swap(stack_); }

 private:
  // Executes an opcode; returns false at the end.
  bool step() {
    begin_ = bytes_.position();
    const uint8_t opcode = bytes_.byte();
    switch (opcode) {
      case '.': return false;
      case 0x80: bytes_.byte(); break;  // the protocol
      case 0x95: bytes_.take(8); break;  // the length of a frame, irrelevant to the value
      case '(': mark(); break;
      case '}': push(records_.dict()); break;
      case ']': push(records_.list()); break;
      case ')': push(Value::kTuple); break;
      case 0x8F: push(Value::kSet); break;
      case 'N': push(Value::kNone); break;
      case 0x88: push({Value::kBool, 1}); break;
      case 0x89: push({Value::kBool, 0}); break;
      case 'K': push(Value::whole(bytes_.number<uint8_t>())); break;
      case 'M': push(Value::whole(bytes_.number<uint16_t>())); break;
      case 'J': push(Value::whole(bytes_.number<int32_t>())); break;
      case 'G': real(); break;
      case 0x8A: whole(bytes_.number<uint8_t>()); break;
      case 0x8B: long_whole(bytes_.number<int32_t>()); break;
      case 0x8C: text(bytes_.number<uint8_t>()); break;
      case 'X': text(bytes_.number<uint32_t>()); break;
      case 0x8D: text(bytes_.number<uint64_t>()); break;
      case 'C': binary(bytes_.number<uint8_t>()); break;
      case 'B': binary(bytes_.number<uint32_t>()); break;
      case 0x8E: case 0x96: binary(bytes_.number<uint64_t>()); break;
      case 0x85: tuple(1); break;
      case 0x86: tuple(2); break;
      case 0x87: tuple(3); break;
      case 't': gather(Value::kTuple); break;
      case 0x91: gather(Value::kSet); break;
      case 0x90: add_to_set(); break;
      case 'u': set_items(above_mark()); break;
      case 's': need(2), set_items(stack_.size() - 2); break;
      case 'e': extend(above_mark()); break;
      case 'a': need(1), extend(stack_.size() - 1); break;
      case 0x94: put(memo_.size()); break;
      case 'q': put(bytes_.number<uint8_t>()); break;
      case 'r': put(bytes_.number<uint32_t>()); break;
      case 'h': push(memo_[bytes_.number<uint8_t>()]); break;
      case 'j': push(memo_[bytes_.number<uint32_t>()]); break;
      default: refuse(opcode);
    }
    return true;
  }

  [[noreturn]] void refuse(const std::string& reason) const {
    throw Refused("byte " + std::to_string(begin_) + ": " + reason);
  }
  [[noreturn]] void refuse(uint8_t opcode) const {
    constexpr char digits[] = "0123456789abcdef";
    refuse(std::string("opcode 0x") + digits[opcode >> 4] + digits[opcode & 15] + " is not one of plain data");
  }

  void push(Value value) {
    if (stack_.size() == stack_.capacity()) grow(stack_);
    stack_.push_back(value);
  }
  void mark() {
    if (marks_.size() == marks_.capacity()) grow(marks_);
    marks_.push_back(stack_.size());
  }
  template <class Item>
  void grow(std::vector<Item>& items) {
    const size_t before = items.capacity(), more = before < 512 ? 512 : before;
    budget_.take(more * sizeof(Item));
    items.reserve(before + more);
  }

  // Checks that at least `count` values lie above the last mark.
  void need(size_t count) const {
    if (stack_.size() - (marks_.empty() ? 0 : marks_.back()) < count) throw Damaged{};
  }
  Value pop() {
    need(1);
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  // Removes the last mark; returns the index of the first value above.
  size_t above_mark() {
    if (marks_.empty()) throw Damaged{};
    const size_t first = marks_.back();
    marks_.pop_back();
    return first;
  }

  void set_items(size_t first) {
    const size_t count = stack_.size() - first;
    need(count + 1);
    records_.set(stack_[first - 1], stack_.data() + first, count);
    stack_.resize(first);
  }
  void extend(size_t first) {
    const size_t count = stack_.size() - first;
    need(count + 1);
    records_.extend(stack_[first - 1], stack_.data() + first, count);
    stack_.resize(first);
  }
  // Elements of a tuple or a set are completed and dropped: only a pair of small numbers is needed later.
  void drop(size_t first) {
    for (size_t i = first; i < stack_.size(); ++i) records_.whole(stack_[i], false);
    stack_.resize(first);
  }
  void tuple(size_t count) {
    need(count);
    const Value* const items = stack_.data() + (stack_.size() - count);
    const Value made = count == 2 ? Value::pair(items[0], items[1]) : Value(Value::kTuple);
    drop(stack_.size() - count);
    push(made);
  }
  void gather(Value::Kind kind) {
    drop(above_mark());
    push(kind);
  }
  void add_to_set() {
    drop(above_mark());
    need(1);
    if (!stack_.back().is(Value::kSet)) throw Damaged{};
  }

  void real() {
    const char* const from = bytes_.take(8);
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<uint8_t>(from[i]);
    double value;
    std::memcpy(&value, &bits, sizeof value);
    push({Value::kFloat, static_cast<int64_t>(reals_.size())});
    reals_.push(value);
  }
  void whole(size_t count) {
    const char* const from = bytes_.take(count);
    if (count > 8) return push(Value::kLarge);
    uint64_t bits = 0;
    for (size_t i = count; i > 0; --i) bits = bits << 8 | static_cast<uint8_t>(from[i - 1]);
    const auto unused = static_cast<unsigned>(64 - 8 * count);
    push(Value::whole(count == 0 ? 0 : static_cast<int64_t>(bits << unused) >> unused));
  }
  void long_whole(int32_t count) {
    if (count < 0) throw Damaged{};
    if (count <= 8) return whole(static_cast<size_t>(count));
    bytes_.skip(static_cast<uint64_t>(count));
    push(Value::kLarge);
  }
  void text(uint64_t count) {
    if (count > kLongestText) {
      bytes_.skip(count);
      return push(Value::kLongText);
    }
    const auto length = static_cast<size_t>(count);
    const int64_t id = records_.texts.id({bytes_.take(length), length});
    if (id < 0) throw Damaged{};
    push({Value::kText, id});
  }
  void binary(uint64_t count) {
    bytes_.skip(count);
    push(Value::kBytes);
  }

  void put(size_t index) {
    need(1);
    memo_.put(index, stack_.back());
  }

  Budget& budget_;
  ByteReader& bytes_;
  Records& records_;
  uint64_t begin_ = 0;  // position of the current opcode
  bool truncated_ = false;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;  // number of values below each mark
  Memo memo_;
  Chunked<double> reals_;
};

}  // namespace traces
