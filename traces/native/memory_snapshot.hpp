// Conversion of a PyTorch memory snapshot to rows of each of its devices; see traces/formats/snapshot.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "annotations.hpp"
#include "device_rows.hpp"
#include "fields.hpp"
#include "records.hpp"

namespace traces {

class MemorySnapshot {
 public:
  // Called now and then; may throw.
  using Tick = std::function<void()>;

  // `lenient`: invalid events and segments are counted in `skipped` instead of refused.
  MemorySnapshot(Budget& budget, Records& records, uint64_t file_bytes, bool lenient, Tick tick)
      : budget_(budget), records_(records), visits_left_(kVisits + file_bytes), lenient_(lenient), tick_(std::move(tick)) {}

  std::map<std::string, int64_t> actions, skipped;  // counts of the actions that are not kept, and of the invalid events
  bool expandable = false;
  std::deque<DeviceRows> devices;

  // `end`: the events are complete, so that the segments show the state after the last event. Without events,
  // as `torch.cuda.memory_snapshot` returns them, segments name their devices.
  void read(const Fields& root, bool end) {
    const bool listed = root[kDeviceTraces].is(Value::kMissing);
    const auto traces = listed ? Records::Items{} : list_at("device_traces", root[kDeviceTraces]);
    visit(traces.count);
    for (const Value events : traces) {
      devices.emplace_back(budget_);
      add_events(events);
    }
    if (!root[kAnnotations].is(Value::kMissing)) add_annotations(root[kAnnotations]);
    if (!end) return;
    most_devices_ = listed ? kMostListed : devices.size();
    const auto segments = list_at("segments", root[kSegments]);
    visit(segments.count);
    size_t index = 0;
    for (const Value segment : segments) {
      attempt([&] { add_segment(segment); }, [&] { return "segment " + std::to_string(index); });
      ++index;
    }
    if (!pools_told_ && pools_.size() > 1)
      for (DeviceRows& device : devices) device.place_in_pools();
  }

 private:
  void add_events(Value events) {
    const auto device = std::to_string(devices.size() - 1);
    const auto rows = list_at("device " + device, events);
    visit(rows.count);
    for (size_t i = 0; i < rows.count; ++i) {
      if (i % kTick == 0) tick_();
      attempt([&] { add_event(rows.first[i]); }, [&] { return "device " + device + ", event " + std::to_string(i); });
    }
  }

  void add_event(Value value) {
    const Event event = event_of(value);
    const uint8_t kind = kind_of(event.action);
    if (kind == kOther) return;
    const bool refused = kind == kRefused;  // such an event has no address, and may hold the device's free bytes
    const int64_t address = refused ? free_of(event.device_free) : number_of(records_, event.addr, "addr"),
                  size = refused ? refused_size(event.size) : number_of(records_, event.size, "size"),
                  stream = number_of(records_, event.stream, "stream"),
                  time = event.time.is(Value::kMissing) ? 0 : number_of(records_, event.time, "time_us");
    Row row{-1, size, stream, time, address};
    row.kind = kind;
    row.pool = pool_of(event.pool);
    pools_told_ = pools_told_ || event.pool.is(Value::kTuple);
    DeviceRows& device = devices.back();
    if (kind == kFree) return device.free(row);
    if (kind == kReserve || kind == kRelease) return device.other(row);
    row.place = place_of(event.frames);
    if (refused) return device.other(row);
    row.module = module_of(event.user_metadata);
    device.alloc(row);
  }

  // Returns the bytes of a request that failed, at most kLargestField; 0 if unknown. The failure counts in any case.
  static int64_t refused_size(Value value) {
    if (value.is(Value::kLarge)) return kLargestField;
    if (!value.is(Value::kNumber) || value.payload() < 0) return 0;
    return std::min(value.payload(), kLargestField);
  }

  static int64_t free_of(Value value) {
    return value.is(Value::kNumber) && value.payload() >= 0 && value.payload() <= kLargestField ? value.payload() : -1;
  }

  // Returns the number of a private pool, from 1 on; 0 for the common pool, PyTorch's (0, 0), and if unknown.
  int32_t pool_of(Value id) {
    if (!id.is(Value::kTuple) || id.payload() <= 1) return 0;
    return pools_.try_emplace(id.payload(), static_cast<int32_t>(pools_.size())).first->second;
  }

  // Returns the text that the program attached to an alloc (`torch.cuda.memory._set_memory_metadata`), -1 if
  // none.
  int32_t module_of(Value text) const {
    if (!text.is(Value::kText) || records_.texts[static_cast<size_t>(text.payload())].empty()) return -1;
    return static_cast<int32_t>(text.payload());
  }

  void add_annotations(Value value) {
    Annotations annotations(records_.texts, devices);
    const auto rows = list_at("external_annotations", value);
    visit(rows.count);
    for (const Value row : rows) try {
        add_annotation(annotations, row);
      } catch (const Fault&) {
        ++actions["annotation"];  // annotations do not affect memory, so invalid ones are only counted
      }
    annotations.sort();
  }
  void add_annotation(Annotations& annotations, Value value) {
    const Fields fields = fields_of(value);
    const auto text = [&](Value field) {
      return field.is(Value::kText) ? records_.texts[static_cast<size_t>(field.payload())] : std::string_view{};
    };
    const int64_t device = fields[kDevice].is(Value::kMissing) ? 0 : number_of(records_, fields[kDevice], "device");
    const int64_t time = number_of(records_, fields[kTime], "time_us");
    annotations.add(static_cast<size_t>(device), time, std::string(text(fields[kName])), text(fields[kStage]));
  }

  Event event_of(Value value) {
    if (records_.has_shape(value, Records::kEvent)) return records_.event(value);
    if (records_.has_shape(value, Records::kFrame)) return {};
    return Event::of(fields_of(value));
  }

  // Returns the type of a trace's event; kOther is counted.
  uint8_t kind_of(Value action) {
    std::string_view name = type_of(records_, action);
    std::string digits;
    if (action.is(Value::kText)) name = records_.texts[static_cast<size_t>(action.payload())];
    if (action.is(Value::kMissing)) name = "None";
    if (action.is(Value::kNumber)) name = digits = std::to_string(action.payload());
    if (name == "alloc") return kAlloc;
    if (name == "free" || name == "free_completed") return kFree;
    if (name == "segment_alloc" || name == "segment_map") return kReserve;
    if (name == "segment_free" || name == "segment_unmap") return kRelease;
    if (name == "oom") return kRefused;
    ++actions[std::string(name)];
    return kOther;
  }

  // Returns the place of an alloc's frames, the innermost first.
  Place place_of(Value frames) {
    if (frames.is(Value::kMissing)) return {};
    if (records_.has_shape(frames, Records::kStack)) return records_.place(frames);
    Places::Stack stack(records_.places);
    const auto items = list_of(records_, frames);
    visit(items.count);
    for (const Value frame : items) stack.add(frame_of(frame));
    return stack.place();
  }

  uint32_t frame_of(Value value) {
    if (records_.has_shape(value, Records::kFrame)) return records_.frame(value);
    if (records_.has_shape(value, Records::kEvent)) return records_.places.frame(-1, -1, 0);  // no file name
    const Fields fields = fields_of(value);
    const auto text = [](Value field) { return field.is(Value::kText) ? field.payload() : -1; };
    const Value line = fields[kLine];
    if (!line.is(Value::kMissing) && !line.is(Value::kNumber))
      throw Fault("line is not a number", std::string("line is ") + type_of(records_, line) + ", not a number");
    return records_.places.frame(text(fields[kName]), text(fields[kFilename]), line.payload());
  }

  void add_segment(Value value) {
    const Fields segment = fields_of(value);
    const Value index = segment[kDevice];
    const int64_t at = index.is(Value::kMissing) ? 0 : number_of(records_, index, "device");
    if (at >= static_cast<int64_t>(most_devices_))
      throw Fault("a segment of no device", "a segment of device " + std::to_string(at) + ", of " +
                                                std::to_string(devices.size()) + " devices");
    while (at >= static_cast<int64_t>(devices.size())) devices.emplace_back(budget_);
    const int64_t stream = number_of(records_, segment[kStream], "stream"),
                  begin = number_of(records_, segment[kAddress], "address"),
                  total = number_of(records_, segment[kTotalSize], "total_size");
    DeviceRows& device = devices[static_cast<size_t>(at)];
    const int32_t pool = pool_of(segment[kSegmentPool]);
    std::vector<Row> alive;
    const int64_t end = blocks_of(segment[kBlocks], begin, alive);
    if (!device.held.add(begin, std::max(end - begin, total), stream, pool)) throw Fault("a segment overlaps another");
    expandable = expandable || (segment[kIsExpandable].is(Value::kBool) && segment[kIsExpandable].payload() == 1);
    for (Row& row : alive) {
      row.stream = stream, row.pool = pool;
      device.alive(row);
    }
  }

  // Returns the end of a segment's blocks, and adds address, requested size and place of the active ones. A
  // block without an address follows the block before (PyTorch before 2.1).
  int64_t blocks_of(Value value, int64_t address, std::vector<Row>& alive) {
    if (value.is(Value::kMissing)) return address;
    const auto blocks = list_of(records_, value);
    visit(blocks.count);
    for (const Value one : blocks) {
      const Fields block = fields_of(one);
      if (!block[kAddress].is(Value::kMissing)) address = number_of(records_, block[kAddress], "address");
      const int64_t size = number_of(records_, block[kSize], "size");
      const bool asked = !block[kRequestedSize].is(Value::kMissing);
      const int64_t requested = asked ? number_of(records_, block[kRequestedSize], "requested_size") : size;
      if (is_active(block[kState])) alive.push_back({-1, requested, 0, 0, address, place_of(frames_of(block))});
      address += size;
    }
    return address;
  }

  // Returns the frames of a block's alloc; PyTorch before 2.1 keeps them in a history, the latest first.
  Value frames_of(const Fields& block) {
    if (!block[kFrames].is(Value::kMissing) || !records_.has_shape(block[kHistory], Records::kList))
      return block[kFrames];
    const auto history = records_.items(block[kHistory]);
    return history.count == 0 ? Value() : fields_of(history.first[0])[kFrames];
  }

  bool is_active(Value state) const {
    constexpr std::string_view active = "active";
    return state.is(Value::kText) &&
           records_.texts[static_cast<size_t>(state.payload())].substr(0, active.size()) == active;
  }

  Fields fields_of(Value dict) {
    if (records_.has_shape(dict, Records::kDict)) visit(records_.items(dict).count);
    return dict_of(records_, dict);
  }

  // Limits the visited values to kVisits plus one per byte of the file: shared objects could otherwise be visited
  // arbitrarily often, while every unshared value takes a byte.
  void visit(uint64_t count) {
    if (count > visits_left_) throw Refused("it refers to the same things again and again");
    visits_left_ -= count;
  }

  template <class Work, class Where>
  void attempt(const Work& work, const Where& where) {
    try {
      work();
    } catch (const Fault& fault) {
      if (!lenient_) throw Refused(where() + ": " + fault.reason);
      ++skipped[fault.kind];
    }
  }
  Records::Items list_at(const std::string& where, Value value) const {
    try {
      return list_of(records_, value);
    } catch (const Fault& fault) {
      throw Refused(where + ": " + fault.reason);
    }
  }

  static constexpr uint8_t kOther = 255;
  static constexpr size_t kTick = 1 << 16;
  static constexpr uint64_t kVisits = 1 << 20;
  static constexpr size_t kMostListed = 1 << 10;  // devices that segments alone may name
  Budget& budget_;
  Records& records_;
  uint64_t visits_left_;
  size_t most_devices_ = 0;
  std::map<int64_t, int32_t> pools_{{1, 0}};  // pool numbers by the payloads of their ids
  bool pools_told_ = false, lenient_;
  Tick tick_;
};

}  // namespace traces
