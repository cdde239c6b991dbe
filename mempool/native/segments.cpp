#include "segments.hpp"

#include <algorithm>
#include <iterator>

namespace mempool {

unsigned FreeBins::bin_of(std::size_t bytes) noexcept {
  const unsigned power = 63 - static_cast<unsigned>(__builtin_clzll(bytes | 8));
  return power * 8 + static_cast<unsigned>(bytes >> (power - 3) & 7);
}

void FreeBins::add(Block* block) noexcept {
  const unsigned bin = bin_of(block->size);
  block->bin_before = nullptr;
  block->bin_after = heads_[bin];
  if (heads_[bin] != nullptr) heads_[bin]->bin_before = block;
  heads_[bin] = block;
  nonempty_[bin / 64] |= std::uint64_t{1} << (bin % 64);
}

void FreeBins::remove(Block* block) noexcept {
  const unsigned bin = bin_of(block->size);
  if (block->bin_after != nullptr) block->bin_after->bin_before = block->bin_before;
  if (block->bin_before != nullptr) {
    block->bin_before->bin_after = block->bin_after;
  } else {
    heads_[bin] = block->bin_after;
    if (heads_[bin] == nullptr) nonempty_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  }
}

Block* FreeBins::best_of(unsigned bin, std::size_t bytes, unsigned most) const noexcept {
  Block* best = nullptr;
  for (Block* block = heads_[bin]; block != nullptr && most > 0; block = block->bin_after, --most) {
    if (block->size < bytes) continue;
    if (best == nullptr || block->size < best->size || (block->size == best->size && block->address < best->address)) {
      best = block;
    }
  }
  return best;
}

Block* FreeBins::best_fit(std::size_t bytes) const noexcept {
  constexpr unsigned kFew = 32;  // a program may leave thousands of holes of one size; looking at all is quadratic
  const unsigned first = bin_of(bytes);
  for (unsigned word = first / 64; word < nonempty_.size(); ++word) {
    std::uint64_t bits = nonempty_[word];
    if (word == first / 64) bits &= ~std::uint64_t{0} << (first % 64);
    for (; bits != 0; bits &= bits - 1) {
      Block* best = best_of(word * 64 + static_cast<unsigned>(__builtin_ctzll(bits)), bytes, kFew);
      if (best != nullptr) return best;
    }
  }
  return best_of(first, bytes, ~0u);  // all larger bins are empty
}

Segments::~Segments() {
  for (const auto& [base, segment] : segments_) source_.release(base, segment.size, segment.committed);
}

Segments::Bins& Segments::stream_bins(Stream stream) { return bins_[stream]; }

FreeBins& Segments::bins_of(const Block* block) noexcept {
  Bins& bins = bins_.find(block->stream)->second;  // made when the block's stream first allocated
  return block->segment->large ? bins.large : bins.shared;
}

Block* Segments::new_block() {
  if (spare_.empty()) {
    if (spare_.capacity() <= storage_.size()) spare_.reserve(2 * storage_.size() + 16);
    storage_.emplace_back();
    return &storage_.back();
  }
  Block* block = spare_.back();
  spare_.pop_back();
  *block = Block{};
  return block;
}

void Segments::delete_block(Block* block) noexcept { spare_.push_back(block); }

bool Segments::commit_pages(Segment* segment, Address address, std::size_t bytes) noexcept {
  const std::size_t page = source_.traits().page;
  if (page == 0 || segment->large) return true;
  const std::size_t first = (address - segment->base) / page;
  const std::size_t last = (address + bytes - segment->base + page - 1) / page;
  for (std::size_t i = first; i < last;) {
    const auto committed = [&](std::size_t p) { return segment->pages[p / 64] >> (p % 64) & 1; };
    if (committed(i)) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < last && !committed(end)) ++end;
    if (!source_.commit(segment->base + i * page, (end - i) * page)) return false;
    segment->committed += (end - i) * page;
    for (; i < end; ++i) segment->pages[i / 64] |= std::uint64_t{1} << (i % 64);
  }
  return true;
}

void Segments::return_pages(Block* block) noexcept {
  const std::size_t page = source_.traits().page;
  Segment* segment = block->segment;
  if (page == 0 || segment->large) return;
  const std::size_t first = (block->address - segment->base + page - 1) / page;
  const std::size_t last = (block->address + block->size - segment->base) / page;
  for (std::size_t i = first; i < last;) {
    const auto committed = [&](std::size_t p) { return segment->pages[p / 64] >> (p % 64) & 1; };
    if (!committed(i)) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < last && committed(end)) ++end;
    source_.decommit(segment->base + i * page, (end - i) * page);
    segment->committed -= (end - i) * page;
    for (; i < end; ++i) segment->pages[i / 64] &= ~(std::uint64_t{1} << (i % 64));
  }
}

Block* Segments::take_segment(std::size_t bytes, bool large, Stream stream) {
  const DeviceTraits& traits = source_.traits();
  const std::size_t size = source_.round_to_page(large ? bytes : std::max(traits.shared_segment, bytes));
  // Everything that may throw is made before the device is asked.
  std::map<Address, Segment> made;
  Segment& segment = made[0];
  segment.size = size;
  segment.large = large;
  if (!large && traits.page != 0) segment.pages.resize((size / traits.page + 63) / 64);
  stream_bins(stream);
  Block* block = new_block();

  segment.base = source_.reserve(size, traits.alignment);
  if (segment.base == 0) {
    delete_block(block);
    return nullptr;
  }
  if (large || traits.page == 0) {
    if (!source_.commit(segment.base, size)) {
      source_.release(segment.base, size, 0);
      delete_block(block);
      return nullptr;
    }
    segment.committed = size;
  }
  block->address = segment.base;
  block->size = size;
  block->segment = &segment;
  block->stream = stream;
  block->free = true;
  block->fresh = true;
  segment.first = block;
  segment.idle_since = epoch_;
  auto node = made.extract(made.begin());
  node.key() = segment.base;
  segments_.insert(std::move(node));
  retained_ += size;
  bins_of(block).add(block);
  return block;
}

Block* Segments::reuse(std::size_t bytes, bool large, Stream stream, Effort effort) const noexcept {
  const auto bins = bins_.find(stream);
  if (bins == bins_.end()) return nullptr;
  if (!large) return bins->second.shared.best_fit(bytes);
  Block* block = bins->second.large.best_fit(bytes);
  if (block == nullptr || effort == Effort::last_resort) return block;
  // A much larger block is left for a larger request, unless the rest can be split off and used.
  const std::size_t rest = block->size - bytes;
  return rest > bytes / 8 && rest < source_.traits().large ? nullptr : block;
}

void Segments::split(Block* block, std::size_t bytes) {
  const DeviceTraits& traits = source_.traits();
  const std::size_t least = block->segment->large ? traits.large : traits.alignment;
  if (block->size - bytes < least) return;
  Block* rest = new_block();
  rest->address = block->address + bytes;
  rest->size = block->size - bytes;
  rest->segment = block->segment;
  rest->before = block;
  rest->after = block->after;
  rest->stream = block->stream;
  rest->free = true;
  rest->fresh = block->fresh;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->size = bytes;
  bins_of(rest).add(rest);
}

Block* Segments::allocate(std::size_t bytes, Stream stream, Effort effort) {
  const DeviceTraits& traits = source_.traits();
  if (bytes > (std::size_t{1} << 62)) return nullptr;
  const std::size_t rounded = std::max(traits.alignment, (bytes + traits.alignment - 1) / traits.alignment * traits.alignment);
  const bool large = rounded >= traits.large;
  Block* block = reuse(rounded, large, stream, effort);
  if (block == nullptr && effort != Effort::reuse) block = take_segment(rounded, large, stream);
  if (block == nullptr) return nullptr;

  blocks_.insert(block->address, block);
  bins_of(block).remove(block);
  const bool was_whole = block->before == nullptr && block->after == nullptr;
  try {
    split(block, rounded);
  } catch (...) {  // keep it whole: wasteful and right
  }
  if (!commit_pages(block->segment, block->address, block->size)) {
    blocks_.erase(block->address);
    if (was_whole) retained_ -= block->segment->size;
    put_back(block);
    return nullptr;
  }
  if (was_whole) retained_ -= block->segment->size;
  block->free = false;
  block->requested = bytes;
  return block;
}

Block* Segments::merge(Block* left, Block* right) noexcept {
  left->size += right->size;
  left->fresh = left->fresh && right->fresh;
  left->after = right->after;
  if (left->after != nullptr) left->after->before = left;
  delete_block(right);
  return left;
}

bool Segments::owns(Address address) const noexcept {
  const auto after = segments_.upper_bound(address);
  return after != segments_.begin() && address - std::prev(after)->first < std::prev(after)->second.size;
}

bool Segments::free(Block* block, Stream stream) noexcept {
  blocks_.erase(block->address);
  block->free = true;
  block->fresh = false;
  bool moved = true;
  if (stream != block->stream) {
    try {
      stream_bins(stream);
      block->stream = stream;
    } catch (...) {
      moved = false;
    }
  }
  put_back(block);
  return moved;
}

// A free block that is in no list joins its free neighbours of the same stream and goes into theirs.
void Segments::put_back(Block* block) noexcept {
  Block* const after = block->after;
  if (after != nullptr && after->free && after->stream == block->stream) {
    bins_of(after).remove(after);
    block = merge(block, after);
  }
  Block* const before = block->before;
  if (before != nullptr && before->free && before->stream == block->stream) {
    bins_of(before).remove(before);
    block = merge(before, block);
  }
  block->idle_since = epoch_;
  bins_of(block).add(block);
  if (block->before != nullptr || block->after != nullptr) return;
  Segment& segment = *block->segment;
  segment.idle_since = epoch_;
  retained_ += segment.size;
  if (retained_ > retained_limit_) drop(segment);
}

void Segments::drop(Segment& segment) noexcept {
  bins_of(segment.first).remove(segment.first);
  delete_block(segment.first);
  retained_ -= segment.size;
  source_.release(segment.base, segment.size, segment.committed);
  segments_.erase(segment.base);
}

// Makes one block of a segment in which nothing lives, whichever streams its blocks were freed on: it goes back to the
// device, which waits for them all.
void Segments::gather(Segment& segment) noexcept {
  Block* const first = segment.first;
  for (const Block* block = first; block != nullptr; block = block->after) {
    if (!block->free) return;
  }
  if (first->after == nullptr) return;
  bins_of(first).remove(first);
  while (first->after != nullptr) {
    bins_of(first->after).remove(first->after);
    merge(first, first->after);
  }
  bins_of(first).add(first);
  retained_ += segment.size;
}

void Segments::trim(std::uint64_t idle_before) noexcept {
  const bool everything = idle_before == ~std::uint64_t{0};
  const bool pages = everything || epoch_ >= sweep_at_;
  if (pages) sweep_at_ = epoch_ + 2 + blocks_.size() / 256;
  for (auto it = segments_.begin(); it != segments_.end();) {
    Segment& segment = (it++)->second;
    if (everything) gather(segment);
    const bool whole = segment.first->free && segment.first->after == nullptr;
    if (whole && segment.idle_since < idle_before) {
      drop(segment);
      continue;
    }
    if (segment.large || !pages) continue;
    for (Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->free && block->idle_since < idle_before) return_pages(block);
    }
  }
}

void Segments::give_free_blocks_to(Stream stream) {
  stream_bins(stream);
  for (auto& [base, segment] : segments_) {
    for (Block* block = segment.first; block != nullptr; block = block->after) {
      if (!block->free) continue;
      const bool was_whole = block->before == nullptr && block->after == nullptr;
      bins_of(block).remove(block);
      while (block->after != nullptr && block->after->free) {
        bins_of(block->after).remove(block->after);
        merge(block, block->after);
      }
      block->stream = stream;
      bins_of(block).add(block);
      if (!was_whole && block->before == nullptr && block->after == nullptr) retained_ += segment.size;
    }
  }
}

std::size_t Segments::free_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& [base, segment] : segments_) {
    bytes += segment.committed;
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (!block->free) bytes -= std::min(bytes, block->size);
    }
  }
  return bytes;
}

std::size_t Segments::largest_free() const noexcept {
  std::size_t largest = 0;
  for (const auto& [base, segment] : segments_) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->free) largest = std::max(largest, block->size);
    }
  }
  return largest;
}

}  // namespace mempool
