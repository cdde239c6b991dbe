// What every simulated allocator is, and the events that it is put through.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device.hpp"

namespace simulators {

// Where a buffer was put. The handle is the allocator's own, not negative, and comes back with the free.
struct Placed {
  static constexpr int64_t nothing = -1;  // a request that gets no memory and needs no free: of zero bytes
  static constexpr int64_t failed = -2;   // out of memory, after all that the allocator does against it

  int64_t address, handle;
};

class Allocator {
 public:
  explicit Allocator(Device& device) : device_(device) {}
  virtual ~Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // For 0 to 2 * Device::most_bytes bytes. Where it fails, nothing has changed but what the allocator had cached.
  virtual Placed allocate(int64_t size, int64_t stream) = 0;
  virtual void free(int64_t handle, int64_t stream) = 0;
  // A segment that a recorded allocator gave back. Who has one like it that is free as a whole gives it back too.
  virtual void give_back(int64_t, int64_t, int64_t) {}
  // Where a recorded allocator put the request that comes next: for who has a first state to correct.
  virtual void expect(int64_t, int64_t, int64_t) {}

  // Bytes of the blocks that are in use, rounding and headers included.
  int64_t live() const { return live_; }
  Device& device() { return device_; }

 protected:
  static Placed none() { return {-1, Placed::nothing}; }
  static Placed fail() { return {-1, Placed::failed}; }
  // Up to a multiple of a power of two.
  static int64_t rounded(int64_t size, int64_t unit) { return (size + unit - 1) & -unit; }

  Device& device_;
  int64_t live_ = 0;
};

// Columns of one length, in the order of time.
struct Events {
  const uint8_t* kind;  // 0 an alloc, 1 a free, 6 a segment given back, others pass
  const int64_t* birth;  // index of the alloc of an event's buffer
  const int64_t* size;   // of allocs and segments
  const int64_t* stream;
  const int64_t* address;  // of segments, and of allocs in truth; null where that is no matter
  int64_t count;
};

// What each event led to.
struct Course {
  std::vector<int64_t> address;         // of allocs; -1 elsewhere, where it failed and where there was no memory to get
  std::vector<int64_t> live, reserved;  // bytes after the event
  int64_t failed_at = -1;               // the first alloc that failed
};

// An alloc that fails is left out, and its free with it; what comes after is told as if it had never been. The first
// events led to the allocator's first state: they have handles already, or -1, and are not run.
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
