#include "core/pattern.hpp"

#include <algorithm>

namespace mempool {
namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

}  // namespace

std::vector<std::pair<Offset, Offset>> merged(std::vector<std::pair<Offset, Offset>> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::size_t kept = 0;
  for (const auto& [begin, end] : ranges) {
    if (kept != 0 && begin <= ranges[kept - 1].second) {
      ranges[kept - 1].second = std::max(ranges[kept - 1].second, end);
    } else {
      ranges[kept++] = {begin, end};
    }
  }
  ranges.resize(kept);
  return ranges;
}

void Pattern::update_arena_ranges() {
  std::vector<std::pair<Offset, Offset>> ranges;
  each_planned([&](const Table&, const Slot& slot, std::uint64_t bytes) {
    ranges.emplace_back(slot.offset, slot.offset + bytes);
  });
  arena_ranges = merged(std::move(ranges));
  arena_ranges.shrink_to_fit();
}

bool Pattern::same_sizes(const Pattern& other) const noexcept { return serves(other) && other.serves(*this); }

bool Pattern::serves(const Pattern& other) const noexcept {
  if (cyclic != other.cyclic || tables.size() != other.tables.size()) return false;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const Table &mine = tables[i], &theirs = other.tables[i];
    if (mine.sequence != theirs.sequence || mine.stream != theirs.stream || mine.length() != theirs.length()) return false;
    for (std::uint32_t p = 0; p < mine.length(); ++p) {
      if (theirs.sizes[p] > mine.sizes[p] || theirs.least_of(p) < mine.least_of(p)) return false;
    }
  }
  return true;
}

void Table::build_index(bool cyclic) {
  const std::uint32_t count = length();
  prefixes.resize(count + std::size_t{1});
  std::uint64_t hash = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    prefixes[i] = hash;
    hash = mix(hash, sizes[i]);
  }
  prefixes[count] = hash;
  std::size_t capacity = 16;
  while (capacity < count * std::size_t{2}) capacity *= 2;
  places_.assign(capacity, Place{});
  for (std::uint32_t position = cyclic ? 0 : kWindow; position < count; ++position) {
    std::uint64_t window = 0;
    for (std::uint32_t back = kWindow; back > 0; --back) {
      window = mix(window, sizes[(position + std::uint64_t{count} * kWindow - back) % count]);
    }
    std::size_t slot = window & (capacity - 1);
    while (places_[slot].position != ~std::uint32_t{0} && places_[slot].hash != window) slot = (slot + 1) & (capacity - 1);
    Place& place = places_[slot];
    place.position = place.position == ~std::uint32_t{0} ? position : kAmbiguous;
    place.hash = window;
  }
  all_sizes_.clear();
  for (std::uint32_t position = 0; position < count; ++position) all_sizes_.emplace_back(least_of(position), sizes[position] + 1);
  all_sizes_ = merged(std::move(all_sizes_));
  all_sizes_.shrink_to_fit();
}

std::size_t Table::bytes() const noexcept {
  return sizeof(Table) + (sizes.capacity() + least.capacity()) * sizeof(sizes[0]) + slots.capacity() * sizeof(Slot) +
         prefixes.capacity() * sizeof(prefixes[0]) + marks.capacity() * sizeof(marks[0]) + places_.capacity() * sizeof(Place) +
         all_sizes_.capacity() * sizeof(all_sizes_[0]);
}

std::uint32_t Table::position_after(const std::uint64_t* window) const noexcept {
  std::uint64_t hash = 0;
  for (std::uint32_t i = 0; i < kWindow; ++i) hash = mix(hash, window[i]);
  if (places_.empty()) return length();
  for (std::size_t slot = hash & (places_.size() - 1);; slot = (slot + 1) & (places_.size() - 1)) {
    const Place& place = places_[slot];
    if (place.position == ~std::uint32_t{0}) return length();
    if (place.hash == hash) return place.position == kAmbiguous ? length() : place.position;
  }
}

}  // namespace mempool
