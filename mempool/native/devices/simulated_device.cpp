#include "devices/simulated_device.hpp"

#include <algorithm>
#include <iterator>
#include <utility>


namespace mempool {

DeviceTraits SimulatedDevice::traits() const noexcept {
  return {options_.alignment, options_.page, options_.shared_segment, options_.large, false};
}

bool SimulatedDevice::refuse(std::size_t bytes) noexcept {
  const bool failing = calls_left_ == 0;
  if (calls_left_ != 0 && calls_left_ != ~std::uint64_t{0}) --calls_left_;
  if (!failing && bytes <= options_.capacity && counts_.committed <= options_.capacity - bytes) return false;
  ++counts_.refusals;
  return true;
}

void SimulatedDevice::add(std::size_t bytes) noexcept {
  counts_.committed += bytes;
  counts_.peak_committed = std::max(counts_.peak_committed, counts_.committed);
}

Address SimulatedDevice::new_address(std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t step = std::max({alignment, options_.alignment, options_.page});
  const Address address = (next_ + step - 1) / step * step;
  next_ = address + bytes + step;
  return address;
}

Address SimulatedDevice::reserve(std::size_t bytes, std::size_t alignment) noexcept {
  const Guarded guard(lock_);
  ++counts_.reserves;
  if (options_.page == 0) {
    if (refuse(bytes)) return 0;
    add(bytes);
  }
  const Address address = new_address(bytes, alignment);
  reservations_[address] = {bytes, {}};
  ++counts_.live_reservations;
  return address;
}

std::map<Address, SimulatedDevice::Reservation>::iterator SimulatedDevice::find(Address address,
                                                                               std::size_t bytes) noexcept {
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin()) return reservations_.end();
  --found;
  return address + bytes <= found->first + found->second.bytes ? found : reservations_.end();
}

bool SimulatedDevice::commit(Address address, std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  const auto found = find(address, bytes);
  if (found == reservations_.end()) {
    ++counts_.errors;
    return false;
  }
  if (options_.page == 0) return true;
  const std::size_t first = (address - found->first) / options_.page;
  const std::size_t last = (address + bytes - found->first + options_.page - 1) / options_.page;
  std::set<std::size_t>& pages = found->second.pages;
  const auto there = std::distance(pages.lower_bound(first), pages.lower_bound(last));
  const std::size_t fresh = last - first - static_cast<std::size_t>(there);
  if (refuse(fresh * options_.page)) return false;
  for (std::size_t page = first; page < last; ++page) pages.insert(page);
  add(fresh * options_.page);
  return true;
}

void SimulatedDevice::decommit(Address address, std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  spoils_capture();
  const auto found = find(address, bytes);
  if (found == reservations_.end() || options_.page == 0) {
    ++counts_.errors;
    return;
  }
  const std::size_t first = (address - found->first) / options_.page;
  const std::size_t last = (address + bytes - found->first + options_.page - 1) / options_.page;
  for (std::size_t page = first; page < last; ++page) {
    counts_.committed -= found->second.pages.erase(page) * options_.page;
  }
}

// A reservation that grows moves; one that shrinks stays in place.
Address SimulatedDevice::resize(Address address, std::size_t from, std::size_t to) noexcept {
  const Guarded guard(lock_);
  if (options_.page == 0) return 0;
  spoils_capture();
  const auto found = reservations_.find(address);
  const bool whole = found != reservations_.end() && found->second.bytes == from && from % options_.page == 0 &&
                     found->second.pages.size() == from / options_.page;
  if (!whole || to == 0 || to % options_.page != 0) {
    ++counts_.errors;
    return 0;
  }
  if (to > from && refuse(to - from)) return 0;
  auto node = reservations_.extract(found);
  if (to > from) node.key() = new_address(to, options_.alignment);
  Reservation& reservation = node.mapped();
  reservation.bytes = to;
  reservation.pages.clear();
  for (std::size_t page = 0; page < to / options_.page; ++page) reservation.pages.insert(page);
  const Address moved = node.key();
  reservations_.insert(std::move(node));
  counts_.committed -= from;
  add(to);
  ++counts_.resizes;
  return moved;
}

void SimulatedDevice::release(Address address, std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  ++counts_.releases;
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) {
    ++counts_.errors;
    return;
  }
  const std::size_t committed = options_.page == 0 ? bytes : found->second.pages.size() * options_.page;
  if (committed != 0) spoils_capture();
  counts_.committed -= committed;
  reservations_.erase(found);
  --counts_.live_reservations;
}

Event SimulatedDevice::record(Stream stream) noexcept {
  const Guarded guard(lock_);
  spoils_capture(stream);
  const Event event = next_event_++;
  pending_[event] = stream;
  events_.insert(event);
  return event;
}

bool SimulatedDevice::query(Event event) noexcept {
  const Guarded guard(lock_);
  if (event != 0 && events_.count(event) == 0) ++counts_.errors;
  spoils_capture();
  return pending_.count(event) == 0;
}

void SimulatedDevice::forget(Event event) noexcept {
  const Guarded guard(lock_);
  pending_.erase(event);
  if (event != 0 && events_.erase(event) == 0) ++counts_.errors;
}

bool SimulatedDevice::wait(Stream stream, Event event) noexcept {
  const Guarded guard(lock_);
  if (event != 0 && events_.count(event) == 0) ++counts_.errors;
  spoils_capture(stream);
  return true;
}

bool SimulatedDevice::synchronize() noexcept {
  const Guarded guard(lock_);
  ++counts_.synchronizes;
  spoils_capture();
  pending_.clear();
  return true;
}

void SimulatedDevice::finish(Stream stream) noexcept {
  const Guarded guard(lock_);
  for (auto it = pending_.begin(); it != pending_.end();) it = it->second == stream ? pending_.erase(it) : ++it;
}

void SimulatedDevice::capture(std::vector<Stream> streams) {
  const Guarded guard(lock_);
  captured_ = std::move(streams);
}

void SimulatedDevice::spoils_capture(Stream stream) noexcept {
  counts_.errors += std::find(captured_.begin(), captured_.end(), stream) == captured_.end() ? 0 : 1;
}

void SimulatedDevice::set_capacity(std::size_t bytes) noexcept {
  const Guarded guard(lock_);
  options_.capacity = bytes;
}

void SimulatedDevice::fail_after(std::uint64_t calls) noexcept {
  const Guarded guard(lock_);
  calls_left_ = calls;
}

SimulatedCounts SimulatedDevice::counts() const noexcept {
  const Guarded guard(lock_);
  SimulatedCounts counts = counts_;
  counts.events_alive = events_.size();
  return counts;
}

Address ReplayDevice::reserve(std::size_t bytes, std::size_t alignment) noexcept try {
  if (traits_.page == 0) ++calls_;
  const std::size_t step = std::max(alignment, 2 * kMiB);
  const Address address = (next_ + step - 1) / step * step;
  regions_.push_back(address);
  if (traits_.page == 0 && !take(address, bytes)) {
    regions_.pop_back();
    return 0;
  }
  next_ = address + bytes;
  return address;
} catch (...) {
  return 0;
}

bool ReplayDevice::take(Address address, std::size_t bytes) noexcept {
  if (bytes > capacity_ - committed_) return false;
  try {
    alive_[address] = held_.size();
    const std::int64_t region = region_of(address);
    held_.push_back({static_cast<std::int64_t>(address), static_cast<std::int64_t>(bytes), region, now_, Held::kStill});
  } catch (...) {
    alive_.erase(address);
    return false;
  }
  committed_ += bytes;
  return true;
}

std::int64_t ReplayDevice::region_of(Address address) const noexcept {
  return std::upper_bound(regions_.begin(), regions_.end(), address) - regions_.begin();
}

bool ReplayDevice::commit(Address address, std::size_t bytes) noexcept {
  if (traits_.page == 0) return true;
  if (bytes > capacity_ - committed_) return false;
  for (Address page = address; page < address + bytes; page += traits_.page) {
    ++calls_;
    if (take(page, traits_.page)) continue;
    give_back(address, page);
    return false;
  }
  return true;
}

void ReplayDevice::decommit(Address address, std::size_t bytes) noexcept { give_back(address, address + bytes); }

void ReplayDevice::release(Address address, std::size_t bytes) noexcept { give_back(address, address + bytes); }

void ReplayDevice::give_back(Address from, Address to) noexcept {
  for (auto one = alive_.lower_bound(from); one != alive_.end() && one->first < to; one = alive_.erase(one)) {
    ++calls_;
    held_[one->second].end = now_;
    committed_ -= static_cast<std::size_t>(held_[one->second].size);
  }
}

DeviceMemory ReplayDevice::memory() const noexcept {
  return capacity_ == ~std::size_t{0} ? DeviceMemory{0, 0} : DeviceMemory{capacity_ - committed_, capacity_};
}

}  // namespace mempool
