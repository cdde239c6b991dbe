#include "adapters/hook.hpp"

#include <pthread.h>

namespace mempool {
namespace {

struct Prepared {
  Lock lock;
  Hook* hooks = nullptr;
};
Prepared prepared;

}  // namespace

// --- entries

Address Hook::Entry::reallocate(Address address, std::size_t bytes) noexcept {
  bool foreign = false;
  return checked == nullptr ? client->reallocate(address, bytes, 0, &foreign)
                            : checked->reallocate(address, bytes, 0, &foreign);
}

std::size_t Hook::Entry::size_of(Address address, bool& ours) noexcept {
  if (checked != nullptr) return checked->size_of(address, ours);
  const Guarded guard(client->pool().lock);
  return client->pool().size_of(address, ours);
}

bool Hook::Entry::nothing_alive() noexcept {
  if (checked != nullptr) checked->flush();
  Pool& pool = client->pool();
  const Guarded guard(pool.lock);
  pool.collect();
  if (heir != nullptr && client->nothing_alive()) return true;
  // A graph uses memory at every launch, even when all buffers of the graph are freed.
  if (pool.graphs().pools() != 0) return false;
  // Live buffers are counted by some client, which then keeps the pool; orphaned buffers are counted by none.
  const bool others = pool.clients().size() > 1 && pool.deferred().current == 0;
  return pool.live_blocks() == 0 || (others && client->nothing_alive());
}

// --- installing

void Hook::prepare() {
  const Guarded guard(prepared.lock);
  if (prepared_) return;
  if (prepared.hooks == nullptr) {
    Presence::prepare();
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  }
  also_prepared_ = prepared.hooks;
  prepared.hooks = this;
  prepared_ = true;
}

void Hook::after_fork_in_child() {
  Presence::after_fork_in_child();
  prepared.lock.unlock();  // a thread that held a lock does not exist in the child
  for (Hook* hook = prepared.hooks; hook != nullptr; hook = hook->also_prepared_) hook->lock_.unlock();
}

Hook::Served Hook::serve(Client& client, Checked* checked, void* owner, bool instead) {
  const Guarded guard(lock_);
  if (serving_.load(std::memory_order_relaxed) != nullptr && !instead) return Served::no;
  Entry* entry = entries_.load(std::memory_order_relaxed);
  while (entry != nullptr && (entry->client != &client || entry->checked != checked)) {
    entry = entry->next.load(std::memory_order_relaxed);
  }
  const bool anew = entry == nullptr;
  if (anew) {
    entry = new Entry{&client, checked, owner, {entries_.load(std::memory_order_relaxed)}, nullptr};
    entries_.store(entry, std::memory_order_release);
    inherit(*entry);
  }
  serving_.store(entry, std::memory_order_release);
  return anew ? Served::anew : Served::again;
}

// Redirect frees to the newest client of a pool, whichever of the pool's clients here made the buffer.
void Hook::inherit(Entry& heir) noexcept {
  Pool& pool = heir.client->pool();
  const Guarded guard(pool.lock);
  for (Entry* former = heir.next.load(std::memory_order_relaxed); former != nullptr;
       former = former->next.load(std::memory_order_relaxed)) {
    if (&former->client->pool() != &pool) continue;
    heir.client->inherit(*former->client);
    former->heir = &heir;
  }
}

void Hook::stop() noexcept {
  const Guarded guard(lock_);
  serving_.store(nullptr, std::memory_order_release);
}

Client* Hook::serving() noexcept {
  const Guarded guard(lock_);
  Entry* const entry = serving_.load(std::memory_order_relaxed);
  return entry == nullptr ? nullptr : entry->client;
}

std::vector<void*> Hook::reclaim() {
  std::vector<void*> owners;
  const Guarded guard(lock_);
  if (entries_.load(std::memory_order_relaxed) == nullptr && unlinked_ == nullptr) return owners;
  // A thread that loaded a client while the client served may allocate from that client as long as the thread
  // is present.
  if (!Presence::everybody_left()) return owners;
  std::size_t count = 0;
  Atomic<Entry*>* link = &entries_;
  while (Entry* entry = link->load(std::memory_order_relaxed)) {
    if (entry != serving_.load(std::memory_order_relaxed) && entry->nothing_alive()) {
      link->store(entry->next.load(std::memory_order_relaxed), std::memory_order_release);
      entry->also_unlinked = unlinked_;
      unlinked_ = entry;
    } else {
      link = &entry->next;
    }
  }
  for (Entry* entry = unlinked_; entry != nullptr; entry = entry->also_unlinked) ++count;
  owners.reserve(count);
  if (count == 0 || !Presence::everybody_left()) return owners;
  while (Entry* entry = unlinked_) {
    unlinked_ = entry->also_unlinked;
    owners.push_back(entry->owner);
    delete entry;
  }
  return owners;
}

std::size_t Hook::held() noexcept {
  const Guarded guard(lock_);
  std::size_t count = 0;
  const Entry* entry = entries_.load(std::memory_order_relaxed);
  for (; entry != nullptr; entry = entry->next.load(std::memory_order_relaxed)) ++count;
  return count;
}

// --- serving

bool Hook::free(Address address, Stream stream) noexcept {
  for (Entry* entry = entries_.load(std::memory_order_acquire); entry != nullptr;
       entry = entry->next.load(std::memory_order_acquire)) {
    bool dead = false;
    if (entry->free(address, &dead, stream) || dead) return true;
  }
  return false;
}

Hook::Entry* Hook::owner_of(Address address, std::size_t& bytes) noexcept {
  for (Entry* entry = entries_.load(std::memory_order_acquire); entry != nullptr;
       entry = entry->next.load(std::memory_order_acquire)) {
    bool ours = false;
    bytes = entry->size_of(address, ours);
    if (ours) return entry;
  }
  return nullptr;
}

}  // namespace mempool
