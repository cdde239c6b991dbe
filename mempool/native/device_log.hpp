// What a device gave and got back, written into a history while one is kept. Knows which memory is held, so that a
// reservation that goes back as a whole is written down page by page as it came: who reads a history backwards, as
// PyTorch's viewer does, finds every piece where it was.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "recorder.hpp"

namespace mempool {

class DeviceLog {
 public:
  using Runs = std::vector<std::pair<Address, std::size_t>>;  // (begin, bytes)

  // Into `history` from now on, with what is held now. May throw std::bad_alloc.
  void begin(Recorder<RecordedEvent>& history, const Runs& held) {
    held_.clear();
    for (const auto& [address, bytes] : held) held_[address] = bytes;
    history_ = &history;
  }
  void end() noexcept {
    history_ = nullptr;
    held_.clear();
  }
  const Recorder<RecordedEvent>* history() const noexcept { return history_; }

  void took(RecordedEvent::Kind kind, Address address, std::size_t bytes) noexcept {
    if (!on()) return;
    add(kind, address, bytes);
    keep(address, bytes);
  }
  // All that is held of these bytes goes back.
  void gave(RecordedEvent::Kind kind, Address address, std::size_t bytes) noexcept {
    if (!on()) return;
    const Address end = address + bytes;
    auto run = held_.upper_bound(address);
    if (run != held_.begin() && std::prev(run)->first + std::prev(run)->second > address) --run;
    while (run != held_.end() && run->first < end) {
      const Address first = run->first, last = first + run->second;
      const Address from = std::max(first, address), to = std::min(last, end);
      add(kind, from, to - from);
      run = held_.erase(run);
      if (first < from) keep(first, from - first);
      if (to < last) keep(to, last - to);
    }
  }

 private:
  bool on() const noexcept { return history_ != nullptr && history_->on(); }
  void add(RecordedEvent::Kind kind, Address address, std::size_t bytes) noexcept {
    history_->add(kind, address, bytes, 0, 0);
  }
  void keep(Address address, std::size_t bytes) noexcept {
    try {
      held_[address] = bytes;
    } catch (...) {  // a piece that the history will not see go
    }
  }

  Recorder<RecordedEvent>* history_ = nullptr;
  std::map<Address, std::size_t> held_;
};

}  // namespace mempool
