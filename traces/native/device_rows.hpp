// The rows of a trace that one device's events make, and what was there before them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "chunked.hpp"
#include "fields.hpp"
#include "places.hpp"

namespace traces {

struct Row {
  int64_t buffer, size, stream, time_us, address;
  Place place;
  uint8_t kind;  // traces.trace.Kind
};
constexpr uint8_t kAlloc = 0, kFree = 1, kReserve = 5, kRelease = 6;

// Ranges that a device gave, which do not overlap, by their addresses.
class Held {
 public:
  // False where it would overlap another.
  bool add(int64_t address, int64_t size, int64_t stream) {
    if (size == 0) return true;
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first < address + size) return false;
    if (next != ranges_.begin() && std::prev(next)->first + std::prev(next)->second.size > address) return false;
    ranges_[address] = {size, stream};
    return true;
  }
  // Takes a range out of whatever it overlaps: an expandable segment grows and shrinks at both ends.
  void cut(int64_t address, int64_t size) {
    if (size == 0) return;
    auto at = ranges_.upper_bound(address);
    if (at != ranges_.begin() && std::prev(at)->first + std::prev(at)->second.size > address) --at;
    while (at != ranges_.end() && at->first < address + size) {
      const auto [begin, range] = *at;
      at = ranges_.erase(at);
      if (begin < address) ranges_[begin] = {address - begin, range.stream};
      const int64_t rest = begin + range.size - (address + size);
      if (rest > 0) ranges_[address + size] = {rest, range.stream};
    }
  }
  struct Range {
    int64_t size, stream;
  };
  const std::map<int64_t, Range>& ranges() const { return ranges_; }

 private:
  std::map<int64_t, Range> ranges_;
};

class DeviceRows {
 public:
  explicit DeviceRows(Budget& budget) : rows(budget), before(budget) {}

  Chunked<Row> rows, before;  // `before`: allocs of what was there already
  Held held;                  // segments, at the end
  int64_t buffers = 0;

  void alloc(Row row) {
    row.buffer = born(row.address);
    row.kind = kAlloc;
    rows.push(row);
  }
  // What was never seen was there before, with what the free says of it.
  void free(Row row) {
    const auto [found, before_all] = living_.try_emplace(row.address, buffers);
    if (found->second == kGone) fault(row.address, "freed again without an alloc");
    row.buffer = std::exchange(found->second, kGone);
    row.place = {};
    row.kind = kAlloc;
    if (before_all) before.push(row), ++buffers;
    row.kind = kFree;
    row.size = 0;
    row.address = -1;
    rows.push(row);
  }
  void segment(Row row, uint8_t kind) {
    row.kind = kind;
    row.buffer = -1;
    row.place = {};
    rows.push(row);
  }
  // Alive at the end; was there before unless an event allocated it.
  void alive(int64_t address, int64_t size, int64_t stream) {
    const auto [found, before_all] = living_.try_emplace(address, buffers);
    if (found->second == kGone) fault(address, "freed, and alive at the end");
    if (before_all) before.push({buffers++, size, stream, 0, address, {}, kAlloc});
  }
  // The segments that were there when the recording began, told from the end backwards. What was reserved and is not
  // held at the end is passed over.
  Held segments_before() const {
    Held result = held;
    for (size_t i = rows.size(); i > 0; --i) {
      const Row& row = rows[i - 1];
      if (row.kind < kReserve) continue;
      result.cut(row.address, row.size);
      if (row.kind == kRelease) result.add(row.address, row.size, row.stream);
    }
    return result;
  }
  // The earliest time of an event.
  int64_t begin_us() const {
    int64_t begin = rows.size() == 0 ? 0 : rows[0].time_us;
    for (size_t i = 0; i < rows.size(); ++i) begin = std::min(begin, rows[i].time_us);
    return begin;
  }

 private:
  static constexpr int64_t kGone = -1;

  int64_t born(int64_t address) {
    int64_t& buffer = living_.try_emplace(address, kGone).first->second;
    if (buffer != kGone) fault(address, "allocated again without a free");
    return buffer = buffers++;
  }

  [[noreturn]] static void fault(int64_t address, const char* kind) {
    constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (int64_t rest = address; rest > 0 || hex.empty(); rest >>= 4) hex.insert(hex.begin(), digits[rest & 15]);
    throw Fault(kind, "address 0x" + hex + " is " + kind);
  }

  // Of each address that was seen the buffer there, or kGone; ordered, so that no choice of addresses is slow.
  std::map<int64_t, int64_t> living_;
};

}  // namespace traces
