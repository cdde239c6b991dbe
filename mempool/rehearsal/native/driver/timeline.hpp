// Modelled time of the devices, in nanoseconds since the clock was started. Calls take no time of the host. Work is ready when
// the previous work of its stream and the awaited events have ended. A device has an engine for kernels, which fill a GPU, and one
// for copies in each direction; an engine does the work first that was ready first, and of equally ready work the earlier call.
//
// Times are decided as late as possible, when somebody asks, because work that is queued later may be ready earlier.
#pragma once

#include <array>

#include "order.hpp"

namespace fake {

struct TimedWork {
  std::shared_ptr<Cost> cost;  // null: none
  int device = 0;
  std::int64_t number = 0;                        // in the order of the calls
  std::int64_t issued = 0, end = -1;              // negative: not decided
  std::vector<std::shared_ptr<TimedWork>> after;  // empty once the end is decided
};

class Timeline {
 public:
  struct Link {
    double out_latency, out_per_byte, back_latency, back_per_byte;  // nanoseconds
    bool duplex;      // else one engine copies in both directions
    double pageable;  // nanoseconds a byte for host memory that is not page-locked
    double memory;    // nanoseconds a byte of device memory
  };
  explicit Timeline(const Link& link) : link_(link) {}

  static constexpr std::int64_t kShortest = 2000;  // a kernel with its launch, on current GPUs
  std::int64_t host = 0;                           // the host has waited until then

  Cost fill(std::size_t bytes) const { return {Cost::kKernels, nanoseconds(link_.memory * static_cast<double>(bytes))}; }
  enum Side { kDevice, kLocked, kPageable };  // memory of a device, page-locked memory of the host, and other memory
  Cost copy(Side to, Side from, std::size_t bytes) const {
    const auto size = static_cast<double>(bytes);
    if (to == kDevice && from == kDevice) return fill(2 * bytes);
    if (to != kDevice && from != kDevice) return {};
    const bool out = from == kDevice, pageable = to == kPageable || from == kPageable;
    const double each = std::max(out ? link_.out_per_byte : link_.back_per_byte, pageable ? link_.pageable : 0);
    return {out || !link_.duplex ? Cost::kOut : Cost::kBack, nanoseconds((out ? link_.out_latency : link_.back_latency) + each * size)};
  }

  void add(const Gpu& gpu, Stream* stream, const Work& work) {
    auto made = std::make_shared<TimedWork>(TimedWork{work.cost, stream->context->device, added_++, host, -1, {}});
    for (const auto& [other, last] : last_) {
      if (last->end < 0 && (other == stream || gpu.waits_for(*stream, *other))) made->after.push_back(last);
    }
    if (work.waits != nullptr && work.waits->timed != nullptr) made->after.push_back(work.waits->timed);
    if (const auto last = last_.find(stream); last != last_.end()) made->issued = std::max(host, last->second->end);
    if (work.marks != nullptr) work.marks->timed = made;
    queues_[stream].push_back(made);
    last_[stream] = std::move(made);
  }
  // Let the host wait for work, or for the last work of a stream.
  void wait(const TimedWork& work) {
    while (work.end < 0 && decide(INT64_MAX, true)) {
    }
    host = std::max(host, work.end);
  }
  void wait(const Stream& stream) {
    if (const auto last = last_.find(&stream); last != last_.end()) wait(*last->second);
  }
  bool has_passed(const TimedWork& work) {
    while (decide(host, false)) {
    }
    if (work.end >= 0 && work.end <= host) return true;
    host += kQuery;
    return false;
  }
  bool has_passed(const Stream& stream) {
    const auto last = last_.find(&stream);
    return last == last_.end() || has_passed(*last->second);
  }
  std::int64_t between(const TimedWork& begin, const TimedWork& end) {
    while ((begin.end < 0 || end.end < 0) && decide(INT64_MAX, true)) {
    }
    return end.end - begin.end;
  }

 private:
  static constexpr std::int64_t kQuery = 1000;  // for a negative answer, so that a loop of queries ends

  static std::int64_t nanoseconds(double time) { return static_cast<std::int64_t>(time + 0.5); }

  // Decide the time of the work that begins first, and not after `until`; return false if there is none, or, without `force`, if it
  // belongs to an operation that has not ended.
  bool decide(std::int64_t until, bool force) {
    std::deque<std::shared_ptr<TimedWork>>* first = nullptr;
    std::array<std::int64_t, 3> best{INT64_MAX, 0, 0};  // begin, when it was ready, and number
    for (auto& [stream, queue] : queues_) {
      if (queue.empty()) continue;
      const TimedWork& work = *queue.front();
      std::array<std::int64_t, 3> times{0, work.issued, work.number};
      bool ready = true;
      for (const auto& other : work.after) {
        ready = ready && other->end >= 0;
        times[1] = std::max(times[1], other->end);
      }
      times[0] = work.cost == nullptr ? times[1] : std::max(times[1], free_[{work.device, work.cost->engine}]);
      if (ready && times < best) best = times, first = &queue;
    }
    if (first == nullptr || best[0] > until) return false;
    TimedWork& work = *first->front();
    if (work.cost != nullptr && work.cost->open && !force) return false;
    work.end = best[0];
    if (work.cost != nullptr) {
      work.cost->open = false;
      if (work.cost->nanoseconds > 0) free_[{work.device, work.cost->engine}] = work.end += work.cost->nanoseconds;
    }
    work.after.clear();
    first->pop_front();
    return true;
  }

  const Link link_;
  std::int64_t added_ = 0;
  std::map<const Stream*, std::deque<std::shared_ptr<TimedWork>>> queues_;  // without a time, by stream
  std::map<const Stream*, std::shared_ptr<TimedWork>> last_;               // queued work of each stream
  std::map<std::pair<int, int>, std::int64_t> free_;                       // end of the last work, by device and engine
};

inline void Gpu::add_time(Stream* stream, const Work& work) {
  if (timeline != nullptr) timeline->add(*this, stream, work);
}
inline std::shared_ptr<Cost> Gpu::fill_cost(std::size_t bytes) const {
  return timeline == nullptr ? nullptr : std::make_shared<Cost>(timeline->fill(bytes));
}
inline std::shared_ptr<Cost> Gpu::copy_cost(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  if (timeline == nullptr) return nullptr;
  const auto side = [&](std::uintptr_t address) {
    std::uintptr_t begin = 0;
    const Allocation* const in = found(address, begin);
    if (in != nullptr) return in->kind == kHost ? Timeline::kLocked : Timeline::kDevice;
    return is_registered(address) ? Timeline::kLocked : Timeline::kPageable;
  };
  return std::make_shared<Cost>(timeline->copy(side(to), side(from), bytes));
}
inline bool Gpu::has_passed(const Mark& mark) {
  return mark.done && (timeline == nullptr || mark.timed == nullptr || timeline->has_passed(*mark.timed));
}

inline void Gpu::host_waited(const Stream& stream) {
  if (timeline != nullptr) timeline->wait(stream);
  if (order == nullptr) return;
  join(order->host, stream.before);
  order->host[&stream] = stream.queued;
}
inline void Gpu::host_waited(const Mark& mark) {
  if (timeline != nullptr && mark.timed != nullptr) timeline->wait(*mark.timed);
  if (order != nullptr) join(order->host, mark.before);
}

}  // namespace fake
