// What the stress harness knows without asking the pool: who owns which addresses, what the device has committed, and
// which stream's work a stream has waited for. Shares no data structure with the pool.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "devices/device.hpp"

namespace stress {

using mempool::Address;
using mempool::Event;
using mempool::Stream;

[[noreturn]] inline void fail(const char* what, Address address, std::size_t bytes) {
  std::fprintf(stderr, "FAILED: %s (address %#zx, %zu bytes)\n", what, static_cast<std::size_t>(address), bytes);
  std::fflush(stderr);
  std::_Exit(1);
}

// Passes everything on, and remembers what memory there is and how streams are ordered.
class WatchedDevice final : public mempool::Device {
 public:
  // `least_large`: what gets a segment of its own, where that should be less than the device says.
  explicit WatchedDevice(std::unique_ptr<mempool::Device> real, std::size_t least_large = ~std::size_t{0})
      : real_(std::move(real)), traits_(real_->traits()), page_(traits_.page) {
    traits_.large = std::min(traits_.large, least_large);
    traits_.shared_segment = std::min(traits_.shared_segment, 4 * traits_.large);
  }

  mempool::DeviceTraits traits() const noexcept override { return traits_; }
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override {
    const Address address = real_->reserve(bytes, alignment);
    if (blind_) return address;
    const std::lock_guard guard(mutex_);
    if (address != 0) reservations_[address] = bytes;
    return address;
  }
  bool commit(Address address, std::size_t bytes) noexcept override {
    if (!real_->commit(address, bytes)) return false;
    if (blind_) return true;
    const std::lock_guard guard(mutex_);
    if (address % page_ != 0 || bytes % page_ != 0) fail("a part of a page is committed", address, bytes);
    for (std::size_t page = address / page_; page < (address + bytes) / page_; ++page) {
      if (!pages_.insert(page).second) fail("a page is committed twice", address, bytes);
    }
    return true;
  }
  void decommit(Address address, std::size_t bytes) noexcept override {
    if (!blind_) {
      const std::lock_guard guard(mutex_);
      check_unused(address, bytes);
      for (std::size_t page = address / page_; page < (address + bytes) / page_; ++page) {
        if (pages_.erase(page) == 0) fail("a page is decommitted that was not committed", address, bytes);
      }
    }
    real_->decommit(address, bytes);
  }
  Address resize(Address address, std::size_t from, std::size_t to) noexcept override {
    if (blind_) return real_->resize(address, from, to);
    const std::lock_guard guard(mutex_);
    const auto found = reservations_.find(address);
    if (found == reservations_.end() || found->second != from) fail("a foreign reservation is resized", address, from);
    check_unused(address, from);
    const Address resized = real_->resize(address, from, to);
    if (resized == 0) return 0;
    if (to % page_ != 0) fail("a part of a page is committed", address, to);
    reservations_.erase(found);
    reservations_[resized] = to;
    for (std::size_t page = address / page_; page < (address + from) / page_; ++page) {
      if (pages_.erase(page) == 0) fail("what is resized was not committed", address, from);
    }
    for (std::size_t page = resized / page_; page < (resized + to) / page_; ++page) {
      if (!pages_.insert(page).second) fail("a page is committed twice", resized, to);
    }
    return resized;
  }
  void release(Address address, std::size_t bytes) noexcept override {
    if (!blind_) {
      const std::lock_guard guard(mutex_);
      const auto found = reservations_.find(address);
      if (found == reservations_.end() || found->second != bytes) fail("a foreign reservation is released", address, bytes);
      check_unused(address, bytes);
      reservations_.erase(found);
      if (page_ != 0) pages_.erase(pages_.lower_bound(address / page_), pages_.lower_bound((address + bytes) / page_));
    }
    real_->release(address, bytes);
  }
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override {
    real_->copy(to, from, bytes, stream);
  }
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override { real_->zero(address, bytes, stream); }
  Event record(Stream stream) noexcept override {
    if (blind_) return 1;
    const std::lock_guard guard(mutex_);
    Past past = known_[stream];
    past[stream] = ++clock_;
    events_[next_event_] = std::move(past);
    return next_event_++;
  }
  // Every third answer is that it is over.
  bool query(Event event) noexcept override {
    if (blind_) return true;
    const std::lock_guard guard(mutex_);
    if (++asked_ % 3 != 0) return false;
    for (const auto& [stream, time] : events_.at(event)) {
      std::uint64_t& over = over_[stream];
      over = std::max(over, time);
    }
    return true;
  }
  bool wait(Stream stream, Event event) noexcept override {
    if (blind_) return true;
    const std::lock_guard guard(mutex_);
    for (const auto& [other, time] : events_.at(event)) {
      std::uint64_t& known = known_[stream][other];
      known = std::max(known, time);
    }
    return true;
  }
  void forget(Event event) noexcept override {
    if (blind_) return;
    const std::lock_guard guard(mutex_);
    if (events_.erase(event) == 0) fail("an unknown event is forgotten", event, 0);
  }
  bool synchronize() noexcept override {
    if (blind_) return true;
    const std::lock_guard guard(mutex_);
    synchronized_ = ++clock_;
    return true;
  }

  // The program stops using the range: its last use is queued on `stream`.
  void used(Address address, std::size_t bytes, Stream stream) {
    if (blind_) return;
    const std::lock_guard guard(mutex_);
    uses_[address] = {address + bytes, stream, ++clock_};
  }
  // The program is about to use the range on `stream`: it must be committed, and earlier uses must be over by then.
  void begin_use(Address address, std::size_t bytes, Stream stream) {
    if (blind_) return;
    const std::lock_guard guard(mutex_);
    if (!holds(address, bytes)) fail("memory that the device has not committed", address, bytes);
    auto use = uses_.upper_bound(address);
    if (use != uses_.begin() && std::prev(use)->second.end > address) --use;
    while (use != uses_.end() && use->first < address + bytes) {
      const Use& last = use->second;
      const bool over = last.stream == stream || is_over(last) || last.time <= known_[stream][last.stream];
      if (!over) fail("memory that another stream still uses", address, bytes);
      use = uses_.erase(use);
    }
  }
  std::size_t committed() {
    const std::lock_guard guard(mutex_);
    std::size_t bytes = pages_.size() * page_;
    for (const auto& [address, size] : reservations_) bytes += page_ == 0 ? size : 0;
    return bytes;
  }
  // In a forked child, which inherits the books in any state.
  void look_away() noexcept { blind_ = true; }

 private:
  struct Use {
    Address end;
    Stream stream;
    std::uint64_t time;
  };
  // A vector clock: everything queued on a stream up to its time is over. Who waits for a stream also waits for all that
  // the stream had waited for.
  using Past = std::map<Stream, std::uint64_t>;

  void check_unused(Address address, std::size_t bytes) const {
    for (auto use = uses_.lower_bound(address); use != uses_.end() && use->first < address + bytes; ++use) {
      if (!is_over(use->second)) fail("memory in use is given back", use->first, use->second.end - use->first);
    }
  }
  bool is_over(const Use& use) const {
    const auto over = over_.find(use.stream);
    return use.time <= synchronized_ || (over != over_.end() && use.time <= over->second);
  }
  bool holds(Address address, std::size_t bytes) const {
    const auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin() || std::prev(after)->first + std::prev(after)->second < address + bytes) return false;
    for (std::size_t page = page_ == 0 ? 1 : address / page_; page_ != 0 && page * page_ < address + bytes; ++page) {
      if (pages_.count(page) == 0) return false;
    }
    return true;
  }

  std::unique_ptr<mempool::Device> real_;
  mempool::DeviceTraits traits_;
  std::size_t page_;
  bool blind_ = false;
  std::mutex mutex_;
  std::map<Address, std::size_t> reservations_;
  std::set<std::size_t> pages_;
  std::map<Event, Past> events_;
  Event next_event_ = 1;
  std::uint64_t clock_ = 0, synchronized_ = 0;
  std::uint64_t asked_ = 0;
  Past over_;                     // what has been seen to be over
  std::map<Stream, Past> known_;  // what a stream's next work comes after
  std::map<Address, Use> uses_;   // ended ones, by address
};

// All live buffers of the program.
class Ledger {
 public:
  void insert(Address address, std::size_t bytes) {
    const std::lock_guard guard(mutex);
    const auto after = live_.lower_bound(address);
    if (after != live_.end() && after->first < address + bytes) fail("two live buffers overlap", address, bytes);
    if (after != live_.begin() && std::prev(after)->first + std::prev(after)->second > address) {
      fail("two live buffers overlap", address, bytes);
    }
    live_[address] = bytes;
    bytes_ += bytes;
  }
  void erase(Address address) {
    const std::lock_guard guard(mutex);
    const auto found = live_.find(address);
    bytes_ -= found->second;
    live_.erase(found);
  }
  std::size_t bytes() {
    const std::lock_guard guard(mutex);
    return bytes_;
  }
  std::size_t count() {
    const std::lock_guard guard(mutex);
    return live_.size();
  }

  std::mutex mutex;  // held over a fork, so that the child finds a whole ledger

 private:
  std::map<Address, std::size_t> live_;
  std::size_t bytes_ = 0;
};

}  // namespace stress
