#include "numpy_hook.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "presence.hpp"

namespace mempool::numpy_hook {
namespace {

// A client that serves or served.
struct Entry {
  Client* client;
  Checked* checked;     // before the client; or null
  void* owner;          // keeps both in existence
  Atomic<Entry*> next;  // older ones
  Entry* also_unlinked = nullptr;

  Address allocate(std::size_t bytes, bool zeroed) noexcept {
    return checked == nullptr ? client->allocate(bytes, 0, zeroed) : checked->allocate(bytes, 0, zeroed);
  }
  bool free(Address address, bool* dead) noexcept {
    return checked == nullptr ? client->free(address, 0, dead) : checked->free(address, 0, dead);
  }
  Address reallocate(Address address, std::size_t bytes) noexcept {
    bool foreign = false;
    return checked == nullptr ? client->reallocate(address, bytes, 0, &foreign)
                              : checked->reallocate(address, bytes, 0, &foreign);
  }
  std::size_t size_of(Address address, bool& ours) noexcept {
    if (checked != nullptr) return checked->size_of(address, ours);
    const Guarded guard(client->pool().lock);
    return client->pool().size_of(address, ours);
  }
  bool nothing_alive() noexcept {
    if (checked != nullptr) checked->flush();
    const Guarded guard(client->pool().lock);
    return client->pool().live_blocks() == 0;
  }
};

// Constant-initialised and never destroyed: arrays outlive every static.
struct Hook {
  Allocator saved{};                 // what was there before; set before our functions are
  bool attached = false;
  Atomic<Entry*> serving{nullptr};   // one of entries, or null
  Atomic<Entry*> entries{nullptr};   // newest first; changed under `lock`, followed by anybody who is present
  Entry* unlinked = nullptr;         // taken out of entries; somebody may still be on them
  Lock lock;
};
Hook hook;

void* at(Address address) { return reinterpret_cast<void*>(address); }
Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

constexpr std::size_t kLargest = std::numeric_limits<std::ptrdiff_t>::max();

// What this thread's requests go to, or null: to the saved functions. The caller is present.
Entry* serving_here() noexcept {
  Entry* const entry = hook.serving.load(std::memory_order_acquire);
  return entry == nullptr || Client::Bypass::active() ? nullptr : entry;
}

bool nobody_serves() noexcept { return hook.serving.load(std::memory_order_relaxed) == nullptr; }

void* hook_malloc(void* ctx, std::size_t bytes) {
  if (!nobody_serves()) {
    const Presence::Here here;
    if (Entry* entry = serving_here()) return bytes > kLargest ? nullptr : at(entry->allocate(bytes, false));
  }
  return hook.saved.malloc(ctx, bytes);
}

void* hook_calloc(void* ctx, std::size_t count, std::size_t each) {
  if (!nobody_serves()) {
    const Presence::Here here;
    if (Entry* entry = serving_here()) {
      std::size_t bytes = 0;
      if (__builtin_mul_overflow(count, each, &bytes) || bytes > kLargest) return nullptr;
      return at(entry->allocate(bytes, true));
    }
  }
  return hook.saved.calloc(ctx, count, each);
}

// Frees into whichever client made it. NumPy says how long the buffer is, but the array may have been changed since.
void hook_free(void* ctx, void* old, std::size_t bytes) {
  if (old != nullptr && hook.entries.load(std::memory_order_relaxed) != nullptr) {
    const Presence::Here here;
    for (Entry* entry = hook.entries.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->next.load(std::memory_order_acquire)) {
      bool dead = false;
      if (entry->free(address_of(old), &dead) || dead) return;
    }
  }
  hook.saved.free(ctx, old, bytes);
}

// The entry whose client made this live buffer, and its size. The caller is present.
Entry* owner_of(const void* old, std::size_t& bytes) noexcept {
  for (Entry* entry = hook.entries.load(std::memory_order_acquire); entry != nullptr;
       entry = entry->next.load(std::memory_order_acquire)) {
    bool ours = false;
    bytes = entry->size_of(address_of(old), ours);
    if (ours) return entry;
  }
  return nullptr;
}

// The memory of a client that serves no longer moves to where allocations go now.
void* move_out(void* ctx, Entry* from, void* old, std::size_t old_bytes, std::size_t bytes) {
  void* const fresh = hook_malloc(ctx, bytes);
  if (fresh == nullptr) return nullptr;
  std::memcpy(fresh, old, std::min(old_bytes, bytes));
  from->free(address_of(old), nullptr);
  return fresh;
}

void* hook_realloc(void* ctx, void* old, std::size_t bytes) {
  if (old == nullptr) return hook_malloc(ctx, bytes);
  if (hook.entries.load(std::memory_order_relaxed) != nullptr) {
    const Presence::Here here;
    std::size_t old_bytes = 0;
    if (Entry* entry = owner_of(old, old_bytes)) {
      if (bytes > kLargest) return nullptr;
      if (entry != serving_here()) return move_out(ctx, entry, old, old_bytes, bytes);
      return at(entry->reallocate(address_of(old), bytes));
    }
  }
  return hook.saved.realloc(ctx, old, bytes);  // foreign memory stays so, for we do not know how much to copy
}

void after_fork_in_child() {
  Presence::after_fork_in_child();
  hook.lock.unlock();  // whoever held it does not exist here
}

}  // namespace

bool attach(Handler& handler) noexcept {
  const Guarded guard(hook.lock);
  if (hook.attached) return true;
  if (std::strcmp(handler.name, "default_allocator") != 0 || handler.version != 1) return false;
  Presence::prepare();
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  hook.saved = handler.allocator;
  // One at a time, while other threads may call: each of ours works with each of the old ones, by address.
  Allocator& functions = handler.allocator;
  __atomic_store_n(&functions.free, &hook_free, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.realloc, &hook_realloc, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.calloc, &hook_calloc, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.malloc, &hook_malloc, __ATOMIC_RELEASE);
  hook.attached = true;
  return true;
}

Served serve(Client& client, Checked* checked, void* owner) {
  const Guarded guard(hook.lock);
  if (hook.serving.load(std::memory_order_relaxed) != nullptr) return Served::no;
  Entry* entry = hook.entries.load(std::memory_order_relaxed);
  while (entry != nullptr && (entry->client != &client || entry->checked != checked)) entry = entry->next.load(std::memory_order_relaxed);
  const bool anew = entry == nullptr;
  if (anew) {
    entry = new Entry{&client, checked, owner, {hook.entries.load(std::memory_order_relaxed)}, nullptr};
    hook.entries.store(entry, std::memory_order_release);
  }
  hook.serving.store(entry, std::memory_order_release);
  return anew ? Served::anew : Served::again;
}

void stop() noexcept {
  const Guarded guard(hook.lock);
  hook.serving.store(nullptr, std::memory_order_release);
}

Client* serving() noexcept {
  const Guarded guard(hook.lock);
  Entry* const entry = hook.serving.load(std::memory_order_relaxed);
  return entry == nullptr ? nullptr : entry->client;
}

std::vector<void*> reclaim() {
  std::vector<void*> owners;
  const Guarded guard(hook.lock);
  if (hook.entries.load(std::memory_order_relaxed) == nullptr && hook.unlinked == nullptr) return owners;
  // Who loaded a client while it served may allocate from it for as long as he is present.
  if (!Presence::everybody_left()) return owners;
  std::size_t count = 0;
  Atomic<Entry*>* link = &hook.entries;
  while (Entry* entry = link->load(std::memory_order_relaxed)) {
    if (entry != hook.serving.load(std::memory_order_relaxed) && entry->nothing_alive()) {
      link->store(entry->next.load(std::memory_order_relaxed), std::memory_order_release);
      entry->also_unlinked = hook.unlinked;
      hook.unlinked = entry;
    } else {
      link = &entry->next;
    }
  }
  for (Entry* entry = hook.unlinked; entry != nullptr; entry = entry->also_unlinked) ++count;
  owners.reserve(count);
  if (count == 0 || !Presence::everybody_left()) return owners;
  while (Entry* entry = hook.unlinked) {
    hook.unlinked = entry->also_unlinked;
    owners.push_back(entry->owner);
    delete entry;
  }
  return owners;
}

std::size_t held() noexcept {
  const Guarded guard(hook.lock);
  std::size_t count = 0;
  const Entry* entry = hook.entries.load(std::memory_order_relaxed);
  for (; entry != nullptr; entry = entry->next.load(std::memory_order_relaxed)) ++count;
  return count;
}

}  // namespace mempool::numpy_hook
