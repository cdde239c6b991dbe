// The lists and dicts of a memory snapshot while its pickle is read, reduced to the parts that are needed
// later.
//
// A list or dict grows only while it is on the stack. Once it is an element of another list or dict, it is
// complete and must not change: no writer of snapshots does that, since no snapshot contains itself. Complete
// objects are compacted: a dict that becomes an element of a list and has a file's name is a frame, kept by
// its number; a list of frames is a stack, of which the place is kept; a dict with an action is an event. All
// other objects stay as they are.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "chunked.hpp"
#include "places.hpp"
#include "texts.hpp"
#include "value.hpp"

namespace traces {

// Known keys: the numbers of their texts.
enum Key : uint32_t {
  kAction, kAddr, kSize, kStream, kTime, kFrames, kFilename, kName, kLine, kDevice, kAddress, kBlocks, kState,
  kRequestedSize, kTotalSize, kIsExpandable, kSegments, kDeviceTraces, kSettings, kDeviceFree, kPool, kSegmentPool,
  kUserMetadata, kAnnotations, kStage, kHistory, kKeys
};
constexpr const char* kKeyNames[kKeys] = {
    "action", "addr", "size", "stream", "time_us", "frames", "filename", "name", "line", "device", "address", "blocks",
    "state", "requested_size", "total_size", "is_expandable", "segments", "device_traces", "allocator_settings",
    "device_free", "pool_id", "segment_pool_id", "user_metadata", "external_annotations", "stage", "history"};
using Fields = std::array<Value, kKeys>;

struct Event {
  Value action, addr, size, stream, time, frames, device_free, pool, user_metadata;

  static Event of(const Fields& fields) {
    return {fields[kAction], fields[kAddr],       fields[kSize], fields[kStream],      fields[kTime],
            fields[kFrames], fields[kDeviceFree], fields[kPool], fields[kUserMetadata]};
  }
};

class Records {
 public:
  enum Shape : uint64_t { kList, kDict, kStack, kFrame, kEvent };
  struct Items {
    const Value* first = nullptr;
    size_t count = 0;
    const Value* begin() const { return first; }
    const Value* end() const { return first + count; }
  };

  Records(Budget& budget, bool paths)
      : texts(budget), places(budget, texts, paths), budget_(budget), objects_(budget), events_(budget), stacks_(budget) {
    for (const char* name : kKeyNames) texts.id(name);
  }

  Texts texts;
  Places places;

  Value list() { return open(kList); }
  Value dict() { return open(kDict); }

  void extend(Value list, const Value* first, size_t count) {
    for (size_t i = 0; i < count; ++i) whole(first[i], true);
    append(growing(list, kList), first, count);
  }
  // Adds items to a dict; keys and values alternate.
  void set(Value dict, const Value* first, size_t count) {
    if (count % 2 != 0) throw Damaged{};
    for (size_t i = 0; i < count; i += 2) {
      if (first[i].is(Value::kObject) || first[i].is(Value::kSet)) throw Damaged{};  // no valid key
      whole(first[i + 1], false);
    }
    append(growing(dict, kDict), first, count);
  }
  // Completes a value that has become part of a list (`of_list`) or of another object.
  void whole(Value value, bool of_list) {
    if (!value.is(Value::kObject)) return;
    Object& object = objects_[static_cast<size_t>(value.payload())];
    if (object.whole) return;
    object.whole = 1;
    if (object.shape == kList) make_stack(object);
    if (object.shape == kDict && of_list) make_row(object);
  }

  bool has_shape(Value value, Shape shape) const {
    return value.is(Value::kObject) && objects_[static_cast<size_t>(value.payload())].shape == shape;
  }
  // The elements of a list or, as alternating keys and values, of a dict that was not compacted.
  Items items(Value value) const {
    const auto& slot = slots_[objects_[static_cast<size_t>(value.payload())].at];
    return {slot.data(), slot.size()};
  }
  // The values of a dict under the known keys.
  Fields fields(Value dict) const { return fields_of(items(dict)); }
  const Event& event(Value value) const { return events_[objects_[static_cast<size_t>(value.payload())].at]; }
  uint32_t frame(Value frame) const {
    return static_cast<uint32_t>(objects_[static_cast<size_t>(frame.payload())].at);
  }
  // The place of a stack.
  Place place(Value value) const {
    const uint64_t at = objects_[static_cast<size_t>(value.payload())].at;
    return at == kEmpty ? Place{} : stacks_[at];
  }
  bool is_empty_stack(Value value) const {
    return has_shape(value, kStack) && objects_[static_cast<size_t>(value.payload())].at == kEmpty;
  }

  // Releases all records except the texts.
  void forget() { objects_.clear(), events_.clear(), stacks_.clear(), std::vector<std::vector<Value>>().swap(slots_); }

 private:
  struct Object {
    uint64_t shape : 3, whole : 1, at : 60;  // `at`: a slot, an event, a frame or a stack
  };
  static constexpr uint64_t kEmpty = uint64_t{1} << 59;
  static constexpr size_t kKeptCapacity = 1 << 12;  // of a reused slot

  Value open(Shape shape) {
    if (free_.empty()) {
      budget_.take(sizeof slots_[0] + sizeof free_[0]);
      free_.push_back(slots_.size());
      slots_.emplace_back();
    }
    objects_.push({shape, 0, free_.back()});
    free_.pop_back();
    return {Value::kObject, static_cast<int64_t>(objects_.size() - 1)};
  }

  Object& growing(Value value, Shape shape) {
    if (!has_shape(value, shape)) throw Damaged{};
    Object& object = objects_[static_cast<size_t>(value.payload())];
    if (object.whole) throw Damaged{};
    return object;
  }

  void append(const Object& object, const Value* first, size_t count) {
    auto& slot = slots_[object.at];
    const size_t before = slot.capacity();
    slot.insert(slot.end(), first, first + count);
    if (slot.capacity() != before) budget_.take((slot.capacity() - before) * sizeof(Value));
  }

  void release(uint64_t at) {
    auto& slot = slots_[at];
    slot.clear();
    if (slot.capacity() > kKeptCapacity) {
      budget_.give(slot.capacity() * sizeof(Value));
      std::vector<Value>().swap(slot);
    }
    free_.push_back(at);
  }

  static Fields fields_of(const Items& items) {
    Fields fields;
    for (size_t i = 0; i + 1 < items.count; i += 2) {
      const Value key = items.first[i];
      if (key.is(Value::kText) && key.payload() < kKeys) fields[static_cast<size_t>(key.payload())] = items.first[i + 1];
    }
    return fields;
  }

  void make_row(Object& object) {
    const auto& slot = slots_[object.at];
    const Fields fields = fields_of({slot.data(), slot.size()});
    const bool file = !fields[kFilename].is(Value::kMissing), action = !fields[kAction].is(Value::kMissing);
    if (file == action) return;  // a dict with both is kept whole
    if (file && !fields[kLine].is(Value::kNumber)) return;
    release(object.at);
    if (file) {
      const auto text = [](Value value) { return value.is(Value::kText) ? value.payload() : -1; };
      object.at = places.frame(text(fields[kName]), text(fields[kFilename]), fields[kLine].payload());
      object.shape = kFrame;
    } else {
      object.at = events_.size();
      object.shape = kEvent;
      events_.push(Event::of(fields));
    }
  }

  void make_stack(Object& object) {
    const auto& slot = slots_[object.at];
    for (const Value frame : slot)
      if (!has_shape(frame, kFrame)) return;
    Places::Stack stack(places);
    for (const Value frame : slot) stack.add(this->frame(frame));
    const bool empty = slot.empty();
    release(object.at);
    object.at = empty ? kEmpty : stacks_.size();
    object.shape = kStack;
    if (!empty) stacks_.push(stack.place());
  }

  Budget& budget_;
  Chunked<Object> objects_;
  Chunked<Event> events_;
  Chunked<Place> stacks_;
  std::vector<std::vector<Value>> slots_;  // elements of lists, and keys and values of dicts
  std::vector<size_t> free_;               // free slots
};

}  // namespace traces
