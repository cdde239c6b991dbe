// The dynamic fallback: best fit with coalescing on segments taken from the device.
//
// A request of at least `traits.large` bytes gets a segment of its own, so that what stays for good never holds the
// memory of temporaries; smaller ones share segments, whose pages are committed when first used and can be returned one
// by one. Free blocks belong to the stream they were freed on and serve only that stream, because host order is not
// device order; `give_free_blocks_to` (after the device has been synchronised) lifts that.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "address_map.hpp"
#include "memory_source.hpp"

namespace mempool {

struct Segment;

struct Block {
  Address address = 0;
  std::size_t size = 0;       // bytes, a multiple of the device's alignment
  std::size_t requested = 0;  // bytes asked for; meaningful while in use
  Segment* segment = nullptr;
  Block* before = nullptr;    // neighbours in address order within the segment
  Block* after = nullptr;
  Block* bin_before = nullptr;  // neighbours in the free list
  Block* bin_after = nullptr;
  Stream stream = 0;
  std::uint64_t idle_since = 0;  // the epoch in which it, or a neighbour that joined it, was freed
  bool free = false;
  bool fresh = false;  // never used since its pages were committed: reads as zeros where the device says so
};

struct Segment {
  Address base = 0;
  std::size_t size = 0;
  bool large = false;
  std::uint64_t idle_since = 0;       // the epoch in which its last block was freed
  std::vector<std::uint64_t> pages;   // shared segments: a bit for each committed page
  std::size_t committed = 0;          // bytes
  Block* first = nullptr;             // the block at `base`
};

// Free blocks by size: 8 bins for each power of two, smallest sufficient block first.
class FreeBins {
 public:
  void add(Block* block) noexcept;
  void remove(Block* block) noexcept;
  // The smallest sufficient block, the lowest of equals; in a crowded bin, of the first few.
  Block* best_fit(std::size_t bytes) const noexcept;

 private:
  Block* best_of(unsigned bin, std::size_t bytes, unsigned most) const noexcept;
  static unsigned bin_of(std::size_t bytes) noexcept;
  static constexpr unsigned kBins = 64 * 8;
  std::array<Block*, kBins> heads_{};
  std::array<std::uint64_t, kBins / 64> nonempty_{};
};

class Segments {
 public:
  explicit Segments(MemorySource& source) : source_(source) {}
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  enum class Effort {
    reuse,       // free blocks only
    normal,      // then the device
    last_resort  // the same, however badly a free block fits
  };
  // A block for `bytes`, or null: out of memory. May throw std::bad_alloc.
  Block* allocate(std::size_t bytes, Stream stream, Effort effort = Effort::normal);
  Block* find(Address address) const noexcept { return blocks_.find(address); }
  bool owns(Address address) const noexcept;  // whether it lies in a segment
  // The block is over; `stream` is where its last use was queued. False: the stream has never allocated here and no
  // list could be made for it, so that the block stays with its own stream, which has to wait.
  bool free(Block* block, Stream stream) noexcept;

  void set_retained_limit(std::size_t bytes) noexcept { retained_limit_ = bytes; }
  // Gives back free segments, and free pages of shared ones. `idle_before`: only what is idle since an earlier epoch;
  // pages then not in every epoch, for that takes a look at all blocks.
  void trim(std::uint64_t idle_before = ~std::uint64_t{0}) noexcept;
  void next_epoch() noexcept { ++epoch_; }
  std::uint64_t epoch() const noexcept { return epoch_; }
  void give_free_blocks_to(Stream stream);  // only after Device::synchronize()

  std::size_t retained() const noexcept { return retained_; }  // bytes in segments in which nothing lives
  std::size_t segments() const noexcept { return segments_.size(); }
  std::size_t blocks() const noexcept { return blocks_.size(); }  // live ones
  // Free bytes that are committed, and the largest free block: what fragmentation strands.
  std::size_t free_bytes() const noexcept;
  std::size_t largest_free() const noexcept;

 private:
  struct Bins {
    FreeBins shared, large;
  };
  FreeBins& bins_of(const Block* block) noexcept;
  Bins& stream_bins(Stream stream);
  Block* reuse(std::size_t bytes, bool large, Stream stream, Effort effort) const noexcept;
  Block* take_segment(std::size_t bytes, bool large, Stream stream);
  bool commit_pages(Segment* segment, Address address, std::size_t bytes) noexcept;
  void return_pages(Block* block) noexcept;
  void split(Block* block, std::size_t bytes);
  Block* merge(Block* left, Block* right) noexcept;
  void put_back(Block* block) noexcept;
  void gather(Segment& segment) noexcept;
  void drop(Segment& segment) noexcept;
  Block* new_block();
  void delete_block(Block* block) noexcept;

  MemorySource& source_;
  std::map<Address, Segment> segments_;  // by base
  AddressMap<Block> blocks_;
  std::map<Stream, Bins> bins_;
  std::deque<Block> storage_;
  std::vector<Block*> spare_;  // always has room for every block of storage_, so that freeing never allocates
  std::size_t retained_ = 0;
  std::size_t retained_limit_ = 0;
  std::uint64_t epoch_ = 1;
  std::uint64_t sweep_at_ = 1;  // the epoch in which idle pages go back next
};

}  // namespace mempool
