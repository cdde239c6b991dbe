#include "devices/replay_device.hpp"

#include <algorithm>

namespace mempool {

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
