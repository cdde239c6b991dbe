// CuPy's pool: linked blocks that merge with free neighbours at once.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "simulators/allocator.hpp"

namespace simulators {

// Blocks of segments, linked to their neighbours; and an index of free blocks by size. The size and the neighbours of a
// block must not change while the block is free.
//
// The number of a block stays valid until the block is merged into the one below.
class Chain {
 public:
  struct Block {
    int64_t address, size, stream;
    int64_t below = -1, above = -1;  // neighbours in the same segment; -1 at its ends
    bool free = false;
    bool is_whole() const { return below < 0 && above < 0; }  // true if the block is the whole segment
  };

  // Adds a segment as one block.
  int64_t add(int64_t address, int64_t size, int64_t stream) { return blocks_.add({address, size, stream}); }
  void remove(int64_t at) { blocks_.remove(at); }

  // Splits a block: the block keeps its first `size` bytes, the new block above has the rest.
  int64_t split(int64_t at, int64_t size) {
    Block rest = blocks_[at];
    rest.address += size, rest.size -= size, rest.below = at, rest.free = false;
    const int64_t made = blocks_.add(rest);
    if (rest.above >= 0) blocks_[rest.above].below = made;
    blocks_[at].size = size, blocks_[at].above = made;
    return made;
  }

  // Merges the block above into this block.
  void merge(int64_t at) {
    const int64_t gone = blocks_[at].above;
    blocks_[at].size += blocks_[gone].size;
    blocks_[at].above = blocks_[gone].above;
    if (blocks_[at].above >= 0) blocks_[blocks_[at].above].below = at;
    blocks_.remove(gone);
  }

  void set_free(int64_t at, bool free) {
    blocks_[at].free = free;
    if (!blocks_[at].is_whole()) return;
    if (free) whole_.insert(at);
    else whole_.erase(at);
  }

  // Returns the numbers of the free blocks that are whole segments.
  std::vector<int64_t> whole() const { return {whole_.begin(), whole_.end()}; }

  // The reference is valid until the next add() or split().
  Block& operator[](int64_t at) { return blocks_[at]; }

 private:
  Slots<Block> blocks_;
  std::set<int64_t> whole_;
};

// Index of free blocks, ordered by size, then by address.
class BySize {
 public:
  void add(Chain& chain, int64_t at) {
    chain.set_free(at, true);
    order_.insert({chain[at].size, chain[at].address, at});
  }

  void remove(Chain& chain, int64_t at) {
    chain.set_free(at, false);
    order_.erase({chain[at].size, chain[at].address, at});
  }

  // Returns the smallest block of at least `size` bytes, the lowest of equal ones; -1 if none exists.
  int64_t smallest(int64_t size) const {
    const auto found = order_.lower_bound({size, 0, 0});
    return found == order_.end() ? -1 : found->at;
  }

 private:
  struct Free {
    int64_t size, address, at;
    bool operator<(const Free& other) const {
      return size != other.size ? size < other.size : address < other.address;
    }
  };
  std::set<Free> order_;
};

// CuPy's pool: best fit among free blocks of the same stream, with splitting and merging.
class Cupy final : public Allocator {
 public:
  static constexpr int64_t unit = 512;  // bytes; all sizes are multiples of it

  explicit Cupy(Device& device) : Allocator(device) {}

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    size = rounded(size, unit);
    BySize& free = free_[stream];
    int64_t at = free.smallest(size);
    if (at >= 0) {
      free.remove(blocks_, at);
      if (blocks_[at].size > size) free.add(blocks_, blocks_.split(at, size));
    } else if ((at = take_segment(size, stream)) < 0) {
      return fail();
    }
    live_ += size;
    return {blocks_[at].address, at};
  }

  // Returns the block to its original free list, whatever stream frees it.
  void free(int64_t at, int64_t) override {
    live_ -= blocks_[at].size;
    BySize& free = free_[blocks_[at].stream];
    const int64_t above = blocks_[at].above, below = blocks_[at].below;
    if (above >= 0 && blocks_[above].free) free.remove(blocks_, above), blocks_.merge(at);
    if (below >= 0 && blocks_[below].free) free.remove(blocks_, below), blocks_.merge(at = below);
    free.add(blocks_, at);
  }

 private:
  int64_t take_segment(int64_t size, int64_t stream) {
    int64_t address = device_.reserve(size, stream);
    if (address < 0) {
      give_back();
      address = device_.reserve(size, stream);
    }
    return address < 0 ? -1 : blocks_.add(address, size, stream);
  }

  void give_back() {
    for (const int64_t at : blocks_.whole()) {
      free_[blocks_[at].stream].remove(blocks_, at);
      device_.release(blocks_[at].address);
      blocks_.remove(at);
    }
  }

  Chain blocks_;
  std::unordered_map<int64_t, BySize> free_;  // by stream
};

}  // namespace simulators
