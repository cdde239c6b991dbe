// Bypass: operations skip the mode while nothing has to move (bypass.py). Included by interposer.cpp alone.
#pragma once

#include "operations.hpp"

namespace {

struct Used {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
  std::uint64_t last;
  bool blank;  // not written yet: a C++ function may write next, past the dispatcher
};

struct Bypass {
  std::atomic<bool> open{false};
  Place place;  // written while it is not open
  std::mutex mutex;  // of all below
  std::int64_t (*room)(void*) = nullptr;
  std::int64_t (*unplanned)(void*, std::int64_t) = nullptr;
  void* client = nullptr;
  std::int64_t reserve = 0;
  std::unordered_map<std::uint64_t, std::int64_t> needs;  // bytes, by signature of operation and arguments
  WeakStorages<Used> used;
  std::uint64_t clock = 0;
  std::uint64_t passed = 0;

  // Return whether the pool lacks room for the unplanned part of `need` bytes.
  bool lacks(std::int64_t need) const {
    const std::int64_t left = room(client);
    return left - need < reserve && left - unplanned(client, need) < reserve;
  }

  // Record a use by the current operation, and return whether the storage is known. A view leaves an unwritten storage
  // unwritten.
  bool use(const c10::Storage& storage, bool views) {
    const auto found = used.find(storage.unsafeGetStorageImpl());
    if (found == used.end()) {
      if (!views) add(storage, false);
      return false;
    }
    found->second.last = clock;
    found->second.blank &= views;
    return true;
  }

  void add(const c10::Storage& storage, bool blank) {
    used.try_emplace(storage.unsafeGetStorageImpl(), Used{storage.getWeakStorageImpl(), clock, blank});
  }
};

Bypass& bypass() {
  static auto* const made = new Bypass;  // operations may run until the very end
  return *made;
}

void run_bypassed(const c10::OperatorHandle& op, const Operation& operation, DispatchKeySet below, torch::jit::Stack* stack) {
  Bypass& all = bypass();
  const bool inert = operation.traits.inert, views = operation.views;
  std::optional<std::int64_t> need;
  std::uint64_t signature = 0;
  Storages storages;
  Addresses unknown;  // the mode must register them: their memory may be foreign
  if (!inert && !operation.traits.composite) signature = signature_of(op, *stack, operation, all.place.device, storages);
  {
    const std::lock_guard lock(all.mutex);
    ++all.clock;
    for (const c10::Storage* storage : storages)
      if (!all.use(*storage, views)) unknown.push_back(storage->unsafeGetStorageImpl());
    if (inert || (signature != 0 && views)) {
      need = 0;
    } else if (const auto known = all.needs.find(signature); signature != 0 && unknown.empty() && known != all.needs.end()) {
      if (known->second == 0 || !all.lacks(known->second)) need = known->second;
    }
    if (need) ++all.passed;
  }
  if (need && !run_hidden(op, below, stack, operation.traits.repeatable && *need > 0)) need.reset();
  if (!need && (arrives_whole(operation.traits, below) || records_within(op, operation.traits, *stack))) {
    op.redispatchBoxed(below.remove(DispatchKey::Python), stack);
    return;
  }
  if (!need) {
    run_awaited(op, below, stack, signature);
    if (signature == 0 || !all.open.load(std::memory_order_acquire)) return;
  }
  if (inert) return;
  const std::lock_guard lock(all.mutex);
  if (operation.views) {  // learned by now
    if (!views)  // the mode registers nothing for a view
      for (const c10::StorageImpl* one : unknown) all.used.erase(one);
    return;
  }
  Storages results;
  for (auto at = stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()); at != stack->end(); ++at)
    add_storages(*at, all.place.device, results);
  for (const c10::Storage* one : results) all.add(*one, operation.blank);
  all.used.sweep_if_large();
}

// Return uint8 tensors of all living storages used while open, least recently used first. Unwritten storages must not move: the
// mode registers them at their next use.
std::vector<at::Tensor> taken() {
  Bypass& all = bypass();
  std::vector<std::pair<std::uint64_t, c10::Storage>> alive;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& [_, one] : all.used) {
      if (one.blank) continue;
      if (auto storage = one.storage.lock(); storage && storage->nbytes() > 0) alive.emplace_back(one.last, std::move(storage));
    }
    all.used.clear();
  }
  std::stable_sort(alive.begin(), alive.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<at::Tensor> tensors;
  for (auto& [_, storage] : alive) tensors.push_back(bytes_of(std::move(storage)));
  return tensors;
}

}  // namespace

// Let this thread's operations skip its mode while the client's pool keeps room for `reserve` bytes. Return 0 if another mode's
// bypass is open.
MEMPOOL_EXPORT int mempool_bypass_open(const void* mode, int cuda, std::int64_t (*room)(void*), std::int64_t (*unplanned)(void*, std::int64_t),
                                        void* client, std::int64_t reserve) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  if (all.open.load()) return 0;
  all.place.set(mode, cuda != 0);
  all.room = room;
  all.unplanned = unplanned;
  all.client = client;
  all.reserve = reserve;
  all.open.store(true, std::memory_order_release);
  return 1;
}

// Set the bytes to keep free to `reserve`, and return whether the pool lacks room for `need` more.
MEMPOOL_EXPORT int mempool_bypass_lacks(std::int64_t reserve, std::int64_t need) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  all.reserve = reserve;
  return all.lacks(need) ? 1 : 0;
}

// Close the bypass. Takes no lock, which another thread may have held at a fork.
MEMPOOL_EXPORT void mempool_bypass_close() { bypass().open.store(false, std::memory_order_release); }

// Return the number of operations that skipped the mode.
MEMPOOL_EXPORT std::uint64_t mempool_bypass_count() {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  return all.passed;
}

// Learn the operation on its way to the mode: whether it makes views or unwritten results, and the bytes needed for arguments
// like these; -1: the mode must see each call.
MEMPOOL_EXPORT void mempool_bypass_learn(const char* name, const char* overload, int views, int blank, std::int64_t bytes) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  Operation* const found = awaited_operation(name, overload);
  if (found == nullptr || awaited.back().signature == 0) return;
  found->views = views != 0;
  found->blank = blank != 0;
  if (bytes < 0) return;
  if (all.needs.size() >= kMostKnown) all.needs.clear();
  all.needs[awaited.back().signature] = bytes;
}
