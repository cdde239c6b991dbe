// The moves of a followed schedule on a GPU, made without Python (native_moves.py). Included by interposer.cpp alone.
//
// While the moves are here, Python makes none: any of Python's uses of a storage that may move ends them first (`end`), which waits
// for the transfers under way and returns the location of each storage. One stream of the program takes part.
//
// A copy lies at the schedule's place in a range on the host, without a free list. The next copy at that place may begin after the
// last one's `kDropCopy`, which ends the native moves if the storage is not resident: until then its bytes are in the copy. The
// stream that copies from the device waits for the program's stream, which has waited for all reloads of resident storages.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <deque>
#include <thread>

#include "entries.hpp"

extern "C" {
int mempool_interposer_park(c10::StorageImpl* storage, void* copy, std::uint64_t writes);
int mempool_interposer_land(c10::StorageImpl* storage, c10::StorageImpl* landing, std::uint64_t writes);
c10::Allocator* mempool_interposer_allocator(c10::StorageImpl* storage);
std::uint64_t mempool_interposer_copy_writes();
}

namespace {

// An action of the schedule at an operation, in the order in which Python would make them.
struct Move {
  enum Kind : std::int64_t { kRelease, kReload, kBind, kDropCopy, kOffload };
  Kind kind;
  std::size_t row;
  std::int64_t place;  // kBind: index among the operation's new storages; kOffload: offset of the copy in the range
};

// Copies by the pool's core, see `CopyFunctions` in cuda_copies.hpp.
struct CopyFunctions {
  void* (*copy)(const void* copies, void* stream, std::uint64_t target, std::uint64_t source, std::size_t size, void* after);
  int (*has_passed)(const void* event);
  int (*order_before)(const void* event, void* stream);
  void (*release)(void* event);
};

class Moves {
 public:
  // As in storages.py.
  enum State : std::int64_t { kResident, kOffloading, kOffloaded, kReloading };

  struct Engine {
    const void* table;  // of the expected operations that have the moves
    const CopyFunctions* functions;
    const void* copies;
    void *program, *out, *in;  // streams
    std::uint64_t host;        // address of the host's arena
    std::int64_t base;         // offset there of the range for the schedule's copies
    std::size_t least_bytes;   // smaller storages do not move
    std::size_t alignment;     // of the rows' sizes
  };

  struct Counts {
    std::int64_t out_bytes, in_bytes, delayed, waits, waited_nanoseconds;
  };

  // `number`: of the beginning, for `end`.
  void begin(std::int64_t number, const Engine& engine, const std::int64_t* bytes, std::size_t rows) {
    const std::lock_guard lock(mutex_);
    number_ = number;
    engine_ = engine;
    stream_ = current_stream(entries().place.device);
    rows_ = std::vector<Row>(rows);
    for (std::size_t at = 0; at < rows; ++at) rows_[at].bytes = static_cast<std::size_t>(bytes[at]);
    row_of_.clear();
    is_active_ = true;
  }

  // Bind a persistent storage, resident or with its bytes at offset `copy` on the host only; a resident storage may have a valid
  // copy there, too.
  void bind_persistent(std::size_t row, c10::StorageImpl* storage, bool is_offloaded, std::int64_t copy, std::uint64_t writes) {
    const std::lock_guard lock(mutex_);
    bind(row, c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)));
    rows_[row].is_persistent = true;
    rows_[row].state = is_offloaded ? kOffloaded : kResident;
    rows_[row].copy = copy;
    rows_[row].writes = writes;
  }

  // Make the moves due before an operation, and wait for its arguments. Return false if Python must act.
  template <class MayLack>
  bool make_before(const void* table, const std::vector<Move>& moves, const Storages& arguments, MayLack may_lack) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || !makes_moves_of(table)) return false;
    for (const Move& move : moves) {
      Row& row = rows_[move.row];
      if (move.kind == Move::kRelease) {
        release(row);
      } else if (row.state == kOffloaded && may_lack(static_cast<std::int64_t>(row.bytes))) {
        ++counts_.delayed;
      } else if (!reload(row)) {
        return false;
      }
    }
    for (const c10::Storage* one : arguments)
      if (is_parked(*one))
        if (const auto found = row_of_.find(one->unsafeGetStorageImpl()); found != row_of_.end()) wait(rows_[found->second]);
    return true;
  }

  // Bind an operation's new storages, and start the offloads due after the operation. Return false if Python must act.
  bool make_after(const void* table, const std::vector<Move>& moves, const Storages& results) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || !makes_moves_of(table)) return false;
    for (const Move& move : moves) {
      Row& row = rows_[move.row];
      if (move.kind == Move::kBind) {
        if (static_cast<std::size_t>(move.place) >= results.size()) continue;
        const c10::Storage& storage = *results[static_cast<std::size_t>(move.place)];
        if (!is_expected(row, storage.nbytes())) return false;
        bind(move.row, storage.getWeakStorageImpl());
      } else if (move.kind == Move::kDropCopy) {
        if (row.state != kResident && !row.storage->expired()) return false;  // another storage's copy would overwrite this one
        row.copy = -1;
      } else if (!offload(row, engine_.base + move.place)) {
        return false;
      }
    }
    return true;
  }

  // End an iteration: forget its storages. Return false if one of them lives on in a state that Python does not expect.
  bool end_iteration() {
    const std::lock_guard lock(mutex_);
    for (Row& row : rows_) {
      if (row.is_persistent || !row.storage) continue;
      if (row.storage->expired()) {
        wait(row);
      } else if (row.state != kResident || row.copy >= 0) {
        return false;
      }
      unbind(row);
    }
    return true;
  }

  // Let Python make the moves from now on. Wait for the transfers under way, and return uint8[n] of each bound storage, and per
  // storage: row, state, offset of a valid copy on the host or -1. Later calls return the same; nothing if `begin` had another number.
  std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> end(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> found;
    if (number != number_) return found;
    is_active_ = false;
    for (std::size_t at = 0; at < rows_.size(); ++at) {
      Row& row = rows_[at];
      wait(row);
      c10::Storage storage = row.storage ? c10::Storage(row.storage->lock()) : c10::Storage();
      if (!storage) continue;
      std::get<0>(found).push_back(bytes_of(std::move(storage)));
      const bool has_copy = row.state == kOffloaded || is_valid(row);
      for (const std::int64_t value : {static_cast<std::int64_t>(at), std::int64_t{row.state}, has_copy ? row.copy : -1})
        std::get<1>(found).push_back(value);
    }
    return found;
  }

  // Return the counts since the last call; the time of a wait counts once the device has passed the wait.
  Counts take_counts() {
    const std::lock_guard lock(mutex_);
    try {
      for (; !waits_.empty() && waits_.front().after.query(); waits_.pop_front())
        counts_.waited_nanoseconds += static_cast<std::int64_t>(1e6 * waits_.front().before.elapsedTime(waits_.front().after));
    } catch (const c10::Error&) {  // in a forked child
      waits_.clear();
    }
    return std::exchange(counts_, {});
  }

 private:
  struct Row {
    std::size_t bytes = 0;  // of device memory
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage{};
    bool is_persistent = false;
    State state = kResident;
    std::int64_t copy = -1;    // offset on the host
    std::uint64_t writes = 0;  // unseen writes when the copy was started
    void* ended = nullptr;     // event after the transfer under way
    c10::intrusive_ptr<c10::StorageImpl> kept{};     // the storage while an offload reads its memory
    c10::intrusive_ptr<c10::StorageImpl> landing{};  // new device memory while a reload fills it
    std::uint64_t copy_writes = 0;                   // when the reload began
  };

  struct Wait {
    c10::Event before, after;
  };
  static constexpr std::size_t kTimedWaits = 4096;  // at most, as in options.py

  // Ctrl-C may let the follower start with another table while the moves of the last one are here.
  bool makes_moves_of(const void* table) const { return is_active_ && engine_.table == table; }

  void bind(std::size_t at, c10::weak_intrusive_ptr<c10::StorageImpl> storage) {
    Row& row = rows_[at];
    wait(row);
    unbind(row);
    row_of_[storage._unsafe_get_target()] = at;
    row.storage = std::move(storage);
  }

  void unbind(Row& row) {
    if (row.storage) row_of_.erase(row.storage->_unsafe_get_target());
    row.storage.reset();
    row.state = kResident;
    row.copy = -1;
  }

  c10::intrusive_ptr<c10::StorageImpl> storage_of(const Row& row) const {
    return row.storage ? row.storage->lock() : c10::intrusive_ptr<c10::StorageImpl>();
  }

  bool is_expected(const Row& row, std::size_t bytes) const {
    return (bytes + engine_.alignment - 1) / engine_.alignment * engine_.alignment == row.bytes;
  }

  bool is_valid(const Row& row) const {
    return row.copy >= 0 && row.writes == unseen_writes.load() && watched().has(row.storage->_unsafe_get_target());
  }

  // Return false if the storage no longer has the size or kind of the recorded one, or the driver refuses.
  bool offload(Row& row, std::int64_t place) {
    auto storage = storage_of(row);
    if (!storage || row.state == kOffloaded || row.state == kReloading || is_valid(row)) return true;
    if (stream_ && storage->device() != stream_->device()) return true;  // of another GPU: it stays there
    wait(row);  // written since the copy was started
    if (!is_expected(row, storage->nbytes()) || storage->nbytes() < engine_.least_bytes || !storage->resizable()) return false;
    const auto address = reinterpret_cast<std::uint64_t>(storage->data_ptr().get());
    if (address == 0) return false;
    release_finished();
    row.copy = -1;
    row.writes = unseen_writes.load();
    row.ended = engine_.functions->copy(engine_.copies, engine_.out, engine_.host + static_cast<std::uint64_t>(place), address,
                                        storage->nbytes(), engine_.program);
    if (row.ended == nullptr) return false;
    watched().add(storage.get());
    row.copy = place;
    row.state = kOffloading;
    counts_.out_bytes += static_cast<std::int64_t>(storage->nbytes());
    row.kept = std::move(storage);
    return true;
  }

  void release(Row& row) {
    wait(row);
    const auto storage = storage_of(row);
    if (!storage || row.state != kResident || !is_valid(row)) return;
    void* const copy = reinterpret_cast<void*>(engine_.host + static_cast<std::uint64_t>(row.copy));
    if (mempool_interposer_park(storage.get(), copy, row.writes) != 0) row.state = kOffloaded;
  }

  // Return false if the driver refuses, or the pool has no memory.
  bool reload(Row& row) {
    const auto storage = storage_of(row);
    if (!storage || row.state != kOffloaded) return true;
    release_finished();
    const c10::DeviceGuard guard(storage->device());  // the program may have another current one
    try {
      row.landing = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                                                          mempool_interposer_allocator(storage.get()), true);
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
    if (!start_reload(row)) {
      row.landing.reset();
      return false;
    }
    row.state = kReloading;
    counts_.in_bytes += static_cast<std::int64_t>(storage->nbytes());
    return true;
  }

  bool start_reload(Row& row) {
    row.copy_writes = mempool_interposer_copy_writes();
    row.ended = engine_.functions->copy(engine_.copies, engine_.in, reinterpret_cast<std::uint64_t>(row.landing->mutable_data()),
                                        engine_.host + static_cast<std::uint64_t>(row.copy), row.landing->nbytes(), engine_.program);
    return row.ended != nullptr;
  }

  // Let the program's stream wait for the row's transfer.
  void wait(Row& row) {
    if (row.state != kOffloading && row.state != kReloading) return;
    order(row);
    if (row.state == kReloading) {
      const auto storage = storage_of(row);
      // the host copy may have been written meanwhile
      while (storage && mempool_interposer_land(storage.get(), row.landing.get(), row.copy_writes) == 0 && start_reload(row)) order(row);
      row.landing.reset();
    }
    row.kept.reset();
    row.state = kResident;
  }

  void order(Row& row) {
    void* const ended = std::exchange(row.ended, nullptr);
    if (engine_.functions->has_passed(ended) == 0) {
      ++counts_.waits;
      std::optional<c10::Event> before = moment();
      if (engine_.functions->order_before(ended, engine_.program) == 0)  // refused: this thread waits in place of the stream
        while (engine_.functions->has_passed(ended) == 0) std::this_thread::yield();
      if (std::optional<c10::Event> after = moment(); before && after) waits_.push_back({*std::move(before), *std::move(after)});
      if (waits_.size() > kTimedWaits) waits_.pop_front();
    }
    engine_.functions->release(ended);
  }

  // Return the program's stream's present moment for measurements; nothing on a CPU, or where CUDA refuses.
  std::optional<c10::Event> moment() const {
    if (!stream_) return {};
    try {
      c10::Event event(stream_->device_type(), c10::EventFlag::BACKEND_DEFAULT);
      event.record(*stream_);
      return event;
    } catch (const c10::Error&) {
      return {};
    }
  }

  // Release the storages whose offloads have ended.
  void release_finished() {
    for (Row& row : rows_)
      if (row.kept && engine_.functions->has_passed(row.ended) != 0) row.kept.reset();
  }

  // Guards all below. An operation does not wait for this lock: the operation may hold Python's lock, which `end` in another thread
  // may need, as references to storages count in Python, too.
  std::mutex mutex_;
  bool is_active_ = false;
  std::int64_t number_ = 0;
  Engine engine_{};
  std::vector<Row> rows_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> row_of_;
  Counts counts_{};
  std::optional<c10::Stream> stream_{};  // the program's; nothing on a CPU
  std::deque<Wait> waits_;               // of the program's stream, not measured yet
};

Moves& moves() {
  static auto* const made = new Moves;  // operations may run until the very end
  return *made;
}

}  // namespace

// Make the moves of a followed schedule whose rows that move have these sizes, until `Moves::end`.
MEMPOOL_EXPORT void mempool_moves_begin(std::int64_t number, const void* table, const void* functions, const void* copies, void* program, void* out, void* in, std::uint64_t host,
                                        std::int64_t base, std::size_t least_bytes, std::size_t alignment, const std::int64_t* bytes, std::size_t rows) {
  moves().begin(number, {table, static_cast<const CopyFunctions*>(functions), copies, program, out, in, host, base, least_bytes, alignment}, bytes, rows);
}
MEMPOOL_EXPORT void mempool_moves_bind(std::size_t row, c10::StorageImpl* storage, int is_offloaded, std::int64_t copy, std::uint64_t writes) {
  moves().bind_persistent(row, storage, is_offloaded != 0, copy, writes);
}
MEMPOOL_EXPORT int mempool_moves_end_iteration() { return moves().end_iteration() ? 1 : 0; }

// Write bytes offloaded and reloaded, reloads without room, waits, and nanoseconds waited since the last call to `counts`.
MEMPOOL_EXPORT void mempool_moves_counts(std::int64_t* counts) {
  const Moves::Counts taken = moves().take_counts();
  counts[0] = taken.out_bytes;
  counts[1] = taken.in_bytes;
  counts[2] = taken.delayed;
  counts[3] = taken.waits;
  counts[4] = taken.waited_nanoseconds;
}
