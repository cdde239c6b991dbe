// Merge of all devices' rows into the columns of one trace, ordered by clock, with older memory first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <string>
#include <tuple>
#include <vector>

#include "device_rows.hpp"
#include "texts.hpp"

namespace traces {

struct Columns {
  std::vector<uint8_t> kind;
  std::vector<int64_t> buffer, size, stream, time_ns, address;
  std::vector<int32_t> device, operation, frame, module, category, stack, pool;
  std::vector<std::string> names;  // used names, in order of first use
  int64_t alive_before = 0;        // buffers
  struct Known {
    int64_t events = 0, live_before = 0, reserved_before = 0;  // bytes before the first event
  };
  std::vector<Known> known;          // of each device
  std::vector<int64_t> device_free;  // of each refused request, in bytes; -1 where unknown
};

class JoinedRows {
 public:
  JoinedRows(std::deque<DeviceRows>& devices, const Texts& texts, std::function<void()> tick)
      : devices_(devices), texts_(texts), tick_(std::move(tick)), numbers_(texts.size(), -1) {}

  Columns join() {
    size_t count = 0;
    for (const DeviceRows& device : devices_)
      count += device.rows.size() + device.before.size() + device.marks.size();
    reserve(count);
    int64_t first = 0;
    for (size_t at = 0; at < devices_.size(); ++at) {
      first_buffer_.push_back(first);
      add_before(at);
      first += devices_[at].buffers;
    }
    merge();
    return std::move(to_);
  }

 private:
  static constexpr size_t kTick = 1 << 16;

  void add_before(size_t at) {
    DeviceRows& device = devices_[at];
    const int64_t begin = device.begin_us();
    const Held held = device.segments_before();
    Columns::Known known{static_cast<int64_t>(device.rows.size())};
    for (const auto& [address, range] : held.ranges()) {
      Row row{-1, range.size, range.stream, begin, address};
      row.kind = kReserve, row.pool = range.pool;
      add(row, at);
      known.reserved_before += range.size;
    }
    for (size_t i = 0; i < device.before.size(); ++i) {
      device.before[i].time_us = begin;
      add(device.before[i], at);
      known.live_before += device.before[i].size;
    }
    to_.known.push_back(known);
    to_.alive_before += static_cast<int64_t>(device.before.size());
  }

  void reserve(size_t count) {
    to_.kind.reserve(count), to_.buffer.reserve(count), to_.size.reserve(count), to_.stream.reserve(count);
    to_.time_ns.reserve(count), to_.address.reserve(count), to_.device.reserve(count), to_.operation.reserve(count);
    for (auto* const column : {&to_.frame, &to_.module, &to_.category, &to_.stack, &to_.pool}) column->reserve(count);
  }

  void add(const Row& row, size_t device) {
    to_.kind.push_back(row.kind);
    to_.buffer.push_back(row.buffer < 0 ? -1 : row.buffer + first_buffer_[device]);
    to_.size.push_back(row.size);
    to_.stream.push_back(row.stream);
    to_.time_ns.push_back(row.time_us * 1000);
    to_.address.push_back(row.kind == kRefused ? -1 : row.address);
    if (row.kind == kRefused) to_.device_free.push_back(row.address);
    to_.device.push_back(static_cast<int32_t>(device));
    to_.operation.push_back(name(row.place.operation));
    to_.frame.push_back(name(row.place.line));
    to_.module.push_back(name(row.module));
    to_.category.push_back(row.range == Row::kNoRange ? -1 : range_name(row.range));
    to_.stack.push_back(name(row.place.stack));
    to_.pool.push_back(row.pool);
  }

  // Index of traces.trace.RANGE_BEGIN or RANGE_END, which may be missing from the file's texts.
  int32_t range_name(Row::Range range) {
    int32_t& number = ranges_[range == Row::kEnds];
    if (number < 0) {
      number = static_cast<int32_t>(to_.names.size());
      to_.names.emplace_back(range == Row::kEnds ? "range ends" : "range begins");
    }
    return number;
  }

  int32_t name(int32_t text) {
    if (text < 0) return -1;
    int32_t& number = numbers_[static_cast<size_t>(text)];
    if (number < 0) {
      number = static_cast<int32_t>(to_.names.size());
      to_.names.emplace_back(texts_[static_cast<size_t>(text)]);
    }
    return number;
  }

  // Merges events and marks. A clock that goes back is treated as standing still, so that each device's
  // events keep their order.
  void merge() {
    struct Next {
      int64_t clock;
      size_t device;
      bool event;
      size_t row;
      bool operator>(const Next& other) const {
        return std::tie(clock, device, event) > std::tie(other.clock, other.device, other.event);
      }
    };
    std::priority_queue<Next, std::vector<Next>, std::greater<>> queue;
    const auto table = [&](size_t device, bool event) -> const Chunked<Row>& {
      return event ? devices_[device].rows : devices_[device].marks;
    };
    const auto look = [&](int64_t clock, size_t device, bool event, size_t row) {
      const auto& rows = table(device, event);
      if (row < rows.size()) queue.push({std::max(clock, rows[row].time_us), device, event, row});
    };
    for (size_t device = 0; device < devices_.size(); ++device) look(0, device, false, 0), look(0, device, true, 0);
    for (size_t done = 0; !queue.empty(); ++done) {
      if (done % kTick == 0) tick_();
      const auto [clock, device, event, row] = queue.top();
      queue.pop();
      add(table(device, event)[row], device);
      look(clock, device, event, row + 1);
    }
  }

  std::deque<DeviceRows>& devices_;
  const Texts& texts_;
  std::function<void()> tick_;
  Columns to_;
  std::vector<int64_t> first_buffer_;  // of each device
  std::vector<int32_t> numbers_;       // of texts, index among the names
  int32_t ranges_[2] = {-1, -1};
};

}  // namespace traces
