// Sequential reader of the bytes of a file, in bounded memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

namespace traces {

struct Truncated {};  // the file ends within the requested bytes

class ByteReader {
 public:
  static constexpr size_t kBuffer = size_t{1} << 18;  // upper bound of one `take`
  // Writes up to the given number of bytes and returns their number; 0: the end. Exceptions pass through.
  using Source = std::function<size_t(char*, size_t)>;

  explicit ByteReader(Source source) : source_(std::move(source)), buffer_(new char[kBuffer]), at_(buffer_.get()), end_(at_) {}

  uint64_t position() const { return before_ + static_cast<uint64_t>(at_ - buffer_.get()); }

  uint8_t byte() {
    if (at_ == end_) fill(1);
    return static_cast<uint8_t>(*at_++);
  }

  // The next `count` bytes; valid until the next call.
  const char* take(size_t count) {
    if (static_cast<size_t>(end_ - at_) < count) fill(count);
    return std::exchange(at_, at_ + count);
  }

  void skip(uint64_t count) {
    for (;;) {
      const auto here = static_cast<uint64_t>(end_ - at_);
      if (count <= here) break;
      count -= here;
      at_ = end_;
      fill(1);
    }
    at_ += count;
  }

  // Reads a number of `Number`'s size in little-endian order, which must be the machine's.
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

 private:
  void fill(size_t least) {
    char* const begin = buffer_.get();
    const auto kept = static_cast<size_t>(end_ - at_);
    std::memmove(begin, at_, kept);
    before_ += static_cast<uint64_t>(at_ - begin);
    at_ = begin;
    end_ = begin + kept;
    while (static_cast<size_t>(end_ - at_) < least) {
      const size_t found = source_(end_, kBuffer - static_cast<size_t>(end_ - begin));
      if (found == 0) throw Truncated{};
      end_ += found;
    }
  }

  Source source_;
  std::unique_ptr<char[]> buffer_;
  char* at_;
  char* end_;
  uint64_t before_ = 0;  // bytes before the buffer's first
};

}  // namespace traces
