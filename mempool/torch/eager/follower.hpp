// Follows an offload schedule: operations that repeat the recorded iteration run without the mode, and call Python only
// for moves that moves.hpp does not make (schedule_follower.py). Included by interposer.cpp alone.
//
// The follower never decides that an iteration diverges: an unexpected operation goes to the mode, which decides.
#pragma once

#include "entries.hpp"
#include "moves.hpp"

// torch/csrc/autograd/engine.h, which takes seconds to compile
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace {

// An operation of the schedule.
struct Expected {
  enum Action : std::uint8_t { kBefore = 1, kAfter = 2, kSeen = 4 };  // kSeen: the mode must see the operation
  const c10::FunctionSchema* schema = nullptr;
  std::uint64_t signature = 0;
  std::int64_t need = 0;  // bytes of results and workspace
  std::uint8_t actions = 0;
  std::vector<Move> before{}, after{};  // if moves.hpp makes the moves
};

constexpr std::int64_t kUnknown = -1, kOlder = -2;

struct Made {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
  std::int64_t born;  // operation << 16 | place among the results; kOlder: of an earlier iteration
};

// Storages made by followed operations, in the order of their births. A reference to an ended storage keeps the memory of its object,
// and is removed soon, so that the next storages take the same memory.
class MadeStorages {
 public:
  void add(const c10::Storage& storage, std::int64_t born) {
    if (recent_.size() == kRecent) settle();
    recent_.push_back({storage.getWeakStorageImpl(), born});
  }
  // Return all that may be alive.
  std::vector<Made>& settled() {
    settle();
    return settled_;
  }

 private:
  static constexpr std::size_t kRecent = 64;        // most results live for fewer operations
  static constexpr std::size_t kLeastSwept = 1024;  // a sweep then costs less than the operations since the last sweep

  void settle() {
    std::copy_if(std::move_iterator(recent_.begin()), std::move_iterator(recent_.end()), std::back_inserter(settled_),
                 [](const Made& one) { return !one.storage.expired(); });
    recent_.clear();
    if (settled_.size() < sweep_at_) return;
    std::erase_if(settled_, [](const Made& one) { return one.storage.expired(); });
    sweep_at_ = std::max(kLeastSwept, 2 * settled_.size());
  }

  std::vector<Made> recent_, settled_;
  std::size_t sweep_at_ = kLeastSwept;
};

// Used by the thread of the program's operations, and by a thread of autograd's engine. If both run operations
// concurrently, as for a graph with parts on the CPU, the second one sends its operation to the mode.
struct Follower {
  enum State { kOff, kLearning, kFollowing };
  std::atomic<State> state{kOff};
  Place place;
  std::thread::id thread;
  const std::vector<Expected>* expected = nullptr;
  std::size_t at = 0;
  bool sends_next = false;  // to the mode, which must act before the next operation
  std::int64_t (*misses)(void*) = nullptr;
  std::int64_t (*unplanned)(void*, std::int64_t) = nullptr;
  void* client = nullptr;
  std::int64_t misses_before = 0;
  std::int64_t checked_bytes = 0;  // operations with at least this need check for misses of the pool's plan
  std::int64_t (*room)(void*) = nullptr;
  bool is_checked = false;  // whether to check for room; false while the pool has slots for all planned buffers
  std::int64_t foreign_bytes = 0;  // bytes of storages outside the pool, which count against the limit too
  std::atomic<bool> busy{false};
  std::mutex made_mutex;  // of `made`; any thread may ask for a storage
  MadeStorages made;
  std::uint64_t followed = 0;

  bool is_following() const { return state.load(std::memory_order_acquire) == kFollowing; }

  // Return whether the pool may lack `need` bytes.
  bool may_lack(std::int64_t need) {
    is_checked = is_checked || (need >= checked_bytes && (misses(client) != misses_before || unplanned(client, need) == need));
    return is_checked && need > 0 && room(client) - foreign_bytes < need;
  }

  // Return whether to follow, or learn, an operation that would reach the mode `only`.
  bool is_here(const void* only) const {
    if (state.load(std::memory_order_acquire) == kOff || !place.is_here(only)) return false;
    return std::this_thread::get_id() == thread ||
           (place.device.load() != c10::DeviceType::CPU && torch::autograd::get_current_graph_task_id() != -1);
  }
};

Follower& follower() {
  static auto* const made = new Follower;
  return *made;
}

// Record the new storages among the results, and bind and offload the storages that move.
void end_followed(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Addresses& given, const Expected& expected) {
  static const c10::OperatorHandle after = function_named("mempool_interposer::after");
  Follower& all = follower();
  const bool calls = (expected.actions & Expected::kAfter) != 0;
  const auto at = static_cast<std::int64_t>(all.at++);  // Ctrl-C may end the call
  Storages results;
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()); value != stack.end(); ++value)
    add_storages(*value, all.place.device, results);
  Storages fresh;
  std::int64_t place = 0;
  std::unique_lock lock(all.made_mutex);
  Addresses known = given;
  for (const c10::Storage* one : results) {
    const c10::StorageImpl* const storage = one->unsafeGetStorageImpl();
    if (one->nbytes() == 0 || std::find(known.begin(), known.end(), storage) != known.end()) continue;
    all.made.add(*one, at << 16 | place++);
    if (calls) fresh.push_back(one);
    if (results.size() > 1) known.push_back(storage);
  }
  lock.unlock();
  ++all.followed;
  if (!calls || moves().make_after(all.expected, expected.after, fresh)) return;
  c10::List<at::Tensor> tensors;
  for (const c10::Storage* one : fresh) tensors.push_back(bytes_of(*one));
  call_python(after, {tensors, at});
}

// Run an operation without the mode if it is the expected one. Return false if it must go to the mode.
bool run_followed(const c10::OperatorHandle& op, const Operation& operation, DispatchKeySet below, torch::jit::Stack* stack) {
  static const c10::OperatorHandle before = function_named("mempool_interposer::before");
  Follower& all = follower();
  if (!all.is_following() || std::exchange(all.sends_next, false)) return false;
  struct Busy {
    std::atomic<bool>& flag;
    bool mine = !flag.exchange(true);
    ~Busy() {
      if (mine) flag = false;
    }
  };
  const Busy busy{all.busy};
  if (!busy.mine) return false;
  if (operation.traits.composite || all.at >= all.expected->size()) return false;
  const Expected* const expected = &(*all.expected)[all.at];
  Storages storages;
  if (expected->schema != &op.schema() || (expected->actions & Expected::kSeen) != 0 ||
      signature_of(op, *stack, operation, all.place.device, storages) != expected->signature) return false;
  const Storages written = written_by(operation, op, *stack, all.place.device);
  const auto at = static_cast<std::int64_t>(all.at);
  if ((expected->actions & Expected::kBefore) != 0 || is_any_parked(storages)) {
    const bool are_made = moves().make_before(all.expected, expected->before, storages, [&](std::int64_t need) { return all.may_lack(need); });
    if (!are_made || is_any_parked(storages)) call_python(before, {parked_among(storages), at});
    // the moves due may have parked an argument that the schedule does not expect here
    if (is_any_parked(storages)) call_python(before, {parked_among(storages), at});
    if (!all.is_following() || is_any_parked(storages)) return false;
  }
  if (all.may_lack(expected->need)) return false;  // after the moves due, which make room
  watched().remove(written);
  const Addresses given = addresses_of(storages);
  if (!run_hidden(op, below, stack, operation.traits.repeatable && expected->need > 0)) return false;
  entries().note(given, all.place.stream);
  end_followed(op, *stack, given, *expected);
  return true;
}

// Return uint8 tensors of the living storages that followed operations made, in earlier iterations only with `older`, and for each
// `Made::born`. Forget them.
std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> made_storages(bool older) {
  Follower& all = follower();
  std::vector<std::pair<std::int64_t, c10::Storage>> alive;
  {
    const std::lock_guard lock(all.made_mutex);
    std::erase_if(all.made.settled(), [&](const Made& one) {
      if (older && one.born != kOlder) return false;
      if (auto storage = one.storage.lock(); storage && storage->nbytes() > 0) alive.emplace_back(one.born, std::move(storage));
      return true;
    });
  }
  std::sort(alive.begin(), alive.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> found;
  for (auto& [born, storage] : alive) {
    std::get<0>(found).push_back(bytes_of(std::move(storage)));
    std::get<1>(found).push_back(born);
  }
  return found;
}

}  // namespace

MEMPOOL_EXPORT std::vector<Expected>* mempool_follower_table() { return new std::vector<Expected>; }
MEMPOOL_EXPORT void mempool_follower_free(std::vector<Expected>* table) { delete table; }

// Learn the operation on its way to the mode as the next operation of a table, or compare it with the known operation.
// `need`: bytes of results and workspace; negative: the mode must see the operation. Return 1 if known and equal.
MEMPOOL_EXPORT int mempool_follower_learn(std::vector<Expected>* table, std::size_t at, const char* name, const char* overload,
                                          std::int64_t need) {
  Expected learned{};
  learned.actions = Expected::kSeen;
  if (need >= 0 && awaited_operation(name, overload) != nullptr && awaited.back().signature != 0)
    learned = {awaited.back().schema, awaited.back().signature, need, 0};
  if (at >= table->size()) {
    table->resize(at);
    table->push_back(learned);
    return 0;
  }
  Expected& known = (*table)[at];
  if ((known.actions & Expected::kSeen) != 0) return 1;
  const bool same = learned.schema == known.schema && learned.signature == known.signature;
  if (same) {
    known.need = std::max(known.need, need);
  } else {
    known = {};
    known.actions = Expected::kSeen;
  }
  return same ? 1 : 0;
}

// Set the actions due at each of the `size` operations of a table.
MEMPOOL_EXPORT void mempool_follower_set_actions(std::vector<Expected>* table, const std::uint8_t* actions, std::size_t size) {
  for (std::size_t at = 0; at < std::min(size, table->size()); ++at) {
    Expected& one = (*table)[at];
    one.actions = static_cast<std::uint8_t>((one.actions & Expected::kSeen) | actions[at]);
  }
}

// Set the moves for moves.hpp: for each of the `size` moves, operation, kind, row among the rows that move, and place.
MEMPOOL_EXPORT void mempool_follower_set_moves(std::vector<Expected>* table, const std::int64_t* moves, std::size_t size) {
  for (const std::int64_t* one = moves; one != moves + 4 * size; one += 4) {
    const Move move{static_cast<Move::Kind>(one[1]), static_cast<std::size_t>(one[2]), one[3]};
    Expected& at = table->at(static_cast<std::size_t>(one[0]));
    (move.kind == Move::kRelease || move.kind == Move::kReload ? at.before : at.after).push_back(move);
  }
}

// Prepare to learn operations on their way to the mode. Return 0 if another mode's schedule is followed.
MEMPOOL_EXPORT int mempool_follower_await(const void* mode, int cuda) {
  Follower& all = follower();
  if (all.is_following()) return 0;
  all.place.set(mode, cuda != 0);
  all.thread = std::this_thread::get_id();
  all.state.store(Follower::kLearning, std::memory_order_release);
  return 1;
}

// Follow a table from operation `at`, or with `sends_next` from the operation after it; with `is_checked`, only while
// the pool has room for results. Return 0 if another mode's schedule is followed.
MEMPOOL_EXPORT int mempool_follower_start(const std::vector<Expected>* table, std::size_t at, int sends_next, const void* mode, int cuda,
                                          std::int64_t (*misses)(void*), std::int64_t (*unplanned)(void*, std::int64_t),
                                          std::int64_t (*room)(void*), void* client,
                                          std::int64_t misses_before, int is_checked, std::int64_t checked_bytes,
                                          std::int64_t foreign_bytes) {
  if (mempool_follower_await(mode, cuda) == 0) return 0;
  Follower& all = follower();
  all.expected = table;
  all.at = at;
  all.sends_next = sends_next != 0;
  all.misses = misses;
  all.unplanned = unplanned;
  all.client = client;
  all.misses_before = misses_before;
  all.checked_bytes = checked_bytes;
  all.room = room;
  all.is_checked = is_checked != 0;
  all.foreign_bytes = foreign_bytes;
  all.state.store(Follower::kFollowing, std::memory_order_release);
  records.stop();
  return 1;
}

// End an iteration: living storages now count as made in an earlier iteration.
MEMPOOL_EXPORT void mempool_follower_end_iteration() {
  Follower& all = follower();
  const std::lock_guard lock(all.made_mutex);
  for (Made& one : all.made.settled()) one.born = kOlder;
}

MEMPOOL_EXPORT void mempool_follower_stop() {
  follower().state.store(Follower::kOff, std::memory_order_release);
  records.resume();
}
MEMPOOL_EXPORT std::size_t mempool_follower_position() { return follower().at; }
MEMPOOL_EXPORT void mempool_follower_advance(std::size_t at) { follower().at = at; }
MEMPOOL_EXPORT std::uint64_t mempool_follower_count() { return follower().followed; }

// Return the number of storages made by followed operations that are not registered.
MEMPOOL_EXPORT std::size_t mempool_follower_made() {
  Follower& all = follower();
  const std::lock_guard lock(all.made_mutex);
  return all.made.settled().size();
}

// Return the number of those that live and were made in earlier iterations.
MEMPOOL_EXPORT std::size_t mempool_follower_older() {
  Follower& all = follower();
  const std::lock_guard lock(all.made_mutex);
  return static_cast<std::size_t>(std::count_if(all.made.settled().begin(), all.made.settled().end(), [](const Made& one) {
    return one.born == kOlder && !one.storage.expired();
  }));
}

// Return the operation << 16 | place of a storage that a followed operation made in this iteration; kOlder: in an earlier one;
// kUnknown: none did.
MEMPOOL_EXPORT std::int64_t mempool_follower_born(const c10::StorageImpl* storage) {
  Follower& all = follower();
  const std::lock_guard lock(all.made_mutex);
  const std::vector<Made>& made = all.made.settled();
  const auto found =
      std::find_if(made.begin(), made.end(), [&](const Made& one) { return one.storage._unsafe_get_target() == storage; });
  return found == made.end() ? kUnknown : found->born;
}
