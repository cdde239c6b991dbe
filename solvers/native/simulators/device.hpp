// A device with addresses and a limit but without memory: the source of segments for simulated allocators.
#pragma once

#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <vector>

#include "simulators/holes.hpp"

namespace simulators {

// A range of held memory. Segments of one region lie in one range of addresses, across which blocks may reach.
struct Segment {
  int64_t address, size, stream, region;
  int64_t start, end;  // event indices of reservation and release; the end is -1 until the release
};

class Device {
 public:
  // More bytes than any device has; sizes up to twice this can be rounded and added without overflow.
  static constexpr int64_t most_bytes = int64_t{1} << 56;
  // Alignment of addresses in bytes, like that of the driver's large allocations.
  static constexpr int64_t page_bytes = int64_t{2} << 20;

  // Addresses chosen by this device lie above `floor`.
  explicit Device(int64_t limit, int64_t floor = 0)
      : limit_(std::min(limit, most_bytes)), floor_(paged(std::min(floor, most_bytes) + 1)) {
    holes_.add(floor_, most_bytes * 32);
  }

  // Reserves memory with addresses (cudaMalloc); -1 beyond the limit.
  int64_t reserve(int64_t size, int64_t stream) {
    if (size > limit_ - reserved_) return -1;
    int64_t address = answered(size);
    if (address < 0 && (address = reserve_addresses(size)) < 0) return -1;
    hold(address, size, stream, ++regions_);
    ++calls_;
    return address;
  }

  // Releases memory of reserve() (cudaFree).
  void release(int64_t address) {
    const auto at = held_.find(address);
    release_addresses(address, segments_[at->second].size);
    let_go(at);
    ++calls_;
  }

  // Reserves addresses without memory (cuMemAddressReserve); -1 if none are left.
  int64_t reserve_addresses(int64_t size) {
    const int64_t address = holes_.lowest(paged(size));
    if (address >= 0) holes_.take(address, paged(size));
    return address;
  }

  void release_addresses(int64_t address, int64_t size) {
    if (address >= floor_) holes_.add(address, paged(size));
  }

  // Sets the address of the next reservation of `size` bytes without an answer. Answers lie below the floor, and are
  // ignored if memory is held there by then.
  void answer(int64_t size, int64_t address) { answers_[size].push_back(address); }

  // Holds memory below the floor from before the first event; not counted as a driver call.
  void adopt(int64_t address, int64_t size, int64_t stream) { hold(address, size, stream, ++regions_); }

  // Returns a region number for addresses of reserve_addresses(), as map() requires.
  int64_t new_region() { return ++regions_; }

  // Maps memory to addresses without memory (cuMemCreate, cuMemMap); false beyond the limit.
  bool map(int64_t address, int64_t size, int64_t stream, int64_t region, int64_t calls) {
    if (size > limit_ - reserved_) return false;
    hold(address, size, stream, region);
    calls_ += calls;
    return true;
  }

  // Releases the memory of any mapped addresses (cuMemUnmap, cuMemRelease). A segment of which a part remains is
  // recorded as two segments from its start on.
  void unmap(int64_t address, int64_t size, int64_t calls) {
    const int64_t end = address + size;
    auto at = std::prev(held_.upper_bound(address));
    while (at != held_.end() && at->first < end) {
      Segment segment = segments_[at->second];
      if (segment.address < address) at = cut(at, address);
      else if (segment.address + segment.size > end) cut(at, end);
      else at = let_go(at);
    }
    calls_ += calls;
  }

  // Sets the index of the current event.
  void at(int64_t event) { now_ = event; }

  int64_t reserved() const { return reserved_; }
  int64_t limit() const { return limit_; }
  int64_t calls() const { return calls_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  using Held = std::map<int64_t, size_t>;

  static int64_t paged(int64_t size) { return std::max(size + page_bytes - 1, page_bytes) / page_bytes * page_bytes; }

  int64_t answered(int64_t size) {
    const auto found = answers_.find(size);
    if (found == answers_.end() || found->second.empty()) return -1;
    const int64_t address = found->second.front();
    found->second.pop_front();
    const auto above = held_.lower_bound(address);
    const bool clear = above == held_.end() || above->first >= address + size;
    if (above == held_.begin()) return clear ? address : -1;
    const Segment& below = segments_[std::prev(above)->second];
    return clear && below.address + below.size <= address ? address : -1;
  }

  void hold(int64_t address, int64_t size, int64_t stream, int64_t region) {
    held_.emplace(address, segments_.size());
    segments_.push_back({address, size, stream, region, now_, -1});
    reserved_ += size;
  }

  Held::iterator let_go(Held::iterator at) {
    Segment& segment = segments_[at->second];
    segment.end = now_;
    reserved_ -= segment.size;
    return held_.erase(at);
  }

  // Splits a segment at an address within; returns the upper part.
  Held::iterator cut(Held::iterator at, int64_t address) {
    Segment upper = segments_[at->second];
    segments_[at->second].size = address - upper.address;
    upper.size -= address - upper.address;
    upper.address = address;
    segments_.push_back(upper);
    return held_.emplace(address, segments_.size() - 1).first;
  }

  int64_t limit_, floor_, reserved_ = 0, calls_ = 0, regions_ = 0, now_ = 0;
  std::vector<Segment> segments_;
  Held held_;    // currently held segments by address: index into segments_
  Holes holes_;  // free addresses
  std::map<int64_t, std::deque<int64_t>> answers_;  // by size
};

}  // namespace simulators
