// RMM's arena resource: a global arena of superblocks, some of which belong to streams for their small requests.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "simulators/allocator.hpp"
#include "simulators/holes.hpp"

namespace simulators {

class RmmArena final : public Allocator {
 public:
  static constexpr int64_t unit = 256;                          // bytes; all sizes are multiples of it
  static constexpr int64_t least_superblock = int64_t{1} << 20;  // bytes; the global arena serves larger requests

  // Reserves `bytes` at once and never more; if that fails, no request can be served.
  RmmArena(Device& device, int64_t bytes) : Allocator(device), arenas_(1, Holes(false)) {
    const int64_t address = bytes < least_superblock ? -1 : device.reserve(bytes, 0);
    broken_ = address < 0;
    if (!broken_) list(make(address, bytes));
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    if (broken_) return fail();
    size = rounded(size, unit);
    int64_t address = allocate_from(arena_of(stream), size);
    if (address < 0 && return_superblocks()) address = allocate_from(arena_of(stream), size);
    if (address < 0) return fail();
    live_ += size;
    return {address, used_.add({address, size})};
  }

  // Returns the block to its superblock, whoever owns that now and whatever stream frees the block.
  void free(int64_t handle, int64_t) override {
    const Block block = used_[handle];
    used_.remove(handle);
    live_ -= block.size;
    auto at = std::prev(superblocks_.upper_bound(block.address));
    at->second.free.add(block.address, block.size);
    if (at->second.arena == global && at->second.is_empty()) at = merged(at);
    list(at);
  }

 private:
  static constexpr size_t global = 0;
  struct Block {
    int64_t address, size;
  };
  struct Superblock {
    int64_t size = 0;
    size_t arena = global;
    int64_t listed = 0;  // largest free block, as recorded in the arena
    Holes free{false};
    bool is_empty() const { return free.largest() == size; }
  };
  using Superblocks = std::map<int64_t, Superblock>;

  size_t arena_of(int64_t stream) {
    const auto [found, is_new] = arena_of_.try_emplace(stream, arenas_.size());
    if (is_new) arenas_.emplace_back(false);
    return found->second;
  }

  Superblocks::iterator make(int64_t address, int64_t size) {
    const auto at = superblocks_.try_emplace(address).first;
    at->second.size = size;
    at->second.free.add(address, size);
    return at;
  }

  // Records the superblock's largest free block in its arena.
  void list(Superblocks::iterator at) {
    Superblock& superblock = at->second;
    const int64_t largest = superblock.free.largest();
    if (largest == superblock.listed) return;
    unlist(at);
    if (largest > 0) arenas_[superblock.arena].add_apart(at->first, largest);
    superblock.listed = largest;
  }

  void unlist(Superblocks::iterator at) {
    Superblock& superblock = at->second;
    if (superblock.listed > 0) arenas_[superblock.arena].take(at->first, superblock.listed);
    superblock.listed = 0;
  }

  void move_to(size_t arena, Superblocks::iterator at) {
    unlist(at);
    if (arena == global) streams_.erase(at->first);
    else streams_.insert(at->first);
    at->second.arena = arena;
  }

  // First fit: the lowest superblock with room, and its lowest fitting block; -1 if none exists.
  int64_t allocate_from(size_t arena, int64_t size) {
    const bool is_large = size > least_superblock;
    int64_t superblock = arenas_[is_large ? global : arena].lowest(size);
    if (superblock < 0 || is_large) superblock = first_of_global(size);
    if (superblock < 0) return -1;
    const auto at = superblocks_.find(superblock);
    if (!is_large && at->second.arena == global) move_to(arena, at);
    const int64_t address = at->second.free.lowest(size);
    at->second.free.take(address, size);
    list(at);
    return address;
  }

  // Finds the lowest superblock of the global arena with room, split if empty and large; -1 if none exists.
  int64_t first_of_global(int64_t size) {
    const int64_t address = arenas_[global].lowest(size);
    if (address < 0) return -1;
    const auto at = superblocks_.find(address);
    const int64_t kept = std::max(size, least_superblock);
    if (!at->second.is_empty() || at->second.size < kept + least_superblock) return address;
    list(make(address + kept, at->second.size - kept));
    at->second.free.take(address + kept, at->second.size - kept);
    at->second.size = kept;
    list(at);
    return address;
  }

  // Merges an empty superblock of the global arena with empty neighbours there.
  Superblocks::iterator merged(Superblocks::iterator at) {
    if (const auto above = std::next(at); above != superblocks_.end() && joins(at, above)) join(at, above);
    if (at == superblocks_.begin() || !joins(std::prev(at), at)) return at;
    const auto below = std::prev(at);
    join(below, at);
    return below;
  }

  static bool joins(Superblocks::iterator below, Superblocks::iterator above) {
    const Superblock &one = below->second, &other = above->second;
    return one.arena == global && other.arena == global && one.is_empty() && other.is_empty();
  }

  void join(Superblocks::iterator below, Superblocks::iterator above) {
    unlist(above);
    below->second.free.add(above->first, above->second.size);
    below->second.size += above->second.size;
    superblocks_.erase(above);
  }

  // Returns the superblocks of all streams to the global arena; false if there are none.
  bool return_superblocks() {
    const bool any = !streams_.empty();
    while (!streams_.empty()) {
      auto at = superblocks_.find(*streams_.begin());
      move_to(global, at);
      if (at->second.is_empty()) at = merged(at);
      list(at);
    }
    return any;
  }

  Superblocks superblocks_;  // by address; cover the whole arena
  std::set<int64_t> streams_;  // addresses of the superblocks owned by streams
  std::vector<Holes> arenas_;  // per arena, by superblock address: a hole as large as its largest free block
  std::unordered_map<int64_t, size_t> arena_of_;  // by stream
  Slots<Block> used_;
  bool broken_;
};

}  // namespace simulators
