#include "core/occupancy.hpp"

#include <algorithm>

namespace mempool {

void BitSet::resize(std::uint32_t size) {
  levels_.clear();
  std::size_t words = size;
  do {
    words = std::max<std::size_t>(1, (words + 63) / 64);
    levels_.emplace_back(words, 0);
  } while (words > 1);
  ground_ = levels_[0].data();
}

void BitSet::set_above(std::uint32_t word) noexcept {
  for (std::size_t level = 1; level < levels_.size(); ++level, word >>= 6) {
    std::uint64_t& summary = levels_[level][word >> 6];
    const bool known = summary != 0;
    summary |= std::uint64_t{1} << (word & 63);
    if (known) return;
  }
}

void BitSet::clear_above(std::uint32_t word) noexcept {
  for (std::size_t level = 1; level < levels_.size(); ++level, word >>= 6) {
    std::uint64_t& summary = levels_[level][word >> 6];
    summary &= ~(std::uint64_t{1} << (word & 63));
    if (summary != 0) return;
  }
}

std::uint32_t BitSet::search_up_to(std::uint32_t index) const noexcept {
  // Ascend to the first level whose word has a smaller member, then descend to the largest member below.
  for (std::size_t level = 0; level < levels_.size(); ++level, index = (index >> 6) - 1) {
    std::uint64_t word = levels_[level][index >> 6] & (~std::uint64_t{0} >> (63 - (index & 63)));
    if (word == 0) {
      if (index >> 6 == 0) return kNone;
      continue;
    }
    std::uint32_t found = (index & ~63u) + 63 - static_cast<std::uint32_t>(__builtin_clzll(word));
    while (level-- > 0) {
      word = levels_[level][found];
      found = found * 64 + 63 - static_cast<std::uint32_t>(__builtin_clzll(word));
    }
    return found;
  }
  return kNone;
}

std::uint32_t BitSet::first_from(std::uint32_t index) const noexcept {
  for (std::size_t level = 0; level < levels_.size(); ++level, index = (index >> 6) + 1) {
    if (index >> 6 >= levels_[level].size()) return kNone;
    std::uint64_t word = levels_[level][index >> 6] & (~std::uint64_t{0} << (index & 63));
    if (word == 0) continue;
    std::uint32_t found = (index & ~63u) + static_cast<std::uint32_t>(__builtin_ctzll(word));
    while (level-- > 0) {
      word = levels_[level][found];
      found = found * 64 + static_cast<std::uint32_t>(__builtin_ctzll(word));
    }
    return found;
  }
  return kNone;
}

std::uint32_t Occupancy::bucket_of(Offset start) const noexcept {
  return static_cast<std::uint32_t>((start * 0x9E3779B97F4A7C15ull) >> shift_);
}

std::uint32_t Occupancy::slot_at(Offset start) const noexcept {
  if (index_.empty()) return BitSet::kNone;
  const auto mask = static_cast<std::uint32_t>(index_.size() - 1);
  for (std::uint32_t bucket = bucket_of(start);; bucket = (bucket + 1) & mask) {
    const std::uint32_t slot = index_[bucket];
    if (slot == BitSet::kNone || slots_[slot].start == start) return slot;
  }
}

std::uint32_t Occupancy::slots_before(Offset end) const noexcept {
  const auto first = std::lower_bound(slots_.begin(), slots_.end(), end,
                                      [](const PlannedSlot& slot, Offset offset) { return slot.start < offset; });
  return static_cast<std::uint32_t>(first - slots_.begin());
}

void Occupancy::set_planned_slots(const std::vector<Offset>& starts) {
  // Build everything before changing anything: running out of host memory here leaves the guard intact.
  std::vector<PlannedSlot> slots;
  slots.reserve(starts.size());
  for (const Offset start : starts) slots.push_back({start, 0});
  unsigned bits = 1;
  while ((std::size_t{1} << bits) < starts.size() * 2) ++bits;
  std::vector<std::uint32_t> index(std::size_t{1} << bits, BitSet::kNone);
  BitSet live;
  live.resize(static_cast<std::uint32_t>(starts.size()));
  std::map<Offset, LiveRange> ranges = unplanned_;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].end != 0) ranges.emplace(slots_[slot].start, at(slots_[slot].start));
  }
  std::vector<Holder> holders(starts.size());

  slots_ = std::move(slots);
  holders_ = std::move(holders);
  index_ = std::move(index);
  live_ = std::move(live);
  shift_ = 64 - bits;
  const auto mask = static_cast<std::uint32_t>(index_.size() - 1);
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    std::uint32_t bucket = bucket_of(slots_[slot].start);
    while (index_[bucket] != BitSet::kNone) bucket = (bucket + 1) & mask;
    index_[bucket] = slot;
  }
  for (auto it = ranges.begin(); it != ranges.end();) {
    const std::uint32_t slot = slot_at(it->first);
    if (slot == BitSet::kNone) {
      ++it;
      continue;
    }
    slots_[slot].end = it->second.end;
    holders_[slot] = {it->second.stream_index, it->second.owner};
    live_.set(slot);
    it = ranges.erase(it);
  }
  unplanned_ = std::move(ranges);
}

void Occupancy::take(Offset begin, Offset end, StreamIndex stream_index) {
  const std::uint32_t slot = slot_at(begin);
  if (slot != BitSet::kNone) {
    take_slot(slot, end);
    set_stream_index(slot, stream_index);
    return;
  }
  unplanned_.emplace(begin, LiveRange{end, stream_index, 0});
  ++alive_;
}

Offset Occupancy::release(Offset begin) noexcept {
  const std::uint32_t slot = slot_at(begin);
  Offset end = 0;
  if (slot != BitSet::kNone) {
    end = slots_[slot].end;
    if (end == 0) return 0;
    slots_[slot].end = 0;
    live_.clear(slot);
  } else {
    const auto found = unplanned_.find(begin);
    if (found == unplanned_.end()) return 0;
    end = found->second.end;
    unplanned_.erase(found);
  }
  --alive_;
  no_hole_ = kAnyBytes;
  return end;
}

Occupancy::LiveRange Occupancy::at(Offset begin) const noexcept {
  const std::uint32_t slot = slot_at(begin);
  if (slot != BitSet::kNone) return {slots_[slot].end, holders_[slot].stream_index, holders_[slot].owner};
  const auto found = unplanned_.find(begin);
  return found != unplanned_.end() ? found->second : LiveRange{0, 0, 0};
}

void Occupancy::set_owner_at(Offset begin, Owner owner) noexcept {
  const std::uint32_t slot = slot_at(begin);
  if (slot != BitSet::kNone) return set_owner(slot, owner);
  const auto found = unplanned_.find(begin);
  if (found != unplanned_.end()) found->second.owner = owner;
}

bool Occupancy::clear_of_unplanned(Offset begin, Offset end) const noexcept {
  auto after = unplanned_.lower_bound(end);
  return after == unplanned_.begin() || (--after)->second.end <= begin;
}

Occupancy::Range Occupancy::overlapping(Offset begin, Offset end) const noexcept {
  const auto after = unplanned_.lower_bound(end);
  if (after != unplanned_.begin() && std::prev(after)->second.end > begin) {
    return {std::prev(after)->first, std::prev(after)->second.end};
  }
  const std::uint32_t before = slots_before(end);
  const std::uint32_t last = before == 0 ? BitSet::kNone : live_.last_up_to(before - 1);
  if (last == BitSet::kNone || slots_[last].end <= begin) return {};
  return {slots_[last].start, slots_[last].end};
}

std::vector<std::pair<Offset, Offset>> Occupancy::live_ranges() const {
  std::vector<std::pair<Offset, Offset>> ranges;
  ranges.reserve(alive_);
  each_live([&](Offset begin, Offset end) { ranges.emplace_back(begin, end); });
  return ranges;
}

Offset Occupancy::find_hole(std::size_t bytes, std::size_t alignment, Offset limit) {
  Offset best = limit;
  Offset best_size = ~Offset{0};
  const auto consider = [&](Offset begin, Offset end) {
    const Offset aligned = (begin + alignment - 1) / alignment * alignment;
    if (aligned > end || end - aligned < bytes || end - aligned > best_size) return;
    if (end - aligned == best_size && aligned > best) return;
    best = aligned;
    best_size = end - aligned;
  };
  if (!MEMPOOL_GUARDED("hole")) {
    consider(0, limit);
    return best;
  }
  if (!may_have_hole(bytes, limit)) return limit;
  if (end_of_last() < limit) consider(end_of_last(), limit);
  // With many live ranges, each search continues where the last one stopped, so that no search is long.
  const bool all = alive_ <= kHolesExamined;
  const Offset from = all ? 0 : hole_cursor_;
  Offset edge = from;
  // a range may have been placed there since
  bool edge_known = is_free(from, from + 1, slots_before(from + 1));
  std::size_t examined = 0;
  walk(from, [&](Offset begin, Offset end) {
    if (edge_known && begin > edge && edge < limit) consider(edge, std::min(begin, limit));
    edge = end;
    edge_known = true;
    return begin < limit && (all || ++examined < kHolesExamined);
  });
  hole_cursor_ = examined == kHolesExamined ? edge : 0;
  if (all && best == limit) {
    no_hole_ = bytes;
    no_hole_below_ = limit;
  }
  return best;
}

Offset Occupancy::largest_hole(Offset limit) const noexcept {
  Offset edge = 0, largest = 0;
  walk(0, [&](Offset begin, Offset end) {
    if (begin > edge) largest = std::max(largest, std::min(begin, limit) - std::min(edge, limit));
    edge = std::max(edge, end);
    return edge < limit;
  });
  return edge < limit ? std::max(largest, limit - edge) : largest;
}

Offset Occupancy::end_of_last() const noexcept {
  Offset end = unplanned_.empty() ? 0 : unplanned_.rbegin()->second.end;
  if (!slots_.empty()) {
    const std::uint32_t last = live_.last_up_to(static_cast<std::uint32_t>(slots_.size() - 1));
    if (last != BitSet::kNone) end = std::max(end, slots_[last].end);
  }
  return end;
}

std::size_t Occupancy::table_bytes() const noexcept {
  return slots_.capacity() * sizeof(PlannedSlot) + holders_.capacity() * sizeof(Holder) + index_.capacity() * sizeof(std::uint32_t) + slots_.size() / 7;
}

}  // namespace mempool
