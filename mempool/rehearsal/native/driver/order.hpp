// Uses of the same memory by works of different streams that nothing orders: events, waits of the host, and the rules of the
// default stream do.
#pragma once

#include "gpu.hpp"

namespace fake {

class Order {
 public:
  // Name the work that conflicts with a use of memory; null: none.
  const char* conflict(const Stream& stream, const Range& range) const {
    const char* found = nullptr;
    each(range, [&](std::uintptr_t begin, const Accesses& accesses) {
      for (const Access& access : accesses.last) {
        if (begin + access.bytes <= range.begin) continue;
        const auto before = stream.before.find(access.stream);
        const bool ordered = before != stream.before.end() && access.position < before->second;
        if (access.stream != &stream && !ordered && (access.writes || range.writes)) found = access.name;
      }
    });
    return found;
  }
  void add(const Stream& stream, const Range& range, const char* name) {
    Accesses& accesses = accesses_[range.begin];
    accesses.bytes = std::max(accesses.bytes, range.bytes);
    const Access access{&stream, stream.queued, range.bytes, range.writes, name};
    std::vector<Access>& last = accesses.last;
    const auto covered = [&](const Access& one) {
      return one.stream == &stream && one.writes == range.writes && one.bytes <= range.bytes;
    };
    last.erase(std::remove_if(last.begin(), last.end(), covered), last.end());
    last.push_back(access);
  }
  void forget(const Range& range) {
    accesses_.erase(accesses_.lower_bound(range.begin), accesses_.lower_bound(range.begin + range.bytes));
  }
  // True for the first conflict of two kernels.
  bool is_new(const char* one, const char* other) { return told_.insert({one, other}).second; }

  Clock host;  // what the host has waited for

 private:
  struct Access {  // the last of its kind by a stream
    const Stream* stream;
    std::uint64_t position;  // in the stream
    std::size_t bytes;
    bool writes;
    const char* name;
  };
  struct Accesses {
    std::size_t bytes = 0;
    std::vector<Access> last;
  };

  template <class Visit>
  void each(const Range& range, Visit visit) const {
    auto at = accesses_.lower_bound(range.begin);
    if (at != accesses_.begin() && std::prev(at)->first + std::prev(at)->second.bytes > range.begin) --at;
    for (; at != accesses_.end() && at->first < range.begin + range.bytes; ++at) visit(at->first, at->second);
  }

  std::map<std::uintptr_t, Accesses> accesses_;  // by the first byte
  std::set<std::pair<std::string, std::string>> told_;
};

inline void Gpu::check_order(Stream& stream, Work& work) {
  if (order == nullptr) return;
  join(stream.before, order->host);
  for (const auto& other : streams) {
    if (!waits_for(stream, *other)) continue;
    join(stream.before, other->before);
    stream.before[other.get()] = other->queued;
  }
  if (work.waits != nullptr) join(stream.before, work.waits->before);
  for (const Range& range : work.uses) {
    const char* const other = order->conflict(stream, range);
    if (other != nullptr && order->is_new(other, work.name)) {
      fault(std::string("memory is used by work of two streams that nothing orders: ") + other + " and " + work.name);
    }
  }
  for (const Range& range : work.uses) order->add(stream, range, work.name);
  if (work.marks == nullptr) return;
  work.marks->before = stream.before;
  work.marks->before[&stream] = stream.queued;
}

inline void Gpu::forget_order(const Range& range) {
  if (order != nullptr) order->forget(range);
}
}  // namespace fake
