// Loops over single entries, such as `out[index[i]] += values[i]`: an operation on a few bytes that the iteration has repeated many
// times runs without the mode and is not recorded. Its storages count as accessed by the previous recorded operation. Included by
// interposer.cpp alone.
//
// Recording depends only on the sequence of operations, not on the location of storages, since otherwise equal
// iterations would differ.
#pragma once

#include "operations.hpp"

namespace {

struct Accessed {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
  bool written;
};

// Used by one thread.
struct Entries {
  static constexpr std::size_t kRecorded = 64;  // operations with one signature that an iteration records
  static constexpr std::size_t kRoomFor = 256;  // results, which may be kept: after as many, Python makes room
  static constexpr std::size_t kRecent = 8;     // operations whose storages are recent: as many as the body of a loop may have

  Place place;
  std::thread::id thread;
  std::size_t small_bytes = 0;  // smaller storages do not move; an operation on single entries is given no more bytes
  std::unordered_map<std::uint64_t, std::size_t> counts;  // operations in this iteration, by the signature that the mode has taught
  std::array<Addresses, kRecent> recent;
  std::size_t next = 0, results = 0;
  WeakStorages<Accessed> accessed;  // since the last recorded operation

  bool is_here() const { return std::this_thread::get_id() == thread; }

  // Note the storages of a recorded operation, whose stream the engine knows.
  void note(Addresses storages, c10::StreamId stream) {
    if (!is_here() || storages.empty()) return;
    recent[next++ % kRecent] = std::move(storages);
    place.stream = stream;
  }
  bool is_recent(const c10::StorageImpl* storage) const {
    return std::any_of(recent.begin(), recent.end(),
                       [&](const auto& one) { return std::find(one.begin(), one.end(), storage) != one.end(); });
  }
  bool moves(const c10::Storage& storage) const { return storage.nbytes() >= small_bytes; }
};

// Held during writes of entries of a parked storage, and during reloads, which another thread may make for other
// entries.
std::mutex landing_mutex;
std::atomic<std::uint64_t> entry_writes{0};  // to parked storages

Entries& entries() {
  static auto* const made = new Entries;
  return *made;
}

std::size_t bytes_given(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().numel() * value.toTensor().element_size() : 0;
  std::size_t bytes = 0;
  if (value.isList())
    for (const c10::IValue& one : value.toListRef()) bytes += bytes_given(one);
  return bytes;
}

// Return whether an operation's arguments have at most single entries of tensors.
bool is_given_entries(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::size_t most) {
  std::size_t bytes = 0;
  for (auto at = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()); at != stack.end(); ++at) {
    if (has_dispatching_tensor(*at) || (at->isTensor() && at->toTensor().defined() && !at->toTensor().has_storage())) return false;
    if ((bytes += bytes_given(*at)) > most) return false;
  }
  return true;
}

// Run an operation of a loop over single entries without the mode `only`. Return false for others.
bool run_entry(const c10::OperatorHandle& op, const Operation& operation, const void* only, DispatchKeySet below,
               torch::jit::Stack* stack, bool is_followed) {
  static const c10::OperatorHandle reload = function_named("mempool_interposer::reload");
  Entries& all = entries();
  if (!operation.has_entries || !all.is_here() || !is_given_entries(op, *stack, all.small_bytes) || !all.place.is_here(only)) return false;
  Storages storages;
  const auto found = all.counts.find(signature_of(op, *stack, operation, all.place.device, storages));
  if (found == all.counts.end() || ++found->second <= Entries::kRecorded) return false;
  const Storages written = written_by(operation, op, *stack, all.place.device);
  static const c10::OperatorHandle make_room = function_named("mempool_interposer::make_room");
  if (written.empty() && ++all.results % Entries::kRoomFor == 0) call_python(make_room, {all.place.device == c10::DeviceType::CUDA});
  const auto is_known = [&](const c10::Storage* one) { return !all.moves(*one) || all.is_recent(one->unsafeGetStorageImpl()); };
  if (!std::all_of(storages.begin(), storages.end(), is_known)) return false;
  if (is_any_parked(storages)) {
    call_python(reload, {parked_among(storages)});  // on a CPU, those on the way back only: others are accessed in their host copies
    if (all.place.device != c10::DeviceType::CPU && is_any_parked(storages)) return false;
  }
  watched().remove(written);
  if (!is_followed) {
    for (const c10::Storage* one : storages)
      if (all.moves(*one)) all.accessed.try_emplace(one->unsafeGetStorageImpl(), Accessed{one->getWeakStorageImpl(), false});
    for (const c10::Storage* one : written)
      if (const auto found = all.accessed.find(one->unsafeGetStorageImpl()); found != all.accessed.end()) found->second.written = true;
  }
  struct CopyWrite {
    std::unique_lock<std::mutex> lock;
    ~CopyWrite() {
      if (lock.owns_lock()) ++entry_writes;  // before the lock is released
    }
  };
  CopyWrite write{written.empty() ? std::unique_lock<std::mutex>{} : std::unique_lock(landing_mutex)};
  if (write.lock.owns_lock() && !is_any_parked(written)) write.lock.unlock();
  return run_hidden(op, below, stack, operation.traits.repeatable);
}

// Return uint8[n] over the storages accessed since the last recorded operation, and for each whether it was written; forget them.
std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> accessed_storages() {
  std::tuple<std::vector<at::Tensor>, std::vector<std::int64_t>> found;
  for (const auto& [_, one] : std::exchange(entries().accessed, {})) {
    if (auto storage = one.storage.lock(); storage && storage->nbytes() > 0) {
      std::get<0>(found).push_back(bytes_of(std::move(storage)));
      std::get<1>(found).push_back(one.written ? 1 : 0);
    }
  }
  return found;
}

}  // namespace

// Begin an iteration of a mode in this thread. Smaller storages than `small_bytes` do not move.
MEMPOOL_EXPORT void mempool_entries_begin(const void* mode, int cuda, std::size_t small_bytes) {
  Entries& all = entries();
  if (all.place.mode.load() != mode) all.counts.clear();
  all.place.set(mode, cuda != 0);
  all.thread = std::this_thread::get_id();
  all.small_bytes = small_bytes;
  for (auto& [_, count] : all.counts) count = 0;
  for (auto& one : all.recent) one.clear();
  all.accessed.clear();
}

// Learn that the operation on its way to the mode needs memory for at most single entries.
MEMPOOL_EXPORT void mempool_entries_learn(const char* name, const char* overload) {
  Entries& all = entries();
  Operation* const found = all.is_here() ? awaited_operation(name, overload) : nullptr;
  if (found == nullptr || found->traits.composite || found->traits.inert || awaited.back().entry == 0) return;
  if (all.counts.size() >= kMostKnown) return;
  all.counts.try_emplace(awaited.back().entry, 1);
  found->has_entries = true;
}

// Return the number of storages accessed since the last recorded operation.
MEMPOOL_EXPORT std::size_t mempool_entries_accessed() { return entries().accessed.size(); }
