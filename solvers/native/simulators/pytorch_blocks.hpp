// Blocks of PyTorch's caching allocator: they lie in a row in their segment and, while they are free, in a pool's order.
#pragma once

#include <cstdint>
#include <set>

#include "slots.hpp"

namespace simulators {

struct Block {
  int64_t address, size, stream;
  int64_t previous = -1, next = -1;  // neighbours in the segment, -1 at its ends
  int64_t segment = -1;              // of expandable ones, which
  int64_t since = 0;                 // how often its pool had been searched when it became free
  int64_t slack = 0;                 // so many bytes at its beginning may be those of the block before it
  bool small = false;                // of which pool
  bool used = false, mapped = true;

  bool split() const { return previous >= 0 || next >= 0; }
};

// The order in which blocks are looked for: of the stream, the smallest, of the lowest address (BlockComparatorSize).
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
  std::set<FreeBlock> unmapped;  // of size 0 here: by address; parts of expandable segments that have no memory
  int64_t searches = 0;          // counted while garbage is collected
  int64_t whole = 0;             // how many of the free ones are a segment by themselves
};

class Blocks {
 public:
  BlockPool& pool(bool small) { return pools_[small ? 0 : 1]; }
  BlockPool& pool(const Block& block) { return pool(block.small); }

  Block& operator[](int64_t at) { return blocks_[at]; }
  int64_t add(const Block& block) { return blocks_.add(block); }

  // Into its pool's order, and out of it.
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

  // A block is freed: it takes in neighbours that are free.
  void release(int64_t at) {
    blocks_[at].used = false;
    merge(at, blocks_[at].previous);
    merge(at, blocks_[at].next);
    file(at);
  }

  // Takes a neighbour into a block that is in no order, if it is free and has memory or has none like the block.
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

  // Cuts a block that is in no order after so many bytes; the upper part, which is in none either.
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

  // The beginning of a free block goes to the one before it, which is used.
  void yield(int64_t at, int64_t bytes) {
    unfile(at);
    Block& block = blocks_[at];
    blocks_[block.previous].size += bytes;
    block.address += bytes;
    block.size -= bytes;
    block.slack -= bytes;
    file(at);
  }

  // A block that is in no order is no more, nor are its neighbours.
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
