// PyTorch's caching allocator with expandable segments: more addresses than device memory, mapped page by page.
#pragma once

#include "simulators/pytorch.hpp"

namespace simulators {

class PyTorchExpandable : public PyTorch {
 public:
  // Bytes of addresses of a segment on a device without a limit.
  static constexpr int64_t unlimited_bytes = int64_t{1} << 50;

  using PyTorch::PyTorch;

  void give_back(int64_t, int64_t, int64_t) override {}

 protected:
  // A block at the end of the mapped part counts as large as it can grow.
  int64_t find(int64_t size, int64_t stream) override {
    const auto& free = pool_for(size).free;
    auto at = free.lower_bound({stream, size, 0, 0});
    if (at == free.end() || at->stream != stream) return -1;
    for (auto next = std::next(at); next != free.end() && next->stream == stream; ++next) {
      if (room(next->block) >= room(at->block)) break;
      at = next;
    }
    return take(at->block, size);
  }

  int64_t obtain(int64_t size, int64_t stream) override {
    const bool small = size <= rules_.small_size;
    int64_t at = candidate(size, stream, small);
    if (at < 0) at = new_segment(stream, small);
    if (at < 0 || space_from(at, size) < size) return -1;
    if (!blocks_[at].mapped && !map(at, std::min(size, blocks_[at].size))) return -1;
    while (blocks_[at].size < size) {
      const int64_t next = blocks_[at].next;
      if (!map(next, std::min(size - blocks_[at].size, blocks_[next].size))) return -1;
      at = next;  // which has absorbed the free block before
    }
    blocks_.unfile(at);
    return at;
  }

  bool splits(const Block& block, int64_t size) const override { return block.size - size >= rules_.least_block; }

  // Releases all whole pages without live blocks, and segments without any page.
  void release_cached() override {
    for (const bool small : {false, true})
      for (const int64_t at : at_least(small ? rules_.small_segment : rules_.large_segment, blocks_.pool(small).free))
        if (unmap(at) && !blocks_[at].split()) forget(at);
  }

  // Neither release_available() nor the collector applies to expandable segments.
  bool release_available(int64_t, int64_t) override { return false; }
  void collect() override {}

 private:
  struct Range {
    int64_t address, size, region;
  };

  int64_t page(const Block& block) const { return block.small ? rules_.small_segment : rules_.large_segment; }
  int64_t paged(int64_t size, int64_t unit) const { return (size + unit - 1) / unit * unit; }

  int64_t room(int64_t at) {
    const int64_t next = blocks_[at].next;
    return blocks_[at].size + (next >= 0 && !blocks_[next].mapped ? blocks_[next].size : 0);
  }

  // Returns the free blocks of at least `size` bytes without visiting smaller ones, which are many when memory is
  // short.
  static std::vector<int64_t> at_least(int64_t size, const std::set<FreeBlock>& free) {
    std::vector<int64_t> found;
    for (auto at = free.begin(); at != free.end();) {
      const int64_t stream = at->stream;
      for (at = free.lower_bound({stream, size, 0, 0}); at != free.end() && at->stream == stream; ++at)
        found.push_back(at->block);
    }
    return found;
  }

  // Returns the bytes of successive free and unmapped blocks, counted up to at least `size`.
  int64_t space_from(int64_t at, int64_t size) {
    int64_t bytes = 0;
    for (; at >= 0 && bytes < size && !blocks_[at].used; at = blocks_[at].next) bytes += blocks_[at].size;
    return bytes;
  }

  // Returns the lowest block that starts enough free or unmapped bytes; -1 if none exists.
  int64_t candidate(int64_t size, int64_t stream, bool small) {
    const auto& unmapped = blocks_.pool(small).unmapped;
    for (auto at = unmapped.lower_bound({stream, 0, 0, 0}); at != unmapped.end() && at->stream == stream; ++at) {
      const int64_t before = blocks_[at->block].previous;
      const int64_t from = before >= 0 && !blocks_[before].used ? before : at->block;
      if (space_from(from, size) >= size) return from;
    }
    return -1;
  }

  // Reserves addresses for nine eighths of the device, so that pages can move within; -1 if none are left.
  int64_t new_segment(int64_t stream, bool small) {
    Block block{0, 0, stream};
    block.small = small;
    block.mapped = false;
    const int64_t has = std::min(device_.limit(), unlimited_bytes);
    block.size = paged(has + has / 8, page(block));
    if (block.size == 0 || (block.address = device_.reserve_addresses(block.size)) < 0) return -1;
    block.segment = segments_.add({block.address, block.size, device_.new_region()});
    const int64_t at = blocks_.add(block);
    blocks_.file(at);
    return at;
  }

  void forget(int64_t at) {
    const int64_t segment = blocks_[at].segment;
    device_.release_addresses(segments_[segment].address, segments_[segment].size);
    segments_.remove(segment);
    blocks_.unfile(at);
    blocks_.forget(at);
  }

  // Maps pages for the first `size` bytes of an unmapped block; beyond the limit returns false and maps nothing.
  bool map(int64_t at, int64_t size) {
    const Block block = blocks_[at];
    const int64_t bytes = paged(size, page(block)), pages = bytes / page(block);
    if (!device_.map(block.address, bytes, block.stream, segments_[block.segment].region, pages)) return false;
    blocks_.unfile(at);
    if (bytes < block.size) blocks_.file(blocks_.cut(at, bytes));
    blocks_[at].mapped = true;
    blocks_.merge(at, blocks_[at].previous);
    blocks_.merge(at, blocks_[at].next);
    blocks_.file(at);
    return true;
  }

  // Unmaps the whole pages of a free block; false if it has none.
  bool unmap(int64_t at) {
    const Block block = blocks_[at];
    const int64_t unit = page(block), base = segments_[block.segment].address;
    const int64_t begin = base + paged(block.address - base, unit);
    const int64_t end = base + (block.address + block.size - base) / unit * unit;
    if (begin >= end) return false;
    device_.unmap(begin, end - begin, (end - begin) / unit);
    blocks_.unfile(at);
    if (end < block.address + block.size) blocks_.file(blocks_.cut(at, end - block.address));
    int64_t middle = at;
    if (begin > block.address) {
      middle = blocks_.cut(at, begin - block.address);
      blocks_.file(at);
    }
    blocks_[middle].mapped = false;
    blocks_.merge(middle, blocks_[middle].previous);
    blocks_.merge(middle, blocks_[middle].next);
    blocks_.file(middle);
    return middle == at;
  }

  Slots<Range> segments_;
};

}  // namespace simulators
