// One device's memory: the arena that all plans share, its guard, the fallback, and the lock over all of it.
//
// Clients (one for each adapter: client.hpp) ask; the pool answers with addresses. Everything here is called with
// `lock` held unless it says otherwise.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arena_streams.hpp"
#include "foreign_uses.hpp"
#include "graph_pools.hpp"
#include "memory_source.hpp"
#include "live.hpp"
#include "occupancy.hpp"
#include "owners.hpp"
#include "pattern.hpp"
#include "segments.hpp"
#include "small.hpp"
#include "rarely.hpp"
#include "vacated.hpp"
#include "sync.hpp"

namespace mempool {

class Client;

struct LiveArena : Live<LiveArena> {};  // for its count

struct PoolOptions {
  std::size_t small_bytes = 512;                    // requests up to this go to size classes and never into a plan
  std::size_t max_reserved = ~std::size_t{0};       // bytes, arena and segments together
  std::size_t recorded_events = std::size_t{1} << 16;  // the planner's ring
  unsigned told_apart = ArenaStreams::kMost;        // streams in the arena
  bool share_streams = true;                        // what one stream has freed is another's after an event; else only after
                                                    // the device was waited for: see arena_streams.hpp
};

// Why an arena cannot be had.
enum class Refusal : std::uint8_t {
  none,
  captured,  // a graph is being captured
  alive,     // something lives in the one there is, which cannot grow in place
  foreseen,  // there is too little memory: nothing was tried
  budget,    // with what else is held it would be beyond the budget: nothing was tried
  device     // it was tried
};
inline constexpr std::array<const char*, 6> kRefusalNames = {"", "capture", "alive", "memory", "limit", "memory"};

struct ArenaStats {
  std::size_t bytes = 0;      // committed
  std::size_t alive = 0;      // ranges alive
  std::size_t strangers = 0;  // of these, not at a planned start
  std::uint64_t refused = 0;  // times that it could not be had
  std::uint64_t dissolved = 0;  // times that its memory was needed elsewhere
};

class Pool : private Live<Pool>, private Idle {
 public:
  using Live<Pool>::count;
  Pool(std::unique_ptr<Device> device, const PoolOptions& options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Lock lock;

  // --- the arena
  bool arena_holds(Address address) const noexcept { return address - arena_base_ < arena_bytes_; }
  // Makes the arena at least `bytes` long, giving the fallback's free memory back first. Where it cannot be had, what there
  // was is as it was; only after Refusal::device, and where nothing in it was alive, perhaps gone.
  Refusal take_arena(std::size_t bytes) noexcept;
  // A planned address, or 0: it intersects something alive, the arena is shorter than the plan, or another stream used the
  // memory last and cannot be waited for now.
  Address take_planned(const Slot& slot, std::size_t bytes, Stream stream) noexcept {
    const Offset end = slot.offset + bytes;
    if (end > arena_bytes_ && MEMPOOL_GUARDED("arena_end")) return 0;
    if (vacated_.any() && vacated_.has(slot.offset)) return 0;
    if (!occupancy_.is_free(slot.offset, end, slot.cells_before_end)) {
      // What lies behind it is no hindrance where an envelope's buffer is smaller than planned.
      if (!occupancy_.is_free(slot.offset, end, occupancy_.cells_before(end))) return 0;
    }
    if (!streams_.alone(stream)) {
      const Line line = streams_.enter(slot.offset, end, stream);
      if (line == ArenaStreams::kNone) return 0;
      if (MEMPOOL_GUARDED("line")) occupancy_.set_line(slot.cell, line);
    }
    occupancy_.take_cell(slot.cell, end);
    return arena_base_ + slot.offset;
  }
  // Whether there is memory for another one as large beside it, as far as that is known.
  bool has_room_for_another() noexcept { return may_be_had(2 * arena_bytes_, true); }
  void vacate_no_more() noexcept;  // at a boundary: unless somebody wants a larger arena
  // Whether places are left empty, for a larger arena: which ones.
  const Vacated& vacated() const noexcept { return vacated_; }
  const ArenaStreams& arena_streams() const noexcept { return streams_; }
  std::size_t arena_bytes() const noexcept { return arena_bytes_; }
  // Cells for the starts of all patterns of all clients; call when a pattern comes or goes. May throw std::bad_alloc.
  void rebuild_cells();
  // The arena shrinks to so much and what is alive, or to what the patterns need that do not rest. Where it cannot shrink and grow in place
  // it stays: a larger one could be had again only in a moment when nothing in it is alive.
  void shrink_arena() noexcept { shrink_arena(planned_bytes()); }
  void shrink_arena(std::size_t bytes) noexcept;

  // --- allocation outside the plan
  struct Given {
    Address address = 0;      // 0: out of memory
    std::size_t rounded = 0;  // bytes in use
    bool fresh = false;       // reads as zeros
  };
  Address allocate_small(std::size_t bytes, Stream stream) noexcept;
  // The arena's: kept free for who follows a plan, if possible; open, unless what stays was in a plan's way; needed, even then.
  enum class Holes : std::uint8_t { kept, open, needed };
  Given allocate_dynamic(std::size_t bytes, Stream stream, Holes holes) noexcept;

  // Where the plan would have what is in the fallback for want of an arena, or has what lies in the arena; kDynamic: nowhere.
  void note_place(Address address, Offset place) noexcept;
  Offset place_of(Address address) noexcept;
  // This place in the arena, whatever the plan has there next; address 0: it is not free.
  Given take_place(Offset begin, std::size_t bytes, Stream stream);

  // The fallback's buffer `old` becomes one of `bytes` with its contents, without a copy, perhaps at another address.
  // Address 0: it cannot, and is as it was.
  struct Freed;
  Given resize(Address old, std::size_t bytes, Stream stream, Freed& before) noexcept;

  // --- free, for all three kinds
  struct Freed {
    enum Kind : std::uint8_t { foreign, arena, segment, small, graph, dead } kind = foreign;  // dead: ours, but nothing lives there
    std::size_t requested = 0;
    std::size_t rounded = 0;
    Stream stream = 0;  // its own
    Owner owner = 0;
    bool is_live() const noexcept { return kind != foreign && kind != dead; }
  };
  // What is used by other streams is over for the program, and its memory is free when they are through.
  Freed free(Address address, Stream stream) noexcept;
  // The straight way for what lives in the arena: its requested size; 0: nothing lives there, or it is not so simple.
  std::size_t free_in_arena(Address address, Stream stream) noexcept {
    if (!arena_holds(address) || !uses_.empty()) return 0;
    return release_in_arena(address, stream);
  }
  // --- of several clients, the one that counts a buffer
  Owners& owners() noexcept { return owners_; }
  Owner owner_in_arena(Address address) const noexcept {
    return arena_holds(address) ? occupancy_.at(address - arena_base_).owner : Owners::kWhoever;
  }
  void set_owner(Address address, Owner owner) noexcept;  // of a live one
  // Of a planned one, which was just taken.
  void set_owner(const Slot& slot, Owner owner) noexcept {
    occupancy_.set_owner(slot.cell, owner);
    owners_.begins(owner);
  }
  // Whether its free asks nothing of the device: nothing waits for streams, no graph's memory goes back, no event is needed,
  // and what is free stays.
  bool frees_at_once(Address address) const noexcept {
    if (!uses_.empty() || graphs_.pools() != 0 || options_.share_streams) return false;
    if (arena_holds(address)) return true;
    const Block* const block = segments_.find(address);
    return block == nullptr || segments_.keeps(block->size);
  }
  // What free() would say.
  Freed at(Address address) noexcept;
  // The requested size of a live buffer; `ours` false if no such buffer.
  std::size_t size_of(Address address, bool& ours) noexcept {
    const Freed found = at(address);
    ours = found.is_live();
    return found.requested;
  }

  // --- more than one stream
  // A live buffer is used by this stream too. False: no such buffer, or the stream is its own. May throw std::bad_alloc.
  bool use(Address address, Stream stream);
  // Memory of buffers that are over, as far as the streams that used them are through.
  void collect() noexcept {
    if (deferred_.current != 0) collect_deferred();
  }
  const Gauge& deferred() const noexcept { return deferred_; }  // bytes that wait for that
  struct Waiting {
    std::size_t blocks = 0, bytes = 0;
    void add(std::size_t more) noexcept { ++blocks, bytes += more; }
    void sub(std::size_t less) noexcept { --blocks, bytes -= less; }
  };
  const Waiting& deferred_small() const noexcept { return deferred_small_; }  // of these, what was asked for as small
  const ForeignUses& uses() const noexcept { return uses_; }

  // --- graphs that are captured
  bool capturing() const noexcept { return graphs_.begun(); }
  void begin_graph(GraphPools::Id id, GraphPools::Filter filter);  // may throw std::bad_alloc
  // No more requests are the graph's. `still`: it is being captured all the same; to be called again when it is not.
  void end_graph(GraphPools::Id id, bool still = false) noexcept;
  void release_graph(GraphPools::Id id) noexcept;
  const GraphPools& graphs() const noexcept { return graphs_; }
  bool capturing(GraphPools::Id id) noexcept { return graphs_.begun(id); }
  unsigned graph_uses(GraphPools::Id id) noexcept { return graphs_.uses(id); }  // begins without a release
  // Whether the request belongs to a graph; `given` is then what that has for it.
  bool allocate_for_graph(std::size_t bytes, Stream stream, Given& given) noexcept;

  // The reservation that a live buffer lies in: the arena, a segment, or a region of small ones.
  struct Range {
    Address base;
    std::size_t bytes;
  };
  Range reservation_of(Address address) noexcept;

  // --- giving back
  void trim() noexcept;                // free segments and small pages
  bool release_arena() noexcept;       // true if there is none afterwards
  // Where the arena has pages: what lives in it stays where it is, as the fallback's, and the rest of it is free for this stream
  // and whoever comes. Only after synchronize(), and not while a graph is captured. False: nothing has changed.
  bool dissolve_arena(Stream stream) noexcept;
  // Whether that was done lately: no arena is taken before the next boundary, and ever later where that is done again and again.
  bool dissolved() const noexcept { return !retakes_.is_due(boundaries()); }
  // Something that stays is in a plan's way, perhaps in a hole of the arena: those are for emergencies from now on.
  void shut_holes() noexcept { holes_shut_ = true; }
  void return_idle() noexcept;         // what was idle through the last two calls goes back
  // The same at a client's boundary: once each client that follows a plan has come to one. What the slower ones use in every
  // iteration of theirs is not idle.
  void return_idle_after(Client& client) noexcept;
  // Where giving back waits for the device, and so is done ever more rarely: what was idle since the last call, beyond an
  // eighth of the arena. Whether anything was.
  bool return_beside() noexcept;
  static constexpr std::size_t kMostBeside = 8;  // beside the arena, one part in so many of it
  // The clock's, once for all clients.
  std::chrono::steady_clock::time_point idle_returned{};

  // --- a budget for all that is held
  void set_budget(std::size_t bytes) noexcept { source_.set_budget(bytes, this); }
  // Bytes that can be had at once within it, when what is idle has gone back, or else in the largest hole of the arena. Negative: so
  // much is held beyond it.
  std::ptrdiff_t room() const noexcept;

  std::size_t round_up(std::size_t bytes) const noexcept {
    const std::size_t unit = source_.traits().alignment;
    return (bytes + unit - 1) & ~(unit - 1);  // a power of two
  }
  Owner adopt(Client* client);  // may throw std::bad_alloc
  void part(Client* client) noexcept;
  const std::vector<Client*>& clients() const noexcept { return clients_; }
  bool anyone_plays(const Client* but) const noexcept;  // another client is in the middle of its plan
  std::uint64_t boundaries() const noexcept;            // of all clients
  void layout_changed() noexcept { ++layouts_; }
  std::uint64_t layouts() const noexcept { return layouts_; }  // times that where some client's plans lie has changed
  void retain_as_wished() noexcept;                     // free memory is kept as the client wishes that wishes for most

  const PoolOptions& options() const noexcept { return options_; }
  MemorySource& source() noexcept { return source_; }
  Segments& segments() noexcept { return segments_; }
  const Segments& segments() const noexcept { return segments_; }
  const SmallBlocks& small() const noexcept { return small_; }
  Occupancy& occupancy() noexcept { return occupancy_; }
  const Occupancy& occupancy() const noexcept { return occupancy_; }
  Address arena_base() const noexcept { return arena_base_; }
  std::uint64_t retries() const noexcept { return retries_; }  // times that memory had to be given back to serve a request
  std::uint64_t waits() const noexcept { return waits_; }      // of these, those that waited for all streams
  ArenaStats arena_stats() const noexcept;
  std::size_t table_bytes() const noexcept;  // host memory of all plans and of the guard
  std::size_t live_blocks() const noexcept {
    return occupancy_.alive() + segments_.blocks() + small_.blocks() + graphs_.blocks();
  }
  bool foresees() const noexcept { return source_.traits().prefetches; }  // tells the device what comes next
  void set_forked() noexcept { forked_ = true; }
  bool forked() const noexcept { return forked_; }

 private:
  Refusal try_arena(std::size_t bytes) noexcept;
  void forget_arena() noexcept;  // it is gone, or somebody else's
  bool reserve_arena(std::size_t bytes) noexcept;
  bool may_be_had(std::size_t arena_bytes, bool in_place) noexcept;
  bool fits_beside(std::size_t stays, std::size_t more) noexcept;
  bool lies_in_arena(std::size_t bytes) noexcept;  // whether so much can be had once all that is free in the arena goes back
  void vacate(std::size_t arena_bytes) noexcept;  // for a larger arena
  bool within_budget(std::size_t arena_bytes, bool in_place) const noexcept;
  bool give_back_oldest() noexcept override { return segments_.give_back_oldest(); }
  Given from_segments(std::size_t bytes, Stream stream, Segments::Effort effort);
  Given from_hole(std::size_t bytes, Stream stream, bool anywhere);
  Given claim(Offset begin, std::size_t bytes, Stream stream, bool anywhere);
  Given last_resort(std::size_t bytes, Stream stream);
  void take_over_idle(std::size_t bytes, Stream stream);
  std::size_t planned_bytes() const noexcept;  // the largest arena any pattern needs that does not rest
  std::size_t release_in_arena(Address address, Stream stream) noexcept {
    const Offset begin = address - arena_base_;
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
  bool owns(Address address) const noexcept { return segments_.owns(address) || graphs_.owns(address); }  // in a segment
  void collect_deferred() noexcept;
  bool synchronize() noexcept;  // whether nothing is at work any more

  PoolOptions options_;
  std::unique_ptr<Device> device_;
  MemorySource source_;
  SmallBlocks small_;
  Segments segments_;
  Occupancy occupancy_;
  ArenaStreams streams_;
  ForeignUses uses_;
  GraphPools graphs_;
  bool is_small(const Freed& freed) const noexcept { return freed.requested <= options_.small_bytes; }

  Gauge deferred_;
  Waiting deferred_small_;
  Address arena_base_ = 0;
  std::optional<LiveArena> live_arena_;  // while there is one
  std::size_t arena_bytes_ = 0;     // committed, from the base
  std::size_t arena_space_ = 0;     // reserved address space
  Owners owners_;
  std::uint64_t arena_refused_ = 0, arena_dissolved_ = 0;
  std::uint64_t arena_since_ = 0;  // boundary
  Rarely retakes_{1, 64};          // boundaries; of an arena that was dissolved
  std::uint64_t retries_ = 0, waits_ = 0;
  std::size_t most_used_ = 0;       // bytes in use outside the arena, when more was asked for
  std::size_t left_alone_ = 1;      // times as much idle memory of other streams is left to those
  std::vector<Stream> deprived_;    // streams whose idle memory was taken over, and which have not come back
  bool holes_shut_ = false;
  Vacated vacated_;
  bool forked_ = false;             // a forked child gets no planned addresses
  std::vector<Client*> clients_;
  std::uint64_t past_boundaries_ = 0;  // of clients that are gone
  std::uint64_t layouts_ = 0;
};

}  // namespace mempool
