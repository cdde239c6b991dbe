// Memory of one device: the arena shared by all plans, the overlap guard, the fallback, and a common lock.
//
// Clients (one per adapter, see client.hpp) send requests and the pool returns addresses. Every function here
// is called with `lock` held unless the comment says otherwise.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.hpp"
#include "core/arena_streams.hpp"
#include "core/foreign_uses.hpp"
#include "core/graph_pools.hpp"
#include "devices/memory_source.hpp"
#include "core/live.hpp"
#include "core/occupancy.hpp"
#include "core/outside_buffers.hpp"
#include "core/owners.hpp"
#include "core/pattern.hpp"
#include "fallback/segments.hpp"
#include "fallback/small.hpp"
#include "core/sync.hpp"

namespace mempool {

class Client;

struct PoolOptions {
  std::size_t small_bytes = 512;  // requests up to this size use size classes and are never planned
  std::size_t max_reserved = ~std::size_t{0};       // bytes; limit on arena and segments together
  std::size_t recorded_events = std::size_t{1} << 16;  // capacity of the planner's ring
  unsigned distinguished_streams = ArenaStreams::kMostStreams;        // streams distinguished in the arena
  // true: other streams reuse freed memory after an event wait; false: only after a device synchronization
  // (see arena_streams.hpp)
  bool share_streams = true;
};

// Reason why an arena cannot be allocated.
enum class Refusal : std::uint8_t {
  none,
  captured,  // a graph is being captured
  alive,     // live ranges occupy the current arena, which cannot grow in place
  insufficient_memory,  // insufficient memory; no allocation was attempted
  budget,    // the budget would be exceeded, given the other memory held; no allocation was attempted
  device,    // the allocation was attempted and the device refused
  pending    // hosted memory was requested and comes with the next request
};
inline constexpr std::array<const char*, 7> kRefusalNames = {"", "capture", "alive", "memory", "limit", "memory", ""};

struct ArenaStats {
  std::size_t bytes = 0;      // committed
  std::size_t alive = 0;      // live ranges
  std::uint64_t refused = 0;  // failed attempts to allocate or enlarge the arena
  // times the arena was converted to segments because the memory was needed elsewhere
  std::uint64_t conversions = 0;
};

class Pool : private Live<Pool>, private Idle, private ArenaLog {
 public:
  using Live<Pool>::count;
  Pool(std::unique_ptr<Device> device, const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Lock lock;

  // --- the arena
  bool arena_holds(Address address) const noexcept { return arena_.holds(address); }
  // Grow the arena to at least `bytes`, after returning the fallback's free memory to the device. On refusal
  // the arena is unchanged, except that after Refusal::device an arena without live ranges may have been
  // released.
  Refusal take_arena(std::size_t bytes) noexcept;
  // Return whether the arena has the slot's range, and no live range intersects it.
  bool is_slot_free(const Slot& slot, std::size_t bytes) const noexcept {
    const Offset end = slot.offset + bytes;
    if (end > arena_.bytes() && MEMPOOL_GUARDED("arena_end")) return false;
    if (arena_.is_drained(slot.offset)) return false;
    // If an envelope's buffer is smaller than planned, live ranges behind the buffer do not matter.
    return occupancy_.is_free(slot.offset, end, slot.slots_before_end) ||
           occupancy_.is_free(slot.offset, end, occupancy_.slots_before(end));
  }
  // Return the planned address, or 0 if a live range intersects the slot, the arena is shorter than the plan,
  // or another stream used the memory last and cannot be waited for now.
  Address take_planned(const Slot& slot, std::size_t bytes, Stream stream) noexcept {
    if (!is_slot_free(slot, bytes)) return 0;
    const Offset end = slot.offset + bytes;
    if (!streams_.is_sole(stream)) {
      const StreamIndex stream_index = streams_.prepare(slot.offset, end, stream);
      if (stream_index == ArenaStreams::kNone) return 0;
      if (MEMPOOL_GUARDED("stream_index")) occupancy_.set_stream_index(slot.index, stream_index);
    }
    occupancy_.take_slot(slot.index, end);
    return arena_.base() + slot.offset;
  }
  // Return true if memory for a second arena of the same size is known to be available.
  bool fits_twice() noexcept;
  // called at a boundary; ends the arena drain unless a pattern needs a larger arena
  void end_drain_unless_needed() noexcept;
  const Arena& arena() const noexcept { return arena_; }
  const ArenaStreams& arena_streams() const noexcept { return streams_; }
  std::size_t arena_bytes() const noexcept { return arena_.bytes(); }
  // Rebuild the planned slots from the starts of all patterns of all clients. Call after a pattern is added
  // or removed. May throw std::bad_alloc.
  void rebuild_slots();
  // Shrink the arena to `bytes` (default: the need of the largest pattern that is not dormant), but not below the end
  // of the last live range. An arena that cannot shrink and grow in place is only released, never shortened, since it
  // could be enlarged again only while empty.
  void shrink_arena() noexcept { shrink_arena(planned_bytes()); }
  void shrink_arena(std::size_t bytes) noexcept;

  // --- allocation outside the plan
  struct Given {
    Address address = 0;      // 0: out of memory
    std::size_t rounded = 0;  // bytes in use
    bool fresh = false;       // reads as zeros
  };
  Address allocate_small(std::size_t bytes, Stream stream) noexcept;
  // `holes`: the arena's holes may serve the request; otherwise they serve it only before memory runs out.
  Given allocate_dynamic(std::size_t bytes, Stream stream, bool holes) noexcept;

  // Live buffers that the framework's own allocator serves.
  OutsideBuffers& outside() noexcept { return outside_; }
  // Allocate in any hole of the arena, even if a plan may need the range; 0: no hole is large enough.
  Given allocate_in_hole(std::size_t bytes, Stream stream) noexcept;
  // The same in a hole that no plan shares between streams, unless the arena drains; may throw std::bad_alloc.
  Given from_idle_hole(std::size_t bytes, Stream stream);

  // Record the planned offset of a buffer that the fallback serves for lack of an arena. planned_offset_of() returns
  // this offset, or the own offset of a buffer at a planned slot in the arena; kDynamic: none.
  void note_planned_offset(Address address, Offset place) noexcept;
  Offset planned_offset_of(Address address) noexcept;
  void forget_planned_offsets(Owner owner) noexcept { segments_.forget_places(owner); }
  // Allocate the given range of the arena, regardless of the plan's next use of the range. Address 0: the range is not
  // free.
  Given take_place(Offset begin, std::size_t bytes, Stream stream);

  // Resize the fallback's buffer `old` to `bytes` and keep the contents without a copy, possibly at another
  // address. Address 0: resizing is impossible and the buffer is unchanged.
  struct Freed;
  Given resize(Address old, std::size_t bytes, Stream stream, Freed& before) noexcept;

  // --- free, for all kinds of memory
  struct Freed {
    // outside: recorded by record_outside(); dead: an address of this pool at which no buffer is live
    enum Kind : std::uint8_t { foreign, arena, segment, small, graph, outside, dead } kind = foreign;
    std::size_t requested = 0;
    std::size_t rounded = 0;
    Stream stream = 0;  // the stream of the allocation
    Owner owner = 0;
    bool is_live() const noexcept { return kind != foreign && kind != dead; }
  };
  // Free a buffer. If other streams use the buffer, the memory becomes reusable when those streams have
  // completed.
  Freed free(Address address, Stream stream) noexcept;
  // Fast path of free() for buffers in the arena. Return the requested size; 0: no live buffer at the
  // address, or the slow path is required.
  std::size_t free_in_arena(Address address, Stream stream) noexcept {
    if (!arena_holds(address) || !uses_.empty()) return 0;
    return release_in_arena(address, stream);
  }
  // The stream of the allocation of a live buffer in the arena.
  Stream stream_in_arena(Address address) const noexcept {
    return streams_.shared() ? streams_.stream_of(occupancy_.at(address - arena_.base()).stream_index) : streams_.first();
  }
  // --- the client that counts a buffer, if the pool has several clients
  Owners& owners() noexcept { return owners_; }
  Owner owner_in_arena(Address address) const noexcept {
    return arena_holds(address) ? occupancy_.at(address - arena_.base()).owner : Owners::kWhoever;
  }
  void set_owner(Address address, Owner owner) noexcept;  // of a live buffer
  // Set the owner of a planned buffer that was just allocated.
  void set_owner(const Slot& slot, Owner owner) noexcept {
    occupancy_.set_owner(slot.index, owner);
    owners_.begins(owner);
  }
  // Return true if freeing this buffer needs no device call: no deferred free, no graph memory to release, no
  // event to record, and the freed memory stays with the pool.
  bool frees_at_once(Address address) const noexcept {
    if (!uses_.empty() || graphs_.pools() != 0 || options_.share_streams) return false;
    if (arena_holds(address)) return true;
    const Block* const block = segments_.find(address);
    return block == nullptr || segments_.keeps(block->size);
  }
  // Return the result that free() would report, without freeing.
  Freed at(Address address) noexcept;
  // Return the requested size of a live buffer; `ours` is set to false if no such buffer exists.
  std::size_t size_of(Address address, bool& ours) noexcept {
    const Freed found = at(address);
    ours = found.is_live();
    return found.requested;
  }

  // --- more than one stream
  // Record a use of a live buffer by `stream`. False: no such buffer, or the stream owns the buffer. May
  // throw std::bad_alloc.
  bool use(Address address, Stream stream);
  // Free the deferred buffers whose using streams have completed.
  void collect() noexcept {
    if (deferred_.current != 0) collect_deferred();
  }
  const Gauge& deferred() const noexcept { return deferred_; }  // bytes of deferred frees
  struct Waiting {
    std::size_t blocks = 0, bytes = 0;
    void add(std::size_t more) noexcept { ++blocks, bytes += more; }
    void sub(std::size_t less) noexcept { --blocks, bytes -= less; }
  };
  // the part of the deferred frees that was requested as small
  const Waiting& deferred_small() const noexcept { return deferred_small_; }
  const ForeignUses& uses() const noexcept { return uses_; }

  // --- graph capture
  bool capturing() const noexcept { return graphs_.begun(); }
  void begin_graph(GraphPools::Id id, GraphPools::Filter filter);  // may throw std::bad_alloc
  // Stop routing requests to the graph. `still`: the capture itself goes on; call again when the capture has
  // ended.
  void end_graph(GraphPools::Id id, bool still = false) noexcept;
  void release_graph(GraphPools::Id id) noexcept;
  const GraphPools& graphs() const noexcept { return graphs_; }
  bool capturing(GraphPools::Id id) noexcept { return graphs_.begun(id); }
  // Neither wait for the device nor record events while `held`: a graph is captured, with memory of the framework's
  // allocator.
  void hold(bool held) noexcept;
  unsigned graph_uses(GraphPools::Id id) noexcept { return graphs_.uses(id); }  // begins without a release
  // Return true if the request belongs to a graph; `given` is then the graph's answer.
  bool allocate_for_graph(std::size_t bytes, Stream stream, Given& given) noexcept;

  // The reservation that contains a live buffer: the arena, a segment, or a region of small blocks.
  struct Range {
    Address base;
    std::size_t bytes;
  };
  Range reservation_of(Address address) noexcept;

  // Read the device's traits again, since a device without an index may choose its kind of memory late.
  void read_traits() noexcept;

  // --- giving memory back
  void trim() noexcept;                // releases free segments and small pages
  bool release_arena() noexcept;       // true: no arena is left
  // Convert the arena to segments (only where the arena has pages): live ranges stay in place as blocks of
  // the fallback, and the rest is free for `stream` and, after the usual waits, for others. Call only after
  // synchronize() and not during a graph capture. False: nothing has changed.
  bool convert_arena_to_segments(Stream stream) noexcept;
  void return_idle() noexcept;         // releases memory that stayed idle through the last two calls
  // Call return_idle() once every client that follows a plan has reached a boundary since the last time, so
  // that memory used in each iteration of the slower clients does not count as idle.
  void return_idle_after(Client& client) noexcept;
  // Release memory outside the arena that was idle since the last call. For devices on which releasing waits
  // for the device, so that callers use backoff. Return true if anything was released.
  bool release_idle_outside_arena() noexcept;
  // an iteration has outgrown the plan if it takes more than arena bytes / kOutsideShare beside the arena
  static constexpr std::size_t kOutsideShare = 8;
  // Time of the last return_idle() by the clock, shared by all clients.
  std::chrono::steady_clock::time_point idle_returned{};

  // --- a budget for all memory held
  void set_budget(std::size_t bytes) noexcept { source_.set_budget(bytes, this); }
  // Return the bytes available at once: the larger of the budget left after idle memory is released and of
  // the arena's largest hole. Negative: bytes held beyond the budget.
  std::ptrdiff_t room() const noexcept;

  std::size_t round_up(std::size_t bytes) const noexcept {
    const std::size_t unit = source_.traits().alignment;
    return (bytes + unit - 1) & ~(unit - 1);  // the alignment is a power of two
  }
  Owner adopt(Client* client);  // may throw std::bad_alloc
  void part(Client* client) noexcept;
  const std::vector<Client*>& clients() const noexcept { return clients_; }
  bool another_client_replays(const Client* but) const noexcept;  // true: another client is in the middle of a plan
  std::uint64_t boundaries() const noexcept;            // sum over all clients
  void layout_changed() noexcept { ++layouts_; }
  // changes of the arena layout of any client's plans
  std::uint64_t layouts() const noexcept { return layouts_; }
  // retains as much free memory as the client with the largest retained limit requests
  void apply_retained_limits() noexcept;

  const PoolOptions& options() const noexcept { return options_; }
  MemorySource& source() noexcept { return source_; }
  Segments& segments() noexcept { return segments_; }
  const Segments& segments() const noexcept { return segments_; }
  const SmallBlocks& small() const noexcept { return small_; }
  Occupancy& occupancy() noexcept { return occupancy_; }
  const Occupancy& occupancy() const noexcept { return occupancy_; }
  Address arena_base() const noexcept { return arena_.base(); }
  std::uint64_t retries() const noexcept { return retries_; }  // requests that forced memory to be given back
  // the part of the retries that waited for all streams
  std::uint64_t waits() const noexcept { return waits_; }
  ArenaStats arena_stats() const noexcept;
  std::size_t table_bytes() const noexcept;  // host memory of all plans and of the guard
  std::size_t live_blocks() const noexcept {
    return occupancy_.alive() + segments_.blocks() + small_.blocks() + graphs_.blocks() + outside_.size();
  }
  // true: the device is informed of upcoming uses
  bool foresees() const noexcept { return source_.traits().prefetches; }
  void set_forked() noexcept { forked_ = true; }
  bool forked() const noexcept { return forked_; }

 private:
  Refusal try_arena(std::size_t bytes) noexcept;
  void arena_changed(ArenaEvent event, std::size_t before, std::size_t after) noexcept override;
  bool take_new_arena(std::size_t bytes) noexcept;
  bool could_be_reserved(std::size_t arena_bytes, bool in_place) noexcept;
  bool fits_with(std::size_t stays, std::size_t more) noexcept;
  // true: releasing the arena's free pages would make `bytes` available
  bool fits_in_arena_pages(std::size_t bytes) noexcept;
  void drain_for(std::size_t arena_bytes) noexcept;  // starts or continues the arena drain for a larger arena
  bool within_budget(std::size_t arena_bytes, bool in_place) const noexcept;
  bool give_back_oldest() noexcept override { return segments_.give_back_oldest(); }
  Given from_segments(std::size_t bytes, Stream stream, Segments::Effort effort);
  Given from_hole(std::size_t bytes, Stream stream, bool anywhere);
  Given claim(Offset begin, std::size_t bytes, Stream stream, bool anywhere);
  Given last_resort(std::size_t bytes, Stream stream);
  void reassign_idle_memory(std::size_t bytes, Stream stream);
  // the largest arena that a pattern needs, dormant ones excepted
  std::size_t planned_bytes() const noexcept;
  std::size_t release_in_arena(Address address, Stream stream) noexcept {
    const Offset begin = address - arena_.base();
    const Offset end = occupancy_.release(begin);
    if (end == 0) return 0;
    streams_.freed(begin, end, stream);
    return end - begin;
  }
  Freed free_now(Address address, Stream stream) noexcept;
  Freed small_at(const SmallBlocks::Place& place) const noexcept;
  Freed free_small(const SmallBlocks::Place& place, Address address, Stream stream) noexcept;
  void wait_for_uses(Address address, const Freed& freed, Stream stream) noexcept;
  bool add_use(Address address, const Freed& freed, Stream stream) noexcept;
  bool hand_back(Address address, const Freed& freed, Stream stream) noexcept;
  // in a segment
  bool owns(Address address) const noexcept { return segments_.owns(address) || graphs_.owns(address); }
  void collect_deferred() noexcept;
  bool synchronize() noexcept;  // true: no device work is pending any more

  PoolOptions options_;
  std::unique_ptr<Device> device_;
  MemorySource source_;
  SmallBlocks small_;
  Segments segments_;
  Occupancy occupancy_;
  ArenaStreams streams_;
  ForeignUses uses_;
  GraphPools graphs_;
  OutsideBuffers outside_;
  bool held_ = false;  // by hold()
  bool is_small(const Freed& freed) const noexcept { return freed.requested <= options_.small_bytes; }

  Gauge deferred_;
  Waiting deferred_small_;
  Arena arena_{*this};
  Owners owners_;
  std::uint64_t arena_refused_ = 0;
  std::uint64_t retries_ = 0, waits_ = 0;
  std::size_t peak_outside_arena_ = 0;       // largest use outside the arena at a request for more memory, in bytes
  // factor: idle memory of other streams up to this multiple of peak_outside_arena_ is left to those streams
  std::size_t idle_factor_ = 1;
  // streams whose idle memory was reassigned and that have not been seen since
  std::vector<Stream> reassigned_streams_;
  bool forked_ = false;             // a forked child gets no planned addresses
  std::vector<Client*> clients_;
  std::uint64_t past_boundaries_ = 0;  // of former clients
  std::uint64_t layouts_ = 0;
};

}  // namespace mempool
