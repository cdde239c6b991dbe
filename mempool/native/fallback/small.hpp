// Small allocations: size classes in separate pages, so that small requests never disturb a plan or split a
// segment.
//
// A region is address space aligned to the region's size, so that one shift and one hash look-up lead from
// any address to the region's table; the tables are separate from the memory, which the host could not touch
// on a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/address_tables.hpp"
#include "devices/memory_source.hpp"
#include "core/owners.hpp"

namespace mempool {

class SmallBlocks {
  struct Page;

 public:
  static constexpr std::size_t kRegion = std::size_t{1} << 21;
  static constexpr std::size_t kPage = std::size_t{16} << 10;
  static constexpr std::size_t kClasses = 16;

  // Serve requests of up to `largest` bytes, or less if the size classes end below: see largest().
  SmallBlocks(MemorySource& source, std::size_t largest);
  ~SmallBlocks();
  SmallBlocks(const SmallBlocks&) = delete;
  SmallBlocks& operator=(const SmallBlocks&) = delete;

  // Return 0 if out of memory. May throw std::bad_alloc.
  Address allocate(std::size_t bytes, Stream stream);
  // Location of an address: in a live block, elsewhere in a region, or in no region. Valid until the next
  // non-const call.
  class Place {
   public:
    bool in_a_region = false;
    bool is_live() const noexcept { return page_ != nullptr; }

   private:
    friend SmallBlocks;
    Page* page_ = nullptr;
    std::size_t block_ = 0;
  };
  Place find(Address address) const noexcept;
  bool owns(Address address) const noexcept { return region_of(address) != nullptr; }
  // Properties of a live block; here and below the place must be live.
  struct Block {
    std::size_t requested, rounded;
    Stream stream;  // the page's stream, on which freed blocks are reused
    Owner owner;
  };
  Block at(const Place& place) const noexcept {
    const Page& page = *place.page_;
    return {page.requested[place.block_], size_of(page.size_class), page.stream, page.owner[place.block_]};
  }
  void set_owner(const Place& place, Owner owner) noexcept { place.page_->owner[place.block_] = owner; }
  void free(const Place& place) noexcept;
  std::size_t rounded(std::size_t bytes) const noexcept { return size_of(class_of(bytes)); }
  std::size_t blocks() const noexcept { return live_; }  // live blocks
  std::size_t largest() const noexcept { return largest_; }
  std::size_t unit() const noexcept { return size_of(0); }  // bytes between neighbouring size classes
  // Call use(region) for each region, whose tables only a snapshot reads from outside.
  template <class Use>
  void each_region(Use use) const {
    for (const auto& region : regions_) use(*region);
  }
  // Release memory without live blocks: single pages if the device has pages, and whole regions.
  void trim() noexcept;

 private:
  struct alignas(64) Page {  // the fields used by every call fit one cache line
    // one bit per block, set if free; 16 KiB hold at most 256 blocks of 64 bytes
    std::array<std::uint64_t, 4> free{};
    std::uint16_t blocks = 0, used = 0;
    std::uint8_t size_class = 0;
    bool committed = false;  // the same for all pages of a granule
    bool listed = false;     // in the size class's list of pages with free blocks
    bool was_used = false;   // by `stream`
    Stream stream = 0;
    Address address = 0;
    Page* next = nullptr;
    std::array<std::uint16_t, 256> requested{};
    std::array<Owner, 256> owner{};
  };
  struct Region {
    Address base = 0;
    std::size_t in_use = 0;  // pages that are split into blocks
    std::array<Page, kRegion / kPage> pages;
  };
  struct Stock {  // pages with free blocks of one stream
    std::array<Page*, kClasses> room{};
    std::size_t pages = 0;  // pages of the stream at the last count
  };

  std::size_t class_of(std::size_t bytes) const noexcept { return bytes == 0 ? 0 : (bytes - 1) >> unit_log2_; }
  std::size_t size_of(std::size_t size_class) const noexcept { return (size_class + 1) << unit_log2_; }
  Region* region_of(Address address) const noexcept { return regions_by_base_.find(address / kRegion); }
  Page* fresh_page(std::size_t size_class, Stream stream);
  bool may_take(const Page& page, Stream stream) const noexcept;
  Page* spare_page(Stream stream) noexcept;
  bool mostly_empty() const noexcept;
  Region* add_region();
  bool commit_granule(Region& region, Page& page) noexcept;
  void forget_users() noexcept;
  void forget_streams() noexcept;
  bool return_granules(Region& region) noexcept;

  MemorySource& source_;
  unsigned unit_log2_;
  std::array<std::uint32_t, kClasses> inverse_{};  // 2^32 / size of each class, rounded up
  std::size_t largest_;
  // pages committed and returned together, because the device's pages may be larger than kPage
  std::size_t granule_;
  std::vector<std::unique_ptr<Region>> regions_;
  std::size_t first_spare_ = 0;  // regions before this one have no spare page
  AddressMap<Region> regions_by_base_;
  std::map<Stream, Stock> stocks_;
  static constexpr std::size_t kFewStreams = 64;
  std::size_t most_streams_ = kFewStreams;  // limit before streams without a page are forgotten
  std::size_t live_ = 0;
  Stock* last_stock_ = nullptr;
  Stream last_stream_ = 0;
};

}  // namespace mempool
