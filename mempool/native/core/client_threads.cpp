// Registry of clients, for threads that end and for forks.
#include <algorithm>
#include <map>
#include <vector>

#include "core/client.hpp"

namespace mempool {
namespace {

// Clients by number, so that an ending thread can find the clients that still exist. Never destroyed, because
// threads may outlive every static object.
struct Registry {
  Lock lock;
  std::map<std::uint64_t, Client*> clients;
  std::uint64_t next = 1;
};
Registry& registry() {
  static Registry* registry = new Registry;
  return *registry;
}

// Return the pools of all clients, each once. Call with the registry's lock held.
std::vector<Pool*> all_pools() {
  std::vector<Pool*> pools;
  for (const auto& [uid, client] : registry().clients) {
    if (std::find(pools.begin(), pools.end(), &client->pool()) == pools.end()) pools.push_back(&client->pool());
  }
  return pools;
}

}  // namespace

std::uint64_t ThreadCache::enlist(Client* client) {
  Registry& all = registry();
  const Guarded guard(all.lock);
  all.clients[all.next] = client;
  return all.next++;
}

void ThreadCache::strike(std::uint64_t uid) noexcept {
  const Guarded guard(registry().lock);
  registry().clients.erase(uid);
}

std::uint64_t ThreadCache::fresh_number() noexcept {
  static Atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

ThreadCache::~ThreadCache() {
  if (client == 0) return;
  const Guarded guard(registry().lock);
  for (const auto& [uid, client] : registry().clients) client->retire(this);
}

void Client::Bypass::enter() noexcept { ++ThreadCache::mine().bypass; }
void Client::Bypass::leave() noexcept { --ThreadCache::mine().bypass; }

// --- fork: the child inherits every lock in a known state, and no thread except the forking one

void Client::prepare_fork() noexcept {
  registry().lock.lock();
  for (Pool* pool : all_pools()) pool->lock.lock();
}

void Client::after_fork_in_parent() noexcept {
  for (Pool* pool : all_pools()) pool->lock.unlock();
  registry().lock.unlock();
}

void Client::after_fork_in_child() noexcept {
  flight::leave();
  if (!MEMPOOL_GUARDED("fork")) return;
  for (Pool* pool : all_pools()) pool->set_forked();
  for (const auto& [uid, client] : registry().clients) {
    client->replaying_ = false;
    client->apply(RecordingEvent::end);
    client->trace_.leave();
    client->history_.set_on(false);
    client->history_.clear();
    client->note_small_recorded();
  }
  after_fork_in_parent();
}

}  // namespace mempool
