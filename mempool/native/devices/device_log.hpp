// Log of the memory that a device gave and got back, written into a history while one is kept. The log tracks
// the held memory, so that a reservation released as a whole is logged page by page, in the order of the
// commits: readers that go backwards through a history, like PyTorch's viewer, find every piece in place.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "core/recorder.hpp"

namespace mempool {

class DeviceLog {
 public:
  using Runs = std::vector<std::pair<Address, std::size_t>>;  // (begin, bytes)

  // Write into `history` from now on, given the memory held now. May throw std::bad_alloc.
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
  // Log the release of all memory held in this range.
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
    } catch (...) {  // the history will miss the release of this piece
    }
  }

  Recorder<RecordedEvent>* history_ = nullptr;
  std::map<Address, std::size_t> held_;
};

}  // namespace mempool
