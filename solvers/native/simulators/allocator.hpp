// Base class of the simulated allocators, and the loop that runs a trace's events through an allocator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "simulators/device.hpp"

namespace simulators {

// Container of values with small, reused indices: the handles of allocators.
template <class T>
class Slots {
 public:
  int64_t add(T value) {
    if (unused_.empty()) {
      values_.push_back(std::move(value));
      return static_cast<int64_t>(values_.size()) - 1;
    }
    const int64_t at = unused_.back();
    unused_.pop_back();
    values_[at] = std::move(value);
    return at;
  }

  void remove(int64_t at) { unused_.push_back(at); }

  // The reference is valid until the next add().
  T& operator[](int64_t at) { return values_[at]; }
  const T& operator[](int64_t at) const { return values_[at]; }

 private:
  std::vector<T> values_;
  std::vector<int64_t> unused_;
};

// Result of a request: address and handle. The handle is chosen by the allocator, at least 0, and passed to free().
struct Placed {
  static constexpr int64_t nothing = -1;  // a request of zero bytes: gets no memory and needs no free
  static constexpr int64_t failed = -2;   // out of memory, after all remedies of the allocator

  int64_t address, handle;
};

class Allocator {
 public:
  explicit Allocator(Device& device) : device_(device) {}
  virtual ~Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Size: 0 to 2 * Device::most_bytes bytes. A failed request changes nothing except the allocator's cached memory.
  virtual Placed allocate(int64_t size, int64_t stream) = 0;
  virtual void free(int64_t handle, int64_t stream) = 0;
  // Repeats a recorded release: an allocator with an equal, entirely free segment releases that segment, too.
  virtual void give_back(int64_t, int64_t, int64_t) {}
  // Announces the recorded address of the next request, for allocators that correct an inferred first state.
  virtual void expect(int64_t, int64_t, int64_t) {}

  // Bytes of the blocks in use, rounding and headers included.
  int64_t live() const { return live_; }
  Device& device() { return device_; }

 protected:
  static Placed none() { return {-1, Placed::nothing}; }
  static Placed fail() { return {-1, Placed::failed}; }
  // Rounds up to a multiple of a power of two.
  static int64_t rounded(int64_t size, int64_t unit) { return (size + unit - 1) & -unit; }

  Device& device_;
  int64_t live_ = 0;
};

// Columns of one length, in the order of time.
struct Events {
  const uint8_t* kind;  // 0 an alloc, 1 a free, 6 a segment released; others are skipped
  const int64_t* birth;  // index of the alloc of an event's buffer
  const int64_t* size;   // of allocs and segments
  const int64_t* stream;
  const int64_t* address;  // of segments, and the recorded ones of allocs; null to ignore both
  int64_t count;
};

// Outcome of each event.
struct Course {
  std::vector<int64_t> address;         // of allocs; -1 for other events, failed allocs and zero bytes
  std::vector<int64_t> live, reserved;  // bytes after the event
  int64_t failed_at = -1;               // the first alloc that failed
};

// Runs the events. A failed alloc is left out together with its free, as if neither had existed. The first events
// describe the allocator's first state: their handles are given, -1 for none, and they are not run.
inline Course run(Allocator& allocator, const Events& events, std::vector<int64_t> handles) {
  Device& device = allocator.device();
  Course course;
  const auto count = static_cast<size_t>(events.count);
  course.address.assign(count, -1);
  course.live.resize(count);
  course.reserved.resize(count);
  const auto first = static_cast<int64_t>(handles.size());
  std::fill_n(course.live.begin(), first, allocator.live());
  std::fill_n(course.reserved.begin(), first, device.reserved());
  handles.resize(count, Placed::nothing);
  for (int64_t i = first; i < events.count; ++i) {
    device.at(i);
    if (events.kind[i] == 0) {
      if (events.address != nullptr) allocator.expect(events.size[i], events.stream[i], events.address[i]);
      const Placed placed = allocator.allocate(std::min(events.size[i], 2 * Device::most_bytes), events.stream[i]);
      course.address[i] = placed.address;
      handles[i] = placed.handle;
      if (placed.handle == Placed::failed && course.failed_at < 0) course.failed_at = i;
    } else if (events.kind[i] == 1) {
      int64_t& handle = handles[events.birth[i]];
      if (handle >= 0) allocator.free(handle, events.stream[i]);
      handle = Placed::nothing;
    } else if (events.kind[i] == 6 && events.address != nullptr) {
      allocator.give_back(events.address[i], events.size[i], events.stream[i]);
    }
    course.live[i] = allocator.live();
    course.reserved[i] = device.reserved();
  }
  return course;
}

}  // namespace simulators
