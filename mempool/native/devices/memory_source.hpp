// The only place where a pool takes memory from the device and returns memory. The class counts the reserved
// bytes and enforces the limit (`max_reserved`) for arena, segments and small pages together. A *budget* is a
// soft limit: before more memory is taken, idle memory is released, and memory taken beyond the budget
// nevertheless is counted.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "core/flight.hpp"
#include "core/guards.hpp"
#include "core/live.hpp"
#include "core/recorder.hpp"
#include "core/stats.hpp"
#include "core/sync.hpp"
#include "devices/device.hpp"

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

// The only place where a pool takes memory from the device and returns memory. The class counts the reserved
// bytes and enforces the limit (`max_reserved`) for arena, segments and small pages together. A *budget* is a
// soft limit: before more memory is taken, idle memory is released, and memory taken beyond the budget
// nevertheless is counted.
// Owner of idle memory.
class Idle {
 public:
  // Release the memory that is idle for longest. False: no memory is idle, or a release is impossible now.
  virtual bool give_back_oldest() noexcept = 0;

 protected:
  ~Idle() = default;
};

// A limit in bytes on the memory of several pools together, such as a process's fraction of a device.
struct SharedLimit {
  Atomic<std::size_t> bytes{~std::size_t{0}};
  Atomic<std::size_t> reserved{0};  // by all pools that share the limit

  // Count `more` bytes as reserved; false: the limit would be exceeded, and nothing has changed.
  bool claim(std::size_t more) noexcept {
    const std::size_t before = reserved.fetch_add(more), most = bytes.load();
    if (before <= most && more <= most - before) return true;
    reserved.fetch_sub(more);
    return false;
  }
};

class MemorySource {
 public:
  explicit MemorySource(Device& device) : device_(device), traits_(device.traits()) {}

  const DeviceTraits& traits() const noexcept { return traits_; }
  void read_traits() noexcept { traits_ = device_.traits(); }  // call while no memory is held
  Device& device() noexcept { return device_; }

  // Reserve address space; on a device without pages this takes (and counts) the memory too.
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept {
    if (traits_.page == 0 && !may_take(bytes)) return 0;
    const Address address = device_.reserve(bytes, alignment);
    ++calls_;
    if (address != 0) Reservation::made();
    if (traits_.page != 0) return address;
    if (address != 0) took(RecordedEvent::segment_alloc, address, bytes);
    else disclaim(bytes);
    return address;
  }
  bool commit(Address address, std::size_t bytes) noexcept {
    if (traits_.page == 0 || bytes == 0) return true;
    ++calls_;
    if (!may_take(bytes)) return false;
    if (!device_.commit(address, bytes)) return disclaim(bytes), false;
    took(RecordedEvent::segment_map, address, bytes);
    return true;
  }
  // False, here and below: the device could not be waited for, and the memory is kept because queued work may
  // use the memory.
  [[nodiscard]] bool decommit(Address address, std::size_t bytes) noexcept {
    if (traits_.page == 0 || bytes == 0) return true;
    ++calls_;
    if (!wait_for_users()) return false;
    device_.decommit(address, bytes);
    gave(RecordedEvent::segment_unmap, address, bytes, bytes);
    return true;
  }
  // Like Device::resize; `to` is a multiple of a page.
  Address resize(Address address, std::size_t from, std::size_t to) noexcept {
    if (traits_.page == 0 || (to > from && !may_take(to - from))) return 0;
    ++calls_;
    const Address resized = wait_for_users() ? device_.resize(address, from, to) : 0;
    if (resized == 0) {
      if (to > from) disclaim(to - from);
      return 0;
    }
    if (resized != address) {
      log_.gave(RecordedEvent::segment_unmap, address, from);
      log_.took(RecordedEvent::segment_map, resized, from);
    }
    if (to > from) took(RecordedEvent::segment_map, resized + from, to - from);
    if (to < from) gave(RecordedEvent::segment_unmap, resized + to, from - to, from - to);
    return resized;
  }
  // `committed`: the committed bytes of the reservation (all of them on a device without pages).
  [[nodiscard]] bool release(Address address, std::size_t bytes, std::size_t committed) noexcept {
    if ((traits_.page == 0 || committed != 0) && !wait_for_users()) return false;
    let_go(address, bytes, committed);
    return true;
  }
  // Release memory that no queued work uses, or at a pool's end, when no owner could keep it: a device without a
  // possible wait defers the release itself.
  void release_anyway(Address address, std::size_t bytes, std::size_t committed) noexcept {
    if (traits_.page == 0 || committed != 0) wait_for_users();
    let_go(address, bytes, committed);
  }

  // Order streams: later work of `then` runs after all present work of `first`. False: impossible, as if the driver
  // refuses during a capture, which a wait for the device would break.
  bool order(Stream first, Stream then) noexcept {
    if (!MEMPOOL_GUARDED("stream")) return true;
    const Event event = LiveEvents::record(device_, first);
    const bool ordered = device_.wait(then, event);
    LiveEvents::forget(device_, event);
    if (ordered || (held() && MEMPOOL_GUARDED("held_order"))) return ordered;
    return wait_for_users();
  }

  // Wait until no queued work can touch memory that is about to be released or reassigned. False: the wait
  // failed.
  bool wait_for_users() noexcept { return !MEMPOOL_GUARDED("wait") || device_.synchronize() || !MEMPOOL_GUARDED("vain_wait"); }

  // Begin a graph capture: no memory may be released, no call may wait for the device, and no event may be
  // recorded on a captured stream. Holds nest.
  void hold() noexcept { ++holds_; }
  void end_hold() noexcept { --holds_; }
  bool held() const noexcept { return holds_ != 0 && MEMPOOL_GUARDED("hold"); }
  // Return true if memory is on hold, or if the program may be capturing the stream into a graph unknown to
  // the pool.
  bool held_for(Stream stream) noexcept { return held() || device_.capturing(stream); }

  std::size_t round_to_page(std::size_t bytes) const noexcept {
    const std::size_t unit = traits_.page != 0 ? traits_.page : std::max(traits_.alignment, traits_.granule);
    return (bytes + unit - 1) / unit * unit;
  }

  const Gauge& reserved() const noexcept { return reserved_; }
  // Return the peak of reserved bytes since the last reset. `reserved().peak` is the all-time peak, on which
  // decisions of the pool depend.
  std::size_t recent_peak() const noexcept { return recent_peak_; }
  void reset_peak() noexcept { recent_peak_ = reserved_.current; }
  std::uint64_t calls() const noexcept { return calls_; }  // calls to the device for memory
  std::uint64_t times_took() const noexcept { return took_; }  // calls that got memory
  std::uint64_t times_gave() const noexcept { return gave_; }  // calls that returned memory
  DeviceLog& log() noexcept { return log_; }
  std::size_t limit() const noexcept { return shared_ == nullptr ? limit_ : std::min(limit_, shared_->bytes.load()); }
  // Return the limit less the bytes that other pools hold of a shared limit.
  std::size_t limit_beside_others() const noexcept {
    if (shared_ == nullptr) return limit_;
    const std::size_t others = shared_->reserved.load() - reserved_.current, most = shared_->bytes.load();
    return std::min(limit_, most > others ? most - others : 0);
  }
  void set_limit(std::size_t bytes) noexcept {
    limit_ = bytes;
    flight::note(flight::max_reserved, 0, 0, bytes);
  }
  // Share a limit from now on; the limit outlives the pool.
  void share_limit(SharedLimit& shared) noexcept {
    if (shared_ == &shared) return;
    shared_ = &shared;
    flight::note(flight::max_reserved, 0, 0, shared.bytes.load());
    shared.reserved.fetch_add(reserved_.current);
  }

  static constexpr std::size_t kNoBudget = ~std::size_t{0};
  void set_budget(std::size_t bytes, Idle* idle) noexcept {
    budget_ = bytes, idle_ = idle;
    flight::note(flight::budget, 0, 0, bytes);
  }
  std::size_t budget() const noexcept { return budget_; }
  bool has_budget() const noexcept { return budget_ != kNoBudget; }
  // Release idle memory as far as needed for `bytes` more within the budget. Return true if the budget holds.
  bool keep_budget(std::size_t bytes) noexcept {
    while (exceeds(bytes) && idle_ != nullptr && idle_->give_back_oldest()) {
    }
    return !exceeds(bytes);
  }
  bool exceeds(std::size_t bytes) const noexcept {
    return bytes > budget_ || reserved_.current > budget_ - bytes;
  }
  // times memory was taken beyond the budget
  std::uint64_t beyond_budget() const noexcept { return beyond_; }

 private:
  void let_go(Address address, std::size_t bytes, std::size_t committed) noexcept {
    ++calls_;
    device_.release(address, bytes);
    Reservation::gone();
    if (traits_.page == 0) {
      gave(RecordedEvent::segment_free, address, bytes, bytes);
    } else if (committed != 0) {
      gave(RecordedEvent::segment_unmap, address, bytes, committed);
    }
  }
  void took(RecordedEvent::Kind kind, Address address, std::size_t bytes) noexcept {
    reserved_.add(bytes);
    if (reserved_.current > recent_peak_) recent_peak_ = reserved_.current;
    ++took_;
    if (reserved_.current > budget_) ++beyond_;
    log_.took(kind, address, bytes);
  }
  // Count a release of `bytes`, of which `held` were committed.
  void gave(RecordedEvent::Kind kind, Address address, std::size_t bytes, std::size_t held) noexcept {
    reserved_.sub(held);
    disclaim(held);
    ++gave_;
    log_.gave(kind, address, bytes);
  }
  // Return true if the limits permit `bytes` more, after releasing idle memory as far as the budget requires.
  // The bytes are then claimed from the shared limit.
  bool may_take(std::size_t bytes) noexcept {
    keep_budget(bytes);
    return bytes <= limit_ && reserved_.current <= limit_ - bytes && (shared_ == nullptr || shared_->claim(bytes));
  }
  void disclaim(std::size_t bytes) noexcept {
    if (shared_ != nullptr) shared_->reserved.fetch_sub(bytes);
  }

  Device& device_;
  DeviceTraits traits_;
  Gauge reserved_;
  std::size_t recent_peak_ = 0;
  std::uint64_t calls_ = 0, took_ = 0, gave_ = 0;
  DeviceLog log_;
  unsigned holds_ = 0;
  std::size_t limit_ = ~std::size_t{0};
  SharedLimit* shared_ = nullptr;  // null: this pool shares no limit
  std::size_t budget_ = kNoBudget;
  Idle* idle_ = nullptr;
  std::uint64_t beyond_ = 0;
};

}  // namespace mempool
