// PyTorch's caching allocator: blocks of segments, a pool for small and one for large requests, separate per stream.
#pragma once

#include <vector>

#include "simulators/allocator.hpp"
#include "simulators/pytorch_blocks.hpp"

namespace simulators {

class PyTorch : public Allocator {
 public:
  PyTorch(Device& device, const PyTorchRules& rules) : Allocator(device), rules_(rules) {}

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    size = rules_.rounded(size);
    int64_t at = find(size, stream);
    if (at < 0) at = obtain_or_release(size, stream);
    if (at < 0) return fail();
    if (splits(blocks_[at], size)) blocks_.file(blocks_.cut(at, size));
    Block& block = blocks_[at];
    block.used = true;
    block.slack = 0;
    live_ += block.size;
    return {block.address, at};
  }

  void free(int64_t handle, int64_t) override {
    live_ -= blocks_[handle].size;
    blocks_.release(handle);
  }

  void give_back(int64_t address, int64_t size, int64_t stream) override {
    const auto& free = blocks_.pool(size <= rules_.small_segment).free;
    const auto at = free.find({stream, size, address, 0});
    if (at != free.end() && !blocks_[at->block].split()) release(at->block);
  }

  // A free block that fits but was not taken in the recording must be smaller than the request, if its slack permits.
  void expect(int64_t size, int64_t stream, int64_t address) override {
    if (!open_ || size == 0) return;
    size = rules_.rounded(size);
    const auto& free = pool_for(size).free;
    for (auto at = free.lower_bound({stream, size, 0, 0}); at != free.end() && at->stream == stream;
         at = free.lower_bound({stream, size, 0, 0})) {
      const int64_t excess = at->size - size + rules_.least_block;
      if (at->address == address || excess > blocks_[at->block].slack) return;
      const int64_t owner = blocks_[at->block].previous;
      blocks_.yield(at->block, excess);
      live_ += excess;
      learned_.emplace_back(owner, blocks_[owner].address + blocks_[owner].size);
    }
  }

  // Handles of adopted blocks with the ends inferred by expect(); of several entries for a handle the last one counts.
  const std::vector<std::pair<int64_t, int64_t>>& learned() const { return learned_; }

  // Adopts a segment from before the first event, with the blocks of the buffers in it, by address; returns their
  // handles. The slack of a block is the number of bytes by which it may extend into the free block behind.
  std::vector<int64_t> adopt(const Segment& segment, const std::vector<Block>& used) {
    device_.adopt(segment.address, segment.size, segment.stream);
    std::vector<int64_t> handles;
    int64_t rest = blocks_.add(block_of(segment));
    for (const Block& block : used) {
      if (block.address > blocks_[rest].address) {
        const int64_t hole = rest;
        rest = blocks_.cut(hole, block.address - blocks_[hole].address);
        blocks_.file(hole);
      }
      handles.push_back(rest);
      blocks_[rest].used = true;
      live_ += block.size;
      rest = block.size < blocks_[rest].size ? blocks_.cut(rest, block.size) : -1;
      if (rest >= 0) blocks_[rest].slack = block.slack;
      open_ = open_ || block.slack > 0;
    }
    if (rest >= 0) blocks_.file(rest);
    return handles;
  }

 protected:
  // Removes the best-fitting free block from its pool; -1 if none exists.
  virtual int64_t find(int64_t size, int64_t stream) {
    BlockPool& pool = pool_for(size);
    if (collects()) ++pool.searches;
    const auto at = pool.free.lower_bound({stream, size, 0, 0});
    return at == pool.free.end() || at->stream != stream ? -1 : take(at->block, size);
  }

  // Reserves a block from the device, in no pool; -1 beyond the limit.
  virtual int64_t obtain(int64_t size, int64_t stream) {
    const int64_t bytes = rules_.segment_for(size);
    const int64_t address = device_.reserve(bytes, stream);
    if (address < 0) return -1;
    Block block{address, bytes, stream};
    block.small = size <= rules_.small_size;
    return blocks_.add(block);
  }

  virtual bool splits(const Block& block, int64_t size) const {
    const int64_t rest = block.size - size;
    if (block.small) return rest >= rules_.least_block;
    return size < rules_.max_split && rest > rules_.small_size;
  }

  // Releases all entirely free segments.
  virtual void release_cached() {
    for (const bool small : {false, true})
      for (const int64_t at : whole(blocks_.pool(small))) release(at);
  }

  // Releases large blocks of the stream, one or several until they cover the request; true if they do.
  virtual bool release_available(int64_t size, int64_t stream) {
    if (rules_.max_split == rules_.unlimited) return false;
    const auto& free = pool_for(size).free;
    const int64_t need = std::max(size, rules_.max_split);
    auto at = free.lower_bound({stream, need, 0, 0});
    if (at != free.end() && at->stream == stream && !blocks_[at->block].split()) {
      release(at->block);
      return true;
    }
    int64_t released = 0;
    while (released < need && at != free.begin()) {
      const FreeBlock largest = *std::prev(at);
      if (largest.size < rules_.max_split || largest.stream != stream || blocks_[largest.block].split()) break;
      released += largest.size;
      release(largest.block);
    }
    return released >= need;
  }

  // Releases free segments unused for long, if more bytes are held than the threshold allows.
  virtual void collect() {
    const auto allowed = static_cast<int64_t>(rules_.gc_threshold * static_cast<double>(device_.limit()));
    int64_t excess = device_.reserved() - allowed;
    BlockPool& pool = blocks_.pool(false);
    std::vector<int64_t> left = excess > 0 ? whole(pool) : std::vector<int64_t>{};
    const auto age = [&](int64_t at) { return pool.searches - blocks_[at].since; };
    int64_t ages = 0;
    for (const int64_t at : left) ages += age(at);
    while (excess > 0 && !left.empty()) {
      const double old = static_cast<double>(ages) / static_cast<double>(left.size());
      std::vector<int64_t> young;
      for (const int64_t at : left) {
        if (static_cast<double>(age(at)) < old) {
          young.push_back(at);
          continue;
        }
        excess -= blocks_[at].size;
        ages -= age(at);
        release(at);
      }
      left.swap(young);
    }
  }

  BlockPool& pool_for(int64_t size) { return blocks_.pool(size <= rules_.small_size); }
  bool collects() const { return rules_.gc_threshold > 0 && device_.limit() < Device::most_bytes; }

  // Removes a found block from its pool, unless the block is too large for requests that must not split; -1 then.
  int64_t take(int64_t at, int64_t size) {
    const int64_t has = blocks_[at].size;
    if (size < rules_.max_split ? has >= rules_.max_split : has >= size + rules_.max_non_split_rounding) return -1;
    blocks_.unfile(at);
    return at;
  }

  PyTorchRules rules_;
  Blocks blocks_;
  std::vector<std::pair<int64_t, int64_t>> learned_;
  bool open_ = false;  // true if any block ever had slack

 private:
  int64_t obtain_or_release(int64_t size, int64_t stream) {
    if (collects()) collect();
    int64_t at = obtain(size, stream);
    if (at < 0 && release_available(size, stream)) at = obtain(size, stream);
    if (at >= 0) return at;
    release_cached();
    return obtain(size, stream);
  }

  std::vector<int64_t> whole(const BlockPool& pool) {
    std::vector<int64_t> found;
    if (pool.whole == 0) return found;  // the case of most requests when memory is short
    for (const FreeBlock& free : pool.free)
      if (!blocks_[free.block].split()) found.push_back(free.block);
    return found;
  }

  void release(int64_t at) {
    blocks_.unfile(at);
    device_.release(blocks_[at].address);
    blocks_.forget(at);
  }

  Block block_of(const Segment& segment) const {
    Block block{segment.address, segment.size, segment.stream};
    block.small = segment.size <= rules_.small_segment;
    return block;
  }
};

}  // namespace simulators
