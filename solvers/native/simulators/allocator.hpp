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
  const uint8_t* kind;  // 0 an alloc, 1 a free, others pass
  const int64_t* birth;  // index of the alloc of an event's buffer
  const int64_t* size;   // of allocs
  const int64_t* stream;
  int64_t count;
};

// What each event led to.
struct Course {
  std::vector<int64_t> address;         // of allocs; -1 elsewhere, where it failed and where there was no memory to get
  std::vector<int64_t> live, reserved;  // bytes after the event
  int64_t failed_at = -1;               // the first alloc that failed
};

// An alloc that fails is left out, and its free with it; what comes after is told as if it had never been.
inline Course run(Allocator& allocator, const Events& events) {
  Device& device = allocator.device();
  Course course;
  const auto count = static_cast<size_t>(events.count);
  course.address.assign(count, -1);
  course.live.resize(count);
  course.reserved.resize(count);
  std::vector<int64_t> handles(count, Placed::nothing);
  for (int64_t i = 0; i < events.count; ++i) {
    device.at(i);
    if (events.kind[i] == 0) {
      const Placed placed = allocator.allocate(std::min(events.size[i], 2 * Device::most_bytes), events.stream[i]);
      course.address[i] = placed.address;
      handles[i] = placed.handle;
      if (placed.handle == Placed::failed && course.failed_at < 0) course.failed_at = i;
    } else if (events.kind[i] == 1) {
      int64_t& handle = handles[events.birth[i]];
      if (handle >= 0) allocator.free(handle, events.stream[i]);
      handle = Placed::nothing;
    }
    course.live[i] = allocator.live();
    course.reserved[i] = device.reserved();
  }
  return course;
}

}  // namespace simulators
