// The dynamic fallback: best fit with coalescing on segments taken from the device.
//
// A request of at least `traits.large` bytes gets a separate segment, so that long-lived buffers do not pin
// the memory of temporaries; smaller requests share segments. Before the pool takes more memory than ever
// before, free memory serves any request that fits, and idle memory is given back. On a device with pages, a
// shared segment is little more than address space: the pages are committed at first use and returned one by
// one, so that the segment may be wide and free memory coalesces regardless of former use.
//
// Free memory that could be returned is *idle*. Idle memory is kept up to a limit, beyond which the longest
// idle memory is released first.
//
// A free block belongs to the stream of the free and serves only that stream, because host order is not
// device order; `give_free_blocks_to` (after a device synchronization) lifts this restriction.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/flight.hpp"
#include "core/address_tables.hpp"
#include "fallback/blocks.hpp"
#include "devices/memory_source.hpp"

namespace mempool {

class Segments {
 public:
  // `shared`: bytes of a segment that several blocks share; 0: the device's default.
  explicit Segments(MemorySource& source, std::size_t shared = 0)
      : source_(source), shared_(shared != 0 ? shared : source.traits().shared_segment) {}
  ~Segments();
  // Use the traits of the device, which were not known before; call while no segment exists.
  void use_traits() noexcept { shared_ = source_.traits().shared_segment; }
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  enum class Effort {
    reuse,       // free memory only
    normal,      // free memory, then the device
    last_resort  // the same, accepting any badly fitting free block and a smaller segment
  };
  // Return a block for `bytes`, or null: out of memory. May throw std::bad_alloc.
  Block* allocate(std::size_t bytes, Stream stream, Effort effort = Effort::normal);
  Block* find(Address address) const noexcept { return blocks_.find(address); }
  bool owns(Address address) const noexcept;  // true: the address lies in a segment
  // Free a block; the memory serves later requests on the block's stream.
  void free(Block* block) noexcept;

  // Resize a live block to at least `bytes` and keep the contents without a copy, possibly at another
  // address; false: resizing is impossible and the block is unchanged. `stream` was the last user of the
  // block.
  bool resize(Block* block, std::size_t bytes, Stream stream) noexcept;

  void set_retained_limit(std::size_t bytes) noexcept {
    retained_limit_ = bytes;
    flight::note(flight::retained_limit, 0, 0, bytes);
  }
  // Keep free memory for graph replays, which use free memory too: no limit or budget releases it, only
  // trim() does, for a time when no graph needs the memory any more.
  void keep_for_replays() noexcept { for_replays_ = true; }
  bool keeps(std::size_t bytes) const noexcept { return idle_.bytes() <= retained_limit_ && bytes <= retained_limit_ - idle_.bytes(); }
  // A live buffer in a reservation that another part of the pool made.
  struct Living {
    Address address;
    std::size_t requested;  // bytes
    Stream stream;
    Owner owner;
    std::uint64_t place;    // see Block
  };
  // Turn a reservation with pages, whose first `committed` bytes are committed, into a shared segment of
  // these bytes. The live buffers, in address order, stay in place, and the rest is free for `stream`. Call
  // only after Device::synchronize(). Address space reserved beyond the committed bytes stays unused. May
  // throw std::bad_alloc; then nothing has changed.
  void adopt(Address base, std::size_t size, std::size_t committed, const std::vector<Living>& living, Stream stream);

  // Release free segments and the free pages of shared segments. `idle_before`: release only memory idle
  // since an earlier epoch, the oldest first, until at most `keep` idle bytes are left.
  void trim(std::uint64_t idle_before = ~std::uint64_t{0}, std::size_t keep = 0) noexcept;
  void forget_places(Owner owner) noexcept;  // of the owner's live blocks: their plans are dropped
  bool give_back_oldest() noexcept;  // false: no memory is idle, or a release is not allowed now
  void next_epoch() noexcept { ++epoch_; }
  std::uint64_t epoch() const noexcept { return epoch_; }
  void give_free_blocks_to(Stream stream);  // only after Device::synchronize()
  std::size_t idle_of_others(Stream stream) const noexcept;  // bytes
  // Call use(stream) for each stream with idle memory.
  template <class Use>
  void each_idle_stream(Use use) const {
    for (const auto& [stream, bins] : bins_) {
      if (bins.idle != 0) use(stream);
    }
  }

  const std::map<Address, Segment>& by_base() const noexcept { return segments_; }
  std::size_t retained() const noexcept { return idle_.bytes(); }  // bytes that are free and returnable
  std::size_t segments() const noexcept { return segments_.size(); }
  std::size_t blocks() const noexcept { return blocks_.size(); }  // live blocks
  // Free committed bytes, and the largest free block: both measure fragmentation.
  std::size_t free_bytes() const noexcept;
  std::size_t largest_free() const noexcept;
  std::size_t kept_bytes() const noexcept;  // committed bytes that trim() will not release
  std::size_t free_blocks() const noexcept;

 private:
  struct Bins {
    FreeBins shared, large;
    std::size_t idle = 0;    // bytes
    std::size_t blocks = 0;  // live and free blocks at the last count
  };
  FreeBins& bins_of(const Block* block) noexcept;
  Bins& stream_bins(Stream stream);
  bool paged(const Segment& segment) const noexcept { return source_.traits().page != 0 && !segment.large; }
  // Pages wholly (`inside`) or partly in a range of a shared segment: [first, second).
  std::pair<std::size_t, std::size_t> pages_of(const Segment& segment, Address address, std::size_t bytes,
                                               bool inside) const noexcept;
  static bool is_whole(const Block& block) noexcept { return block.before == nullptr && block.after == nullptr; }
  bool committed(const Block& block, std::size_t bytes) const noexcept;  // the block's first `bytes` bytes
  std::size_t returnable(const Block& block) const noexcept;
  std::size_t returnable_beyond(const Block& block, std::size_t bytes) const noexcept;
  std::size_t returnable_between(const Block& left, const Block& right) const noexcept;
  void shelve(Block* block) noexcept;    // adds a free block, whose idle bytes are known, to the lists
  void unshelve(Block* block) noexcept;
  Block* reuse(std::size_t bytes, bool large, Stream stream, Effort effort) const noexcept;
  Block* take_segment(std::size_t bytes, bool large, Stream stream);
  Block* squeeze(std::size_t bytes, bool large, Stream stream) const noexcept;
  bool splits_finely() const noexcept;
  // true: `bytes` more would exceed the most memory ever held
  bool sets_mark(std::size_t bytes) const noexcept;
  void make_way(std::size_t bytes, Stream stream) noexcept;
  // for lower memory use; does nothing for graph pools, whose free memory replays use
  bool give_back_one(Block* block, std::size_t least) noexcept;
  bool commit_pages(Block* block) noexcept;
  bool return_pages(Block* block, std::size_t most) noexcept;
  bool give_back(Block* block, std::size_t least) noexcept;
  void split(Block* block, std::size_t bytes);
  std::size_t round_up(std::size_t bytes) const noexcept;
  void shrink(Block* block, std::size_t bytes) noexcept;
  bool grow_into_neighbour(Block* block, std::size_t bytes) noexcept;
  bool resize_segment(Segment& segment, std::size_t bytes) noexcept;
  Block* merge(Block* left, Block* right) noexcept;
  void put_back(Block* block) noexcept;
  void gather(Segment& segment) noexcept;
  void forget_streams() noexcept;
  bool drop(Segment& segment) noexcept;
  Block* new_block();
  void delete_block(Block* block) noexcept;

  MemorySource& source_;
  std::size_t shared_;
  std::map<Address, Segment> segments_;  // by base
  AddressMap<Block> blocks_;
  std::map<Stream, Bins> bins_;
  // below this number, the lists of unused streams are no burden
  static constexpr std::size_t kFewStreams = 8;
  std::size_t most_streams_ = kFewStreams;       // limit before streams without a block are forgotten
  std::deque<Block> storage_;
  std::vector<Block*> spare_;  // capacity for every block of storage_, so that freeing never allocates
  IdleList idle_;
  std::size_t retained_limit_ = 0;
  std::size_t allocations_ = 0;
  std::size_t made_way_ = 0;  // bytes released by make_way()
  bool for_replays_ = false;
  std::uint64_t epoch_ = 1;
};

}  // namespace mempool
