// Size rules and blocks of PyTorch's caching allocator.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <set>

#include "simulators/allocator.hpp"

namespace simulators {

// Size rules of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h, 2.13).
struct PyTorchRules {
  static constexpr int64_t mib = 1 << 20;
  static constexpr int64_t least_block = 512;       // kMinBlockSize
  static constexpr int64_t small_size = mib;        // kSmallSize: largest request of the small pool
  static constexpr int64_t small_segment = 2 * mib;  // kSmallBuffer
  static constexpr int64_t least_large = 10 * mib;  // kMinLargeAlloc: smallest request with a segment of its own
  static constexpr int64_t large_unit = 2 * mib;    // kRoundLarge
  static constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();

  int64_t max_split = unlimited;             // blocks of at least this size are not split
  int64_t max_non_split_rounding = 20 * mib;  // such a block serves requests smaller by less than this
  int64_t large_segment = 20 * mib;
  double gc_threshold = 0;               // fraction of the limit
  std::array<int64_t, 16> divisions{};  // for requests from 1 MiB, 2 MiB ... 32 GiB on; the first also for smaller ones

  // Returns the least size of a block for a request.
  int64_t rounded(int64_t size) const {
    if (size < least_block) return least_block;
    const int64_t parts = divisions[std::clamp(log2_of(size) - 20, 0, 15)];
    if (parts > 0 && size > least_block * parts) return next_division(size, parts);
    return (size + least_block - 1) / least_block * least_block;
  }

  int64_t segment_for(int64_t size) const {
    if (size <= small_size) return small_segment;
    if (size < least_large) return large_segment;
    return (size + large_unit - 1) / large_unit * large_unit;
  }

 private:
  static int log2_of(int64_t size) { return 63 - __builtin_clzll(static_cast<unsigned long long>(size)); }

  // Rounds up to the next of `parts` equal steps between two powers of two. With one part, sizes stay as they are.
  static int64_t next_division(int64_t size, int64_t parts) {
    if (parts <= 1 || (size & (size - 1)) == 0) return size;
    const int64_t floor = int64_t{1} << log2_of(size), part = floor >> log2_of(parts);
    if (part == 0) return floor << 1;
    return (size + part - 1) / part * part;
  }
};

// Blocks of PyTorch's caching allocator: linked in their segment and, while free, ordered in a pool.
struct Block {
  int64_t address, size, stream;
  int64_t previous = -1, next = -1;  // neighbours in the segment, -1 at its ends
  int64_t segment = -1;              // index of the expandable segment, else -1
  int64_t since = 0;                 // number of searches of the pool when this block became free
  int64_t slack = 0;                 // bytes at the start that may belong to the block before
  bool small = false;                // true in the pool of small requests
  bool used = false, mapped = true;

  bool split() const { return previous >= 0 || next >= 0; }
};

// Search order of free blocks: by stream, then size, then address (BlockComparatorSize).
struct FreeBlock {
  int64_t stream, size, address, block;

  bool operator<(const FreeBlock& other) const {
    if (stream != other.stream) return stream < other.stream;
    if (size != other.size) return size < other.size;
    return address < other.address;
  }
};

struct BlockPool {
  std::set<FreeBlock> free;
  std::set<FreeBlock> unmapped;  // size 0 in the key: by address; unmapped parts of expandable segments
  int64_t searches = 0;          // counted only with garbage collection
  int64_t whole = 0;             // number of free blocks that are a whole segment
};

class Blocks {
 public:
  BlockPool& pool(bool small) { return pools_[small ? 0 : 1]; }
  BlockPool& pool(const Block& block) { return pool(block.small); }

  Block& operator[](int64_t at) { return blocks_[at]; }
  int64_t add(const Block& block) { return blocks_.add(block); }

  // Insert a block into its pool's order, and remove it.
  void file(int64_t at) {
    Block& block = blocks_[at];
    block.since = pool(block).searches;
    pool(block).whole += !block.split();
    order(block).insert(key(at));
  }
  void unfile(int64_t at) {
    pool(blocks_[at]).whole -= !blocks_[at].split();
    order(blocks_[at]).erase(key(at));
  }

  // Frees a block and merges free neighbours into it.
  void release(int64_t at) {
    blocks_[at].used = false;
    merge(at, blocks_[at].previous);
    merge(at, blocks_[at].next);
    file(at);
  }

  // Merges a neighbour into a block outside the pool's order, if the neighbour is free and equally mapped or unmapped.
  void merge(int64_t at, int64_t neighbour) {
    if (neighbour < 0 || blocks_[neighbour].used || blocks_[neighbour].mapped != blocks_[at].mapped) return;
    unfile(neighbour);
    const Block gone = blocks_[neighbour];
    Block& block = blocks_[at];
    block.size += gone.size;
    if (block.previous == neighbour) {
      block.address = gone.address;
      block.slack = gone.slack;
      block.previous = gone.previous;
      if (gone.previous >= 0) blocks_[gone.previous].next = at;
    } else {
      block.next = gone.next;
      if (gone.next >= 0) blocks_[gone.next].previous = at;
    }
    blocks_.remove(neighbour);
  }

  // Splits a block outside the pool's order after `size` bytes; returns the upper part, which is outside as well.
  int64_t cut(int64_t at, int64_t size) {
    Block upper = blocks_[at];
    upper.address += size;
    upper.size -= size;
    upper.previous = at;
    upper.used = false;
    upper.slack = 0;
    const int64_t made = blocks_.add(upper);
    Block& lower = blocks_[at];
    lower.size = size;
    lower.next = made;
    if (upper.next >= 0) blocks_[upper.next].previous = made;
    return made;
  }

  // Gives the first bytes of a free block to the block before, which is in use.
  void yield(int64_t at, int64_t bytes) {
    unfile(at);
    Block& block = blocks_[at];
    blocks_[block.previous].size += bytes;
    block.address += bytes;
    block.size -= bytes;
    block.slack -= bytes;
    file(at);
  }

  // Removes a block that is outside the pool's order and has no neighbours.
  void forget(int64_t at) { blocks_.remove(at); }

 private:
  std::set<FreeBlock>& order(const Block& block) {
    return block.mapped ? pool(block).free : pool(block).unmapped;
  }
  FreeBlock key(int64_t at) const {
    const Block& block = blocks_[at];
    return {block.stream, block.mapped ? block.size : 0, block.address, at};
  }

  Slots<Block> blocks_;
  BlockPool pools_[2];  // of small requests, of large ones
};

}  // namespace simulators
