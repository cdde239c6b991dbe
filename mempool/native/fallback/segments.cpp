#include "fallback/segments.hpp"

#include <algorithm>
#include <iterator>

namespace mempool {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 62;
// At a new high-water mark, at most 1/kIdleShare of the mark may be idle. If pages are released singly, as in growing
// memory of a GPU, releasing more costs little: at 1/8 the loops of tests/gpu held up to
// 12 % more at most than was alive, at 1/16 up to 4.4 %, at 1/64 up to 3.6 % (tests/benchmarks/planned_in_advance.py).
constexpr std::size_t kIdleShare = 8, kIdleShareInPages = 16;
// Without page-wise return, a rest of at least 1/kLeastRest of the size of a large request is split off for
// others.
constexpr std::size_t kLeastRest = 10;
// Limits on memory released for a lower high-water mark: kAtOnce times the mark, plus kUnfelt bytes per
// allocation.
constexpr std::size_t kAtOnce = 2, kUnfelt = std::size_t{32} << 10;

}  // namespace

Segments::~Segments() {
  for (const auto& [base, segment] : segments_) source_.release_anyway(base, segment.size, segment.committed);
}

Segments::Bins& Segments::stream_bins(Stream stream) {
  if (bins_.size() > most_streams_ && bins_.count(stream) == 0) {
    forget_streams();
    most_streams_ = 2 * bins_.size() + kFewStreams;
  }
  return bins_[stream];
}

FreeBins& Segments::bins_of(const Block* block) noexcept {
  Bins& bins = bins_.find(block->stream)->second;  // created when the block's stream first allocated
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
  *block = Block();
  return block;
}

void Segments::delete_block(Block* block) noexcept { spare_.push_back(block); }

std::pair<std::size_t, std::size_t> Segments::pages_of(const Segment& segment, Address address, std::size_t bytes,
                                                       bool inside) const noexcept {
  const std::size_t page = source_.traits().page;
  const std::size_t begin = address - segment.base, end = begin + bytes;
  if (!inside) return {begin / page, (end + page - 1) / page};
  return {(begin + page - 1) / page, end / page};
}

bool Segments::committed(const Block& block, std::size_t bytes) const noexcept {
  const Segment& segment = *block.segment;
  if (!paged(segment)) return true;
  const auto [first, last] = pages_of(segment, block.address, bytes, false);
  return segment.pages.find(first, last, false) == last;
}

std::size_t Segments::returnable(const Block& block) const noexcept {
  const Segment& segment = *block.segment;
  if (!paged(segment)) return is_whole(block) ? segment.size : 0;
  const auto [first, last] = pages_of(segment, block.address, block.size, true);
  return segment.pages.count(first, last) * source_.traits().page;
}

// Return the returnable bytes of `block` beyond the first `bytes`. Uses block.idle, which is known for the
// whole block.
std::size_t Segments::returnable_beyond(const Block& block, std::size_t bytes) const noexcept {
  const Segment& segment = *block.segment;
  if (!paged(segment)) return 0;
  const auto [first, last] = pages_of(segment, block.address, block.size, true);
  const std::size_t rest = pages_of(segment, block.address + bytes, block.size - bytes, true).first;
  return block.idle - segment.pages.count(first, std::min(rest, last)) * source_.traits().page;
}

// Return the bytes of pages shared by two free neighbours, which become returnable when the two are merged.
std::size_t Segments::returnable_between(const Block& left, const Block& right) const noexcept {
  const Segment& segment = *left.segment;
  if (!paged(segment)) return 0;
  const auto [left_first, left_last] = pages_of(segment, left.address, left.size, true);
  const auto [right_first, right_last] = pages_of(segment, right.address, right.size, true);
  const std::size_t first = std::max(left_first, left_last), last = std::min(right_first, right_last);
  return segment.pages.count(first, last) * source_.traits().page;
}

bool Segments::sets_mark(std::size_t bytes) const noexcept {
  return source_.reserved().current + bytes > source_.reserved().peak;
}

// Release idle memory before a new high-water mark is set, the oldest first, regardless of the retained limit.
// Otherwise varying sizes would get separate segments that fit no other size. If a release waits for the device,
// release only the missing bytes, only of the stream's own memory, and in total only a small amount, because released
// memory may have to be allocated again and again.
void Segments::make_way(std::size_t bytes, Stream stream) noexcept {
  if (source_.held()) return;
  const Gauge& reserved = source_.reserved();
  const bool slow = source_.traits().slow_return;
  const std::size_t share = slow && source_.traits().page != 0 ? kIdleShareInPages : kIdleShare;
  const auto idle = [&] { return slow ? bins_.find(stream)->second.idle : idle_.bytes(); };
  while (idle() > reserved.peak / share && sets_mark(bytes)) {
    if (slow && source_.held_for(stream)) return;
    if (slow && made_way_ > kAtOnce * reserved.peak + kUnfelt * allocations_) return;
    Block* block = idle_.first();
    while (slow && block->stream != stream) block = block->idle_after;
    const std::size_t before = reserved.current, missing = before + bytes - reserved.peak;
    if (!give_back_one(block, slow ? missing : ~std::size_t{0})) return;
    made_way_ += before - reserved.current;
  }
}

bool Segments::commit_pages(Block* block) noexcept {
  Segment& segment = *block->segment;
  if (!paged(segment)) return true;
  const std::size_t page = source_.traits().page;
  const auto [first, last] = pages_of(segment, block->address, block->size, false);
  for (std::size_t i = segment.pages.find(first, last, false); i < last; i = segment.pages.find(i, last, false)) {
    const std::size_t end = segment.pages.find(i, last, true);
    make_way((end - i) * page, block->stream);
    if (!source_.commit(segment.base + i * page, (end - i) * page)) return false;
    segment.committed += (end - i) * page;
    segment.pages.assign(i, end, true);
  }
  return true;
}

bool Segments::return_pages(Block* block, std::size_t most) noexcept {
  Segment& segment = *block->segment;
  const std::size_t page = source_.traits().page;
  const auto [first, last] = pages_of(segment, block->address, block->size, true);
  std::size_t left = most / page + (most % page != 0 ? 1 : 0);
  for (std::size_t i = segment.pages.find(first, last, true); i < last && left != 0; i = segment.pages.find(i, last, true)) {
    const std::size_t end = i + std::min(left, segment.pages.find(i, last, false) - i);
    left -= end - i;
    if (!source_.decommit(segment.base + i * page, (end - i) * page)) return false;
    segment.committed -= (end - i) * page;
    segment.pages.assign(i, end, false);
  }
  return true;
}

// Release at least `least` bytes of the block's idle memory to the device, and the segment too if no block
// there is live. False: the device could not be waited for.
bool Segments::give_back(Block* block, std::size_t least) noexcept {
  if (is_whole(*block) && (!paged(*block->segment) || least >= block->idle)) return drop(*block->segment);
  unshelve(block);
  const bool could = return_pages(block, least);
  block->idle = could && least >= block->idle ? 0 : returnable(*block);
  shelve(block);
  return could;
}

void Segments::shelve(Block* block) noexcept {
  bins_of(block).add(block);
  if (!paged(*block->segment)) block->idle = returnable(*block);
  if (block->idle == 0) return;
  idle_.add(block);
  bins_.find(block->stream)->second.idle += block->idle;
}

void Segments::unshelve(Block* block) noexcept {
  bins_of(block).remove(block);
  if (block->idle == 0) return;
  idle_.remove(block);
  bins_.find(block->stream)->second.idle -= block->idle;
}

Block* Segments::take_segment(std::size_t bytes, bool large, Stream stream) {
  const DeviceTraits& traits = source_.traits();
  const std::size_t size = source_.round_to_page(bytes);
  // Allocate everything that may throw before asking the device.
  std::map<Address, Segment> made;
  Segment& segment = made[0];
  segment.size = size;
  segment.large = large;
  if (!large && traits.page != 0) segment.pages.resize(size / traits.page);
  stream_bins(stream);
  Block* block = new_block();

  if (large || traits.page == 0) make_way(size, stream);
  segment.base = source_.reserve(size, traits.alignment);
  if (segment.base == 0) {
    delete_block(block);
    return nullptr;
  }
  if (large || traits.page == 0) {
    if (!source_.commit(segment.base, size)) {
      source_.release_anyway(segment.base, size, 0);
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
  block->idle_since = epoch_;
  segment.first = block;
  auto node = made.extract(made.begin());
  node.key() = segment.base;
  segments_.insert(std::move(node));
  shelve(block);
  return block;
}

void Segments::adopt(Address base, std::size_t size, std::size_t committed, const std::vector<Living>& living, Stream stream) {
  std::map<Address, Segment> made;
  Segment& segment = made[base];
  segment.base = base;
  segment.size = size;
  segment.committed = committed;
  segment.pages.resize(committed / source_.traits().page);
  segment.pages.assign(0, committed / source_.traits().page, true);
  std::vector<Block*> blocks;
  blocks.reserve(2 * living.size() + 1);
  std::size_t known = 0;
  try {
    const auto add = [&](Address begin, Address end, Stream its) -> Block& {
      blocks.push_back(new_block());
      Block& block = *blocks.back();
      block.address = begin;
      block.size = end - begin;
      block.segment = &segment;
      block.stream = its;
      block.free = true;
      block.idle_since = epoch_;
      bins_[its];
      return block;
    };
    Address at = base;
    for (const Living& one : living) {
      if (one.address > at) add(at, one.address, stream);
      Block& block = add(one.address, one.address + round_up(one.requested), one.stream);
      block.free = false;
      block.requested = one.requested;
      block.owner = one.owner;
      block.place = one.place;
      at = block.address + block.size;
    }
    if (at < base + committed) add(at, base + committed, stream);
    for (; known < blocks.size(); ++known) {
      if (!blocks[known]->free) blocks_.insert(blocks[known]->address, blocks[known]);
    }
  } catch (...) {
    while (known-- > 0) {
      if (!blocks[known]->free) blocks_.erase(blocks[known]->address);
    }
    for (Block* block : blocks) delete_block(block);
    throw;
  }
  segment.first = blocks.front();
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    blocks[i]->before = blocks[i - 1];
    blocks[i - 1]->after = blocks[i];
  }
  segments_.insert(made.extract(made.begin()));
  for (Block* block : blocks) {
    if (!block->free) continue;
    block->idle = returnable(*block);
    shelve(block);
  }
}

Block* Segments::reuse(std::size_t bytes, bool large, Stream stream, Effort effort) const noexcept {
  const auto bins = bins_.find(stream);
  if (bins == bins_.end()) return nullptr;
  Block* block = (large ? bins->second.large : bins->second.shared).best_fit(bytes);
  if (!large) return block != nullptr && effort == Effort::reuse && !committed(*block, bytes) ? nullptr : block;
  if (block == nullptr || effort == Effort::last_resort) return block;
  // Leave a much larger block to a larger request, unless the rest can be split off and used. Under a budget
  // the block is rather released whole: a split block is useless to others until all parts are free again.
  const std::size_t rest = block->size - bytes;
  return rest > bytes / 8 && (rest < source_.traits().large || source_.has_budget()) ? nullptr : block;
}

// Before a segment sets a new high-water mark, use even badly fitting free memory that reuse() leaves for other
// requests. Blocks of large segments also serve requests that are not much smaller than large. Not used if pages can be
// released singly, or if a budget releases free blocks whole.
Block* Segments::squeeze(std::size_t bytes, bool large, Stream stream) const noexcept {
  if (!splits_finely()) return nullptr;
  Block* const block = reuse(bytes, large, stream, Effort::last_resort);
  const bool crosses = block == nullptr && !large && bytes >= source_.traits().large / kLeastRest;
  return crosses ? reuse(bytes, true, stream, Effort::last_resort) : block;
}

bool Segments::splits_finely() const noexcept { return source_.traits().page == 0 && !source_.has_budget(); }

void Segments::split(Block* block, std::size_t bytes) {
  const DeviceTraits& traits = source_.traits();
  const std::size_t of_large = splits_finely() ? std::max(traits.alignment, traits.large / kLeastRest) : traits.large;
  if (block->size - bytes < (block->segment->large ? of_large : traits.alignment)) return;
  Block* rest = new_block();
  rest->address = block->address + bytes;
  rest->size = block->size - bytes;
  rest->segment = block->segment;
  rest->before = block;
  rest->after = block->after;
  rest->stream = block->stream;
  rest->free = true;
  rest->fresh = block->fresh;
  rest->idle = returnable_beyond(*block, bytes);
  rest->idle_since = block->idle_since;
  if (rest->after != nullptr) rest->after->before = rest;
  block->after = rest;
  block->size = bytes;
  shelve(rest);
}

std::size_t Segments::round_up(std::size_t bytes) const noexcept {
  const std::size_t unit = source_.traits().alignment;
  return std::max(unit, (bytes + unit - 1) / unit * unit);
}

Block* Segments::allocate(std::size_t bytes, Stream stream, Effort effort) {
  if (bytes > kMostBytes) return nullptr;
  ++allocations_;
  const std::size_t rounded = round_up(bytes);
  const bool large = rounded >= source_.traits().large;
  Block* block = reuse(rounded, large, stream, effort);
  if (block == nullptr && effort == Effort::reuse) return nullptr;
  const bool tight = block == nullptr && source_.traits().page == 0 && source_.has_budget() && !source_.keep_budget(shared_);
  const std::size_t size = large || tight ? rounded : std::max(shared_, rounded);
  if (block == nullptr && sets_mark(source_.round_to_page(size))) block = squeeze(rounded, large, stream);
  if (block == nullptr) block = take_segment(size, large, stream);
  // On a device with pages the address space was missing: try smaller shared segments, now and later.
  while (block == nullptr && source_.traits().page != 0 && !large && shared_ / 16 > rounded) {
    shared_ /= 16;
    block = take_segment(shared_, large, stream);
  }
  // If no shared segment can be allocated, try one for this request alone.
  const bool alone = effort == Effort::last_resort || source_.traits().page != 0;
  if (block == nullptr && alone && size > rounded) block = take_segment(rounded, large, stream);
  if (block == nullptr) return nullptr;

  blocks_.insert(block->address, block);
  unshelve(block);
  try {
    split(block, rounded);
  } catch (...) {  // keep the block whole: wasteful but correct
  }
  if (!commit_pages(block)) {
    blocks_.erase(block->address);
    put_back(block);
    return nullptr;
  }
  block->free = false;
  block->requested = bytes;
  block->place = Block::kNoPlace;
  return block;
}

Block* Segments::merge(Block* left, Block* right) noexcept {
  if (right->idle > left->idle) left->idle_since = right->idle_since;
  left->idle += right->idle + returnable_between(*left, *right);
  left->size += right->size;
  left->fresh = left->fresh && right->fresh;
  left->after = right->after;
  if (left->after != nullptr) left->after->before = left;
  delete_block(right);
  return left;
}

// --- resizing live blocks

bool Segments::resize(Block* block, std::size_t bytes, Stream stream) noexcept {
  if (bytes > kMostBytes || stream != block->stream) return false;
  const std::size_t rounded = round_up(bytes);
  Segment& segment = *block->segment;
  // the new size belongs into the other kind of segment
  if (segment.large != (rounded >= source_.traits().large)) return false;
  if (segment.large && is_whole(*block) && source_.round_to_page(rounded) != segment.size) {
    if (!resize_segment(segment, source_.round_to_page(rounded))) {
      if (rounded > block->size) return false;
      shrink(block, rounded);
    }
  } else if (rounded > block->size) {
    if (!grow_into_neighbour(block, rounded)) return false;
  } else {
    shrink(block, rounded);
  }
  block->requested = bytes;
  block->fresh = false;
  return true;
}

bool Segments::resize_segment(Segment& segment, std::size_t bytes) noexcept {
  if (source_.held()) return false;
  if (bytes > segment.size) make_way(bytes - segment.size, segment.first->stream);
  Address base = source_.resize(segment.base, segment.size, bytes);
  // a copy would need even more memory
  if (base == 0 && bytes > segment.size && source_.traits().page != 0) {
    trim();
    base = source_.resize(segment.base, segment.size, bytes);
  }
  if (base == 0) return false;
  Block* const block = segment.first;
  if (base != segment.base) {
    blocks_.rekey(segment.base, base);
    auto node = segments_.extract(segment.base);  // the Segment object does not move
    node.key() = base;
    segments_.insert(std::move(node));
  }
  segment.base = block->address = base;
  segment.size = segment.committed = block->size = bytes;
  return true;
}

bool Segments::grow_into_neighbour(Block* block, std::size_t bytes) noexcept {
  Block* const after = block->after;
  if (after == nullptr || !after->free || after->stream != block->stream || block->size + after->size < bytes) return false;
  unshelve(after);
  try {
    split(after, bytes - block->size);
  } catch (...) {  // take the whole block: wasteful but correct
  }
  if (!commit_pages(after)) {
    put_back(after);
    return false;
  }
  merge(block, after);
  return true;
}

void Segments::shrink(Block* block, std::size_t bytes) noexcept {
  block->fresh = false;
  block->idle = returnable(*block);
  Block* const after = block->after;
  try {
    split(block, bytes);
  } catch (...) {  // the block stays as large as before
  }
  if (block->after == after) return;
  unshelve(block->after);
  put_back(block->after);  // merges with the free neighbour
}

bool Segments::owns(Address address) const noexcept {
  const auto after = segments_.upper_bound(address);
  return after != segments_.begin() && address - std::prev(after)->first < std::prev(after)->second.size;
}

void Segments::free(Block* block) noexcept {
  blocks_.erase(block->address);
  block->free = true;
  block->fresh = false;
  put_back(block);
}

// Merge a free block that is in no list with the free neighbours of the same stream, and add the result to
// their lists.
void Segments::put_back(Block* block) noexcept {
  block->idle = paged(*block->segment) ? returnable(*block) : block->size;
  block->idle_since = epoch_;
  Block* const after = block->after;
  if (after != nullptr && after->free && after->stream == block->stream) {
    unshelve(after);
    block = merge(block, after);
  }
  Block* const before = block->before;
  if (before != nullptr && before->free && before->stream == block->stream) {
    unshelve(before);
    block = merge(before, block);
  }
  shelve(block);
  while ((idle_.bytes() > retained_limit_ || source_.exceeds(0)) && give_back_oldest()) {
  }
}

bool Segments::drop(Segment& segment) noexcept {
  if (!source_.release(segment.base, segment.size, segment.committed)) return false;
  unshelve(segment.first);
  delete_block(segment.first);
  segments_.erase(segment.base);
  return true;
}

// Merge all blocks of a segment without live blocks into one, across streams, after waiting for all of them,
// so that the segment can be released.
void Segments::gather(Segment& segment) noexcept {
  Block* const first = segment.first;
  for (const Block* block = first; block != nullptr; block = block->after) {
    if (!block->free) return;
  }
  if (first->after == nullptr || !source_.wait_for_users()) return;
  unshelve(first);
  while (first->after != nullptr) {
    unshelve(first->after);
    merge(first, first->after);
  }
  shelve(first);
}

std::size_t Segments::idle_of_others(Stream stream) const noexcept {
  const auto own = bins_.find(stream);
  return idle_.bytes() - (own == bins_.end() ? 0 : own->second.idle);
}

// Forget streams without a block: they may no longer exist, and their lists are large.
void Segments::forget_streams() noexcept {
  for (auto& [stream, bins] : bins_) bins.blocks = 0;
  for (const auto& [base, segment] : segments_) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) ++bins_.find(block->stream)->second.blocks;
  }
  for (auto it = bins_.begin(); it != bins_.end();) it = it->second.blocks == 0 ? bins_.erase(it) : std::next(it);
}

void Segments::forget_places(Owner owner) noexcept {
  for (const auto& [base, segment] : segments_) {
    for (Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->owner == owner) block->place = Block::kNoPlace;
    }
  }
}

void Segments::trim(std::uint64_t idle_before, std::size_t keep) noexcept {
  if (source_.held()) return;
  const bool everything = idle_before == ~std::uint64_t{0};
  for (auto it = segments_.begin(); everything && it != segments_.end();) {
    Segment& segment = (it++)->second;
    gather(segment);
    if (segment.first->free && is_whole(*segment.first)) drop(segment);
  }
  for (Block* block = idle_.first(); block != nullptr && (everything || idle_.bytes() > keep);) {
    Block* const next = block->idle_after;
    if (block->idle_since < idle_before && !give_back(block, ~std::size_t{0})) return;
    block = next;
  }
  if (everything) forget_streams();
}

bool Segments::give_back_oldest() noexcept {
  return idle_.bytes() != 0 && !source_.held() && give_back_one(idle_.first(), ~std::size_t{0});
}

bool Segments::give_back_one(Block* block, std::size_t least) noexcept {
  return !(for_replays_ && MEMPOOL_GUARDED("replays")) && give_back(block, least);
}

void Segments::give_free_blocks_to(Stream stream) {
  stream_bins(stream);
  for (auto& [base, segment] : segments_) {
    for (Block* block = segment.first; block != nullptr; block = block->after) {
      if (!block->free) continue;
      unshelve(block);
      while (block->after != nullptr && block->after->free) {
        unshelve(block->after);
        merge(block, block->after);
      }
      block->stream = stream;
      shelve(block);
    }
  }
  forget_streams();
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

std::size_t Segments::kept_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& [base, segment] : segments_) {
    std::size_t idle = 0;
    bool alive = false;
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->free) idle += block->idle;
      alive = alive || !block->free;
    }
    if (alive) bytes += segment.committed - std::min(segment.committed, idle);
  }
  return bytes;
}

std::size_t Segments::free_blocks() const noexcept {
  std::size_t count = 0;
  for (const auto& [base, segment] : segments_) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) count += block->free ? 1 : 0;
  }
  return count;
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
