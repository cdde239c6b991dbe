// Blocks of PyTorch's caching allocator: linked in their segment and, while free, ordered in a pool.
#pragma once

#include <cstdint>
#include <set>

#include "simulators/slots.hpp"

namespace simulators {

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
