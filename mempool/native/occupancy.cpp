#include "occupancy.hpp"

#include <algorithm>

namespace mempool {

void BitSet::resize(std::uint32_t size) {
  depth_ = 0;
  std::size_t words = size;
  do {
    words = std::max<std::size_t>(1, (words + 63) / 64);
    levels_[depth_++].assign(words, 0);
  } while (words > 1);
}

void BitSet::set_above(std::uint32_t index) noexcept {
  for (std::size_t level = 1; level < depth_; ++level, index >>= 6) {
    std::uint64_t& word = levels_[level][index >> 6];
    const bool was_empty = word == 0;
    word |= std::uint64_t{1} << (index & 63);
    if (!was_empty) return;
  }
}

void BitSet::clear_above(std::uint32_t index) noexcept {
  for (std::size_t level = 1; level < depth_; ++level, index >>= 6) {
    std::uint64_t& word = levels_[level][index >> 6];
    word &= ~(std::uint64_t{1} << (index & 63));
    if (word != 0) return;
  }
}

std::uint32_t BitSet::search_up_to(std::uint32_t index) const noexcept {
  // Up: the first level with a smaller member beside us. Down: its largest.
  for (std::size_t level = 0; level < depth_; ++level, index = (index >> 6) - 1) {
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
  for (std::size_t level = 0; level < depth_; ++level, index = (index >> 6) + 1) {
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

std::uint32_t Occupancy::cells_before(Offset end) const noexcept {
  return static_cast<std::uint32_t>(std::lower_bound(starts_.begin(), starts_.end(), end) - starts_.begin());
}

void Occupancy::set_cells(std::vector<Offset> starts) {
  // Everything is made before anything is changed: running out of host memory here leaves the guard whole.
  std::vector<Range> ranges(starts.size());
  unsigned bits = 1;
  while ((std::size_t{1} << bits) < starts.size() * 2) ++bits;
  std::vector<std::uint32_t> index(std::size_t{1} << bits, BitSet::kNone);
  BitSet live;
  live.resize(static_cast<std::uint32_t>(starts.size()));
  std::map<Offset, Range> everything = strangers_;
  for (std::size_t cell = 0; cell < starts_.size(); ++cell) {
    if (ranges_[cell].end != 0) everything.emplace(starts_[cell], ranges_[cell]);
  }

  starts_ = std::move(starts);
  ranges_ = std::move(ranges);
  index_ = std::move(index);
  live_ = std::move(live);
  shift_ = 64 - bits;
  const auto mask = static_cast<std::uint32_t>(index_.size() - 1);
  for (std::uint32_t cell = 0; cell < starts_.size(); ++cell) {
    std::uint32_t slot = slot_of(starts_[cell]);
    while (index_[slot] != BitSet::kNone) slot = (slot + 1) & mask;
    index_[slot] = cell;
  }
  for (auto it = everything.begin(); it != everything.end();) {
    const std::uint32_t cell = cell_of(it->first);
    if (cell == BitSet::kNone) {
      ++it;
      continue;
    }
    ranges_[cell] = it->second;
    live_.set(cell);
    it = everything.erase(it);
  }
  strangers_ = std::move(everything);
}

void Occupancy::take(Offset begin, Offset end, std::size_t requested) {
  const std::uint32_t cell = cell_of(begin);
  if (cell != BitSet::kNone) {
    take_cell(cell, end, requested);
    return;
  }
  strangers_.emplace(begin, Range{end, requested});
  ++alive_;
}

Occupancy::Range Occupancy::release_stranger(Offset begin) noexcept {
  const auto found = strangers_.find(begin);
  if (found == strangers_.end()) return {};
  const Range range = found->second;
  strangers_.erase(found);
  --alive_;
  return range;
}

std::size_t Occupancy::requested_at(Offset begin) const noexcept {
  const std::uint32_t cell = cell_of(begin);
  if (cell != BitSet::kNone) return ranges_[cell].end != 0 ? ranges_[cell].requested : 0;
  const auto found = strangers_.find(begin);
  return found != strangers_.end() ? found->second.requested : 0;
}

bool Occupancy::strangers_free(Offset begin, Offset end) const noexcept {
  auto after = strangers_.lower_bound(end);
  return after == strangers_.begin() || (--after)->second.end <= begin;
}

std::vector<std::pair<Offset, Offset>> Occupancy::live_ranges() const {
  std::vector<std::pair<Offset, Offset>> ranges;
  ranges.reserve(alive_);
  auto stranger = strangers_.begin();
  const auto next_cell = [&](std::uint32_t from) {
    return starts_.empty() || from >= starts_.size() ? BitSet::kNone : live_.first_from(from);
  };
  for (std::uint32_t cell = next_cell(0); cell != BitSet::kNone || stranger != strangers_.end();) {
    if (cell != BitSet::kNone && (stranger == strangers_.end() || starts_[cell] < stranger->first)) {
      ranges.emplace_back(starts_[cell], ranges_[cell].end);
      cell = next_cell(cell + 1);
    } else {
      ranges.emplace_back(stranger->first, stranger->second.end);
      ++stranger;
    }
  }
  return ranges;
}

Offset Occupancy::find_hole(std::size_t bytes, std::size_t alignment, Offset limit) const {
  Offset best = limit;
  Offset best_size = ~Offset{0};
  Offset edge = 0;
  const auto consider = [&](Offset begin, Offset end) {
    const Offset aligned = (begin + alignment - 1) / alignment * alignment;
    if (aligned > end || end - aligned < bytes || end - aligned >= best_size) return;
    best = aligned;
    best_size = end - aligned;
  };
  const auto ranges = MEMPOOL_GUARDED("hole") ? live_ranges() : decltype(live_ranges()){};
  for (const auto& [begin, end] : ranges) {
    if (begin >= limit) break;
    if (begin > edge) consider(edge, begin);
    edge = end;
  }
  if (edge < limit) consider(edge, limit);
  return best;
}

Offset Occupancy::end_of_last() const noexcept {
  Offset end = strangers_.empty() ? 0 : strangers_.rbegin()->second.end;
  if (!starts_.empty()) {
    const std::uint32_t last = live_.last_up_to(static_cast<std::uint32_t>(starts_.size() - 1));
    if (last != BitSet::kNone) end = std::max(end, ranges_[last].end);
  }
  return end;
}

std::size_t Occupancy::table_bytes() const noexcept {
  return starts_.capacity() * sizeof(Offset) + ranges_.capacity() * sizeof(Range) +
         index_.capacity() * sizeof(std::uint32_t) + starts_.size() / 7;
}

}  // namespace mempool
