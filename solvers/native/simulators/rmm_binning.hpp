// RMM's binning resource over its pool: blocks of few sizes, taken many at once from the pool; larger ones directly.
#pragma once

#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "simulators/rmm_pool.hpp"

namespace simulators {

// RMM's fixed-size resource: a queue of free blocks for each stream.
class RmmBin {
 public:
  RmmBin(Allocator& upstream, int64_t block, int64_t blocks) : upstream_(upstream), block_(block), blocks_(blocks) {}

  int64_t block_bytes() const { return block_; }

  // Returns an address, or -1 if no block is free and upstream has none.
  int64_t allocate(int64_t stream) {
    if (free_.empty() && !expand(stream)) return -1;
    const auto mine = free_.find(number_of(stream));
    return first_of(mine == free_.end() ? free_.begin() : mine);
  }

  void free(int64_t address, int64_t stream) { free_[number_of(stream)].push_back(address); }

  bool expand(int64_t stream) {
    const Placed chunk = upstream_.allocate(block_ * blocks_, stream);
    if (chunk.handle < 0) return false;
    auto& queue = free_[number_of(stream)];
    for (int64_t i = 0; i < blocks_; ++i) queue.push_back(chunk.address + i * block_);
    return true;
  }

 private:
  using Queues = std::map<size_t, std::deque<int64_t>>;

  int64_t first_of(Queues::iterator queue) {
    const int64_t address = queue->second.front();
    queue->second.pop_front();
    if (queue->second.empty()) free_.erase(queue);
    return address;
  }

  // Returns the number of a stream, in order of first appearance.
  size_t number_of(int64_t stream) { return numbers_.try_emplace(stream, numbers_.size()).first->second; }

  Allocator& upstream_;
  int64_t block_, blocks_;
  Queues free_;  // addresses, by stream number; no queue is empty
  std::unordered_map<int64_t, size_t> numbers_;  // by stream
};

class RmmBinning final : public Allocator {
 public:
  // Bins of 2^least to 2^most bytes, each of which takes `blocks` blocks at a time, first in the constructor; if that
  // fails, no request can be served.
  RmmBinning(Device& device, int least, int most, int64_t blocks, int64_t initial, int64_t maximum)
      : Allocator(device), pool_(device, initial, maximum), broken_(pool_.broken()) {
    bins_.reserve(static_cast<size_t>(std::max(most - least + 1, 0)));
    for (int exponent = least; exponent <= most; ++exponent) {
      bins_.emplace_back(pool_, int64_t{1} << exponent, blocks);
      broken_ = broken_ || !bins_.back().expand(0);
    }
  }

  Placed allocate(int64_t size, int64_t stream) override {
    if (size == 0) return none();
    if (broken_) return fail();
    for (RmmBin& bin : bins_)
      if (size <= bin.block_bytes()) {
        const int64_t address = bin.allocate(stream);
        if (address < 0) return fail();
        live_ += bin.block_bytes();
        return {address, used_.add({&bin, address, bin.block_bytes()})};
      }
    const Placed placed = pool_.allocate(size, stream);
    if (placed.handle < 0) return placed;
    live_ += rounded(size, RmmPool::unit);
    return {placed.address, used_.add({nullptr, placed.handle, rounded(size, RmmPool::unit)})};
  }

  void free(int64_t handle, int64_t stream) override {
    const Used used = used_[handle];
    used_.remove(handle);
    live_ -= used.size;
    if (used.bin != nullptr) used.bin->free(used.what, stream);
    else pool_.free(used.what, stream);
  }

 private:
  struct Used {
    RmmBin* bin;   // null: the pool's
    int64_t what;  // an address of the bin, or the pool's handle
    int64_t size;
  };

  RmmPool pool_;
  std::vector<RmmBin> bins_;  // in order of size
  Slots<Used> used_;
  bool broken_;
};

}  // namespace simulators
