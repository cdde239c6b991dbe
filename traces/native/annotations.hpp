// Conversion of named ranges, written by `record_function` and optimizers, to marks of a device's rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "device_rows.hpp"
#include "fields.hpp"
#include "texts.hpp"

namespace traces {

class Annotations {
 public:
  Annotations(Texts& texts, std::deque<DeviceRows>& devices) : texts_(texts), devices_(devices), marks_(devices.size()) {}

  // `stage`: START or END. PyTorch writes each range once per device. A step divides the iterations of all devices, so
  // only the lowest device with annotations adds one.
  void add(size_t device, int64_t time_us, const std::string& given, std::string_view stage) {
    if (device >= marks_.size()) throw Fault("an annotation of no device");
    const bool begins = stage == "START";
    if (!begins && stage != "END") throw Fault("an annotation neither starts nor ends");
    const std::string name = plain(given);
    first_ = std::min(first_, device);
    if (name.substr(0, 13) == "ProfilerStep#") {
      if (begins) mark(device, time_us, -1, Row::kNoRange);
      return;
    }
    mark(device, time_us, static_cast<int32_t>(texts_.id(name)), begins ? Row::kBegins : Row::kEnds);
    if (!begins && name.substr(0, 14) == "Optimizer.step")
      mark(device, time_us, static_cast<int32_t>(texts_.id(kOptimizerStep)), Row::kNoRange);
  }

  // Hands the marks to the devices, sorted by time.
  void sort() {
    for (size_t device = 0; device < marks_.size(); ++device) {
      std::stable_sort(marks_[device].begin(), marks_[device].end(),
                       [](const Row& a, const Row& b) { return a.time_us < b.time_us; });
      for (const Row& row : marks_[device])
        if (row.range != Row::kNoRange || device == first_) devices_[device].marks.push(row);
    }
  }

 private:
  static constexpr std::string_view kOptimizerStep = "optimizer step";  // traces.trace.AUTOMATIC_MARK
  static constexpr size_t kLongest = 200;

  // "## forward ##" is "forward".
  static std::string plain(const std::string& name) {
    const size_t begin = name.find_first_not_of("# "), end = name.find_last_not_of("# ");
    return begin == std::string::npos ? name : name.substr(begin, std::min(end + 1 - begin, kLongest));
  }

  void mark(size_t device, int64_t time_us, int32_t name, Row::Range range) {
    Row row{-1, 0, 0, time_us, -1};
    row.place.operation = name;
    row.kind = kMark;
    row.range = range;
    marks_[device].push_back(row);
  }

  Texts& texts_;
  std::deque<DeviceRows>& devices_;
  std::vector<std::vector<Row>> marks_;
  size_t first_ = SIZE_MAX;  // the first device with annotations
};

}  // namespace traces
