// The events of a trace put through a client, on a device that writes down what was held and when.
#pragma once

#include <map>
#include <vector>

#include "client.hpp"

namespace mempool {

// Addresses without memory, handed out as a GPU's plain memory is. All work that is queued is done at once.
class ReplayDevice final : public Device {
 public:
  struct Held {  // from one event on, until another; none: to the end
    static constexpr std::int64_t kStill = -1;
    std::int64_t address, size, start, end;
  };

  explicit ReplayDevice(std::size_t capacity) : capacity_(capacity) {}

  void at(std::int64_t event) noexcept { now_ = event; }
  std::uint64_t calls() const noexcept { return calls_; }
  const std::vector<Held>& held() const noexcept { return held_; }

  DeviceTraits traits() const noexcept override {  // of CudaWhole
    return {512, 0, 20 * kMiB, 10 * kMiB, false, true, 2 * kMiB};
  }
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override {
    ++calls_;
    if (bytes > capacity_ - committed_) return 0;
    const std::size_t step = std::max(alignment, 2 * kMiB);
    const Address address = (next_ + step - 1) / step * step;
    try {
      alive_[address] = held_.size();
      held_.push_back({static_cast<std::int64_t>(address), static_cast<std::int64_t>(bytes), now_, Held::kStill});
    } catch (...) {
      alive_.erase(address);
      return 0;
    }
    next_ = address + bytes;
    committed_ += bytes;
    return address;
  }
  void release(Address address, std::size_t) noexcept override {
    ++calls_;
    const auto found = alive_.find(address);
    if (found == alive_.end()) return;
    held_[found->second].end = now_;
    committed_ -= static_cast<std::size_t>(held_[found->second].size);
    alive_.erase(found);
  }
  DeviceMemory memory() const noexcept override {
    return capacity_ == ~std::size_t{0} ? DeviceMemory{0, 0} : DeviceMemory{capacity_ - committed_, capacity_};
  }
  bool commit(Address, std::size_t) noexcept override { return true; }
  void decommit(Address, std::size_t) noexcept override {}
  Address resize(Address, std::size_t, std::size_t) noexcept override { return 0; }
  void copy(Address, Address, std::size_t, Stream) noexcept override {}
  void zero(Address, std::size_t, Stream) noexcept override {}
  Event record(Stream) noexcept override { return 1; }
  bool query(Event) noexcept override { return true; }
  bool wait(Stream, Event) noexcept override { return true; }
  void forget(Event) noexcept override {}
  bool synchronize() noexcept override { return true; }

 private:
  static constexpr std::size_t kMiB = std::size_t{1} << 20;

  std::size_t capacity_, committed_ = 0;
  std::uint64_t calls_ = 0;
  std::int64_t now_ = 0;
  Address next_ = 2 * kMiB;
  std::vector<Held> held_;                  // in the order in which it was taken
  std::map<Address, std::size_t> alive_;  // index into held_
};

class Replay {
 public:
  enum Kind : std::uint8_t { alloc, free, read, write, mark };
  struct Events {  // columns of one length
    const std::uint8_t* kind;
    const std::int64_t* birth;   // index of the alloc of an event's buffer
    const std::int64_t* size;    // of allocs, bytes
    const std::int64_t* stream;
    const std::int8_t* mark;     // a Mark; -1: no mark of ours
    std::int64_t count;
  };

  Replay(Client& client, ReplayDevice& device, const Events& events) : client_(client), device_(device), events_(events) {
    const auto count = static_cast<std::size_t>(events.count);
    address.assign(count, -1);
    live.resize(count);
    reserved.resize(count);
  }

  // Goes on until there may be something to plan, for at most so many events; whether any is left.
  bool go(std::int64_t most) {
    const std::int64_t end = std::min(events_.count, next_ + most);
    bool news = false;
    while (next_ < end && !news) {
      step(next_++);
      news = client_.heard();
    }
    return next_ < events_.count;
  }

  std::vector<std::int64_t> address;         // of allocs that were served; -1 elsewhere
  std::vector<std::int64_t> live, reserved;  // bytes after each event
  std::int64_t failed_at = -1;               // the first alloc that was not served

 private:
  void step(std::int64_t i) {
    device_.at(i);
    const std::int64_t birth = events_.birth[i];
    switch (events_.kind[i]) {
      case alloc: serve(i); break;
      case free:
        if (address[birth] >= 0) client_.free(static_cast<Address>(address[birth]), events_.stream[i]);
        break;
      case read:
      case write:
        if (address[birth] >= 0 && events_.stream[i] != events_.stream[birth])
          client_.use(static_cast<Address>(address[birth]), events_.stream[i]);
        break;
      default:
        if (events_.mark[i] >= 0) client_.mark(static_cast<Mark>(events_.mark[i]));
    }
    live[i] = static_cast<std::int64_t>(client_.live());
    reserved[i] = static_cast<std::int64_t>(client_.pool().source().reserved().current);
  }

  void serve(std::int64_t i) {
    if (events_.size[i] == 0) return;
    const Address given = client_.allocate(static_cast<std::size_t>(events_.size[i]), events_.stream[i]);
    if (given != 0) address[i] = static_cast<std::int64_t>(given);
    else if (failed_at < 0) failed_at = i;
  }

  Client& client_;
  ReplayDevice& device_;
  Events events_;
  std::int64_t next_ = 0;
};

}  // namespace mempool
