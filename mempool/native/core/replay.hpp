// Replay of a trace's events through a client, on a device that logs the memory held over time.
#pragma once

#include <vector>

#include "core/client.hpp"
#include "devices/simulated_device.hpp"

namespace mempool {

class Replay {
 public:
  enum Kind : std::uint8_t { alloc, free, read, write, mark };
  struct Events {  // columns of equal length
    const std::uint8_t* kind;
    const std::int64_t* birth;   // index of the alloc of an event's buffer
    const std::int64_t* size;    // of allocs, in bytes
    const std::int64_t* stream;
    const std::int8_t* mark;     // a Mark; -1: not a mark of the pool
    std::int64_t count;
  };

  Replay(Client& client, ReplayDevice& device, const Events& events) : client_(client), device_(device), events_(events) {
    const auto count = static_cast<std::size_t>(events.count);
    address.assign(count, -1);
    live.resize(count);
    reserved.resize(count);
  }

  // Replay at most `most` events, until the planner may have work; return true if events remain.
  bool go(std::int64_t most) {
    const std::int64_t end = std::min(events_.count, next_ + most);
    bool news = false;
    while (next_ < end && !news) {
      step(next_++);
      news = client_.take_work_signal();
    }
    return next_ < events_.count;
  }

  std::vector<std::int64_t> address;         // of served allocs; -1 elsewhere
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
