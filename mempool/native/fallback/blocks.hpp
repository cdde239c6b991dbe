// The parts of segments, and the lists of free blocks.
#pragma once

#include <array>
#include <cstdint>

#include "devices/device.hpp"
#include "core/live.hpp"
#include "core/owners.hpp"
#include "core/address_tables.hpp"

namespace mempool {

struct Segment;

struct Block : Live<Block> {
  Address address = 0;
  std::size_t size = 0;       // bytes, a multiple of the device's alignment
  std::size_t requested = 0;  // bytes asked for; meaningful while in use
  Segment* segment = nullptr;
  Block* before = nullptr;    // neighbours in address order within the segment
  Block* after = nullptr;
  Block* bin_before = nullptr;  // neighbours in the free list
  Block* bin_after = nullptr;
  Block* idle_before = nullptr;  // neighbours in the list of idle blocks
  Block* idle_after = nullptr;
  std::size_t idle = 0;          // bytes that could be returned; meaningful while free
  std::uint64_t idle_since = 0;  // the epoch in which most of the idle bytes were freed
  Stream stream = 0;
  Owner owner = 0;  // meaningful while in use
  static constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};
  // planned offset in the arena, for a block served by the fallback for lack of an arena
  std::uint64_t place = kNoPlace;
  bool free = false;
  // never used since the pages were committed: reads as zeros on devices that promise this
  bool fresh = false;
};

struct Segment : Live<Segment> {
  Address base = 0;
  std::size_t size = 0;               // reserved
  bool large = false;
  PageSet pages;  // shared segments only: committed pages among all pages covered by blocks
  std::size_t committed = 0;          // bytes
  Block* first = nullptr;             // the block at `base`
};

// Free blocks by size: 8 bins per power of two, smallest sufficient block first.
class FreeBins {
 public:
  void add(Block* block) noexcept;
  void remove(Block* block) noexcept;
  // Return the smallest sufficient block, the lowest address among equals; in a crowded bin, the best of the
  // first few.
  Block* best_fit(std::size_t bytes) const noexcept;

 private:
  Block* best_of(unsigned bin, std::size_t bytes, unsigned most) const noexcept;
  static unsigned bin_of(std::size_t bytes) noexcept;
  static constexpr unsigned kBins = 64 * 8;
  std::array<Block*, kBins> heads_{};
  std::array<std::uint64_t, kBins / 64> nonempty_{};
};

// Free blocks with idle memory, in order of arrival.
class IdleList {
 public:
  void add(Block* block) noexcept;
  void remove(Block* block) noexcept;
  Block* first() const noexcept { return first_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Block* first_ = nullptr;
  Block* last_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace mempool
