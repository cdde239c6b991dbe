// Modelled time of the devices. Calls take no time of the host. Work begins when the previous work of its stream and the awaited
// events have ended, and its engine is free: a device has one for kernels, which fill a GPU, and one for copies in each
// direction. Times are nanoseconds since the clock was started.
#pragma once

#include "order.hpp"

namespace fake {

class Timeline {
 public:
  struct Link {
    double out_latency, out_per_byte, back_latency, back_per_byte;  // nanoseconds
    bool duplex;           // else one engine copies in both directions
    double pageable;       // nanoseconds a byte for host memory that is not page-locked
    double memory;         // nanoseconds a byte of device memory
  };
  explicit Timeline(const Link& link) : link_(link) {}

  std::int64_t host = 0;  // the host has waited until then

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

  void add(Gpu& gpu, Stream* stream, const Work& work) {
    queue_.push_back({stream, work.cost, work.waits, work.marks, host});
    resolve(gpu, false);
  }
  // Give times to the queued work up to the first kernel of an operation that has not ended; with `all`, to that work too.
  void resolve(Gpu& gpu, bool all) {
    for (; !queue_.empty(); queue_.pop_front()) {
      const Queued& work = queue_.front();
      if (work.cost != nullptr && work.cost->open && !all) return;
      Stream& stream = *work.stream;
      std::int64_t ready = std::max(stream.end, work.issued);
      for (const auto& other : gpu.streams) {
        if (gpu.waits_for(stream, *other)) ready = std::max(ready, other->end);
      }
      if (work.waits != nullptr) ready = std::max(ready, work.waits->end);
      if (work.cost != nullptr) {
        work.cost->open = false;
        ready = run(engines_[{stream.context->device, work.cost->engine}], ready, work.cost->nanoseconds, work.issued);
      }
      stream.end = ready;
      if (work.marks != nullptr) work.marks->end = ready;
    }
  }
  void wait(Gpu& gpu, const std::int64_t& end) {
    resolve(gpu, true);
    host = std::max(host, end);
  }
  bool has_passed(Gpu& gpu, const std::int64_t& end) {
    resolve(gpu, false);
    if (end >= 0 && end <= host) return true;
    host += kQuery;
    return false;
  }

  static constexpr std::int64_t kShortest = 2000;  // a kernel with its launch, on current GPUs

 private:
  static constexpr std::int64_t kQuery = 1000;  // for a negative answer, so that a loop of queries ends

  struct Queued {
    Stream* stream;
    std::shared_ptr<Cost> cost;
    std::shared_ptr<Mark> waits, marks;
    std::int64_t issued;
  };
  using Busy = std::map<std::int64_t, std::int64_t>;  // end of each busy time, by its begin

  static std::int64_t nanoseconds(double time) { return static_cast<std::int64_t>(time + 0.5); }

  // Take the first free time of an engine that is long enough, and return its end: work that is ready earlier runs earlier.
  static std::int64_t run(Busy& busy, std::int64_t ready, std::int64_t length, std::int64_t now) {
    while (!busy.empty() && busy.begin()->second <= now) busy.erase(busy.begin());
    if (length <= 0) return ready;
    auto next = busy.upper_bound(ready);
    if (next != busy.begin()) ready = std::max(ready, std::prev(next)->second);
    for (; next != busy.end() && next->first < ready + length; ++next) ready = std::max(ready, next->second);
    const std::int64_t end = ready + length;
    auto added = busy.emplace(ready, end).first;
    if (next != busy.end() && next->first == end) {
      added->second = next->second;
      busy.erase(next);
    }
    if (added != busy.begin() && std::prev(added)->second == added->first) {
      std::prev(added)->second = added->second;
      busy.erase(added);
    }
    return end;
  }

  const Link link_;
  std::deque<Queued> queue_;  // work without a time, in the order of the calls
  std::map<std::pair<int, int>, Busy> engines_;  // by device and engine
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
inline bool Gpu::has_passed(Mark& mark) { return mark.done && (timeline == nullptr || timeline->has_passed(*this, mark.end)); }

inline void Gpu::host_waited(const Stream& stream) {
  if (timeline != nullptr) timeline->wait(*this, stream.end);
  if (order == nullptr) return;
  join(order->host, stream.before);
  order->host[&stream] = stream.queued;
}
inline void Gpu::host_waited(const Mark& mark) {
  if (timeline != nullptr) timeline->wait(*this, mark.end);
  if (order != nullptr) join(order->host, mark.before);
}

}  // namespace fake
