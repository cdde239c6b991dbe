// The dynamic fallback: best fit with coalescing on segments taken from the device.
//
// A request of at least `traits.large` bytes gets a segment of its own, so that what stays for good does not hold the
// memory of temporaries; smaller ones share segments. Before more is taken than ever was, free memory serves whatever fits,
// and what is idle goes back. Where the device has pages, a shared segment is little more than
// address space: its pages are committed when first used and returned one by one, so it may be wide, and free memory
// coalesces whatever it was used for.
//
// Free memory that could be returned is *idle*. It is kept up to a limit, beyond which the longest idle goes back first.
//
// Free blocks belong to the stream they were freed on and serve only that stream, because host order is not
// device order; `give_free_blocks_to` (after the device has been synchronised) lifts that.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "address_map.hpp"
#include "blocks.hpp"
#include "memory_source.hpp"

namespace mempool {

class Segments {
 public:
  // `shared`: bytes of a segment that several blocks share; 0: as the device likes it.
  explicit Segments(MemorySource& source, std::size_t shared = 0)
      : source_(source), shared_(shared != 0 ? shared : source.traits().shared_segment) {}
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  enum class Effort {
    reuse,       // free memory only
    normal,      // then the device
    last_resort  // the same, however badly a free block fits, and however small a segment
  };
  // A block for `bytes`, or null: out of memory. May throw std::bad_alloc.
  Block* allocate(std::size_t bytes, Stream stream, Effort effort = Effort::normal);
  Block* find(Address address) const noexcept { return blocks_.find(address); }
  bool owns(Address address) const noexcept;  // whether it lies in a segment
  // The block is over, and free for what comes on its stream from now on.
  void free(Block* block) noexcept;

  // The live block becomes one of at least `bytes` with the same contents, without a copy, perhaps at another address;
  // false: it cannot, and is as it was. `stream` has used it last.
  bool resize(Block* block, std::size_t bytes, Stream stream) noexcept;

  void set_retained_limit(std::size_t bytes) noexcept { retained_limit_ = bytes; }
  // Graphs use at their replays what is free here, too: no limit or budget makes it go back, only trim() does,
  // which is for when no graph needs it any more.
  void keep_for_replays() noexcept { for_replays_ = true; }
  bool keeps(std::size_t bytes) const noexcept { return idle_.bytes() <= retained_limit_ && bytes <= retained_limit_ - idle_.bytes(); }
  // A live buffer that lay in somebody else's reservation.
  struct Living {
    Address address;
    std::size_t requested;  // bytes
    Stream stream;
    Owner owner;
    std::uint64_t place;    // see Block
  };
  // A reservation with pages, of which the first `committed` bytes are, becomes a shared segment of so many: what lives in it, in
  // order of address, stays where it is, and the rest is free for this stream; only after Device::synchronize(). Of what was reserved
  // beyond nothing is used. May throw std::bad_alloc, and then has changed nothing.
  void adopt(Address base, std::size_t size, std::size_t committed, const std::vector<Living>& living, Stream stream);

  // Gives back free segments, and free pages of shared ones. `idle_before`: only what is idle since an earlier epoch, the oldest
  // first, until no more than `keep` bytes are.
  void trim(std::uint64_t idle_before = ~std::uint64_t{0}, std::size_t keep = 0) noexcept;
  bool give_back_oldest() noexcept;  // false: nothing is idle, or it may not go back
  void next_epoch() noexcept { ++epoch_; }
  std::uint64_t epoch() const noexcept { return epoch_; }
  void give_free_blocks_to(Stream stream);  // only after Device::synchronize()
  std::size_t idle_of_others(Stream stream) const noexcept;  // bytes
  // Calls use(stream) with each whose free memory could be returned.
  template <class Use>
  void each_idle_stream(Use use) const {
    for (const auto& [stream, bins] : bins_) {
      if (bins.idle != 0) use(stream);
    }
  }

  const std::map<Address, Segment>& by_base() const noexcept { return segments_; }
  std::size_t retained() const noexcept { return idle_.bytes(); }  // free and returnable
  std::size_t segments() const noexcept { return segments_.size(); }
  std::size_t blocks() const noexcept { return blocks_.size(); }  // live ones
  // Free bytes that are committed, and the largest free block: what fragmentation strands.
  std::size_t free_bytes() const noexcept;
  std::size_t largest_free() const noexcept;
  std::size_t kept_bytes() const noexcept;  // committed, and not to be given back by trim()
  std::size_t free_blocks() const noexcept;

 private:
  struct Bins {
    FreeBins shared, large;
    std::size_t idle = 0;    // bytes
    std::size_t blocks = 0;  // live and free; when last counted
  };
  FreeBins& bins_of(const Block* block) noexcept;
  Bins& stream_bins(Stream stream);
  bool paged(const Segment& segment) const noexcept { return source_.traits().page != 0 && !segment.large; }
  // Pages that lie wholly (`inside`) or partly in a range of a shared segment: [first, second).
  std::pair<std::size_t, std::size_t> pages_of(const Segment& segment, Address address, std::size_t bytes,
                                               bool inside) const noexcept;
  static bool is_whole(const Block& block) noexcept { return block.before == nullptr && block.after == nullptr; }
  bool committed(const Block& block, std::size_t bytes) const noexcept;  // its first bytes
  std::size_t returnable(const Block& block) const noexcept;
  std::size_t returnable_beyond(const Block& block, std::size_t bytes) const noexcept;
  std::size_t returnable_between(const Block& left, const Block& right) const noexcept;
  void shelve(Block* block) noexcept;    // a free block, of which is known what is returnable, goes into its lists
  void unshelve(Block* block) noexcept;
  Block* reuse(std::size_t bytes, bool large, Stream stream, Effort effort) const noexcept;
  Block* take_segment(std::size_t bytes, bool large, Stream stream);
  Block* squeeze(std::size_t bytes, bool large, Stream stream) const noexcept;
  bool splits_finely() const noexcept;
  bool sets_mark(std::size_t bytes) const noexcept;  // whether so much more would be held than ever was
  void make_way(std::size_t bytes, Stream stream) noexcept;
  bool give_back_one(Block* block, std::size_t least) noexcept;  // for less memory, which graphs that are replayed do not do
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
  static constexpr std::size_t kFewStreams = 8;  // whose lists are no burden
  std::size_t most_streams_ = kFewStreams;       // before those without a block are forgotten
  std::deque<Block> storage_;
  std::vector<Block*> spare_;  // always has room for every block of storage_, so that freeing never allocates
  IdleList idle_;
  std::size_t retained_limit_ = 0;
  std::size_t allocations_ = 0;
  std::size_t made_way_ = 0;  // bytes
  bool for_replays_ = false;
  std::uint64_t epoch_ = 1;
};

}  // namespace mempool
