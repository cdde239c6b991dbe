#include "adapters/c_api.h"

#include <cinttypes>
#include <cstdio>
#include <limits>

#include "adapters/hook.hpp"

namespace mempool::torch_cpu {
namespace {

Hook hook_;
constexpr std::size_t kLargest = std::numeric_limits<std::ptrdiff_t>::max();

}  // namespace

Hook& hook() noexcept { return hook_; }

}  // namespace mempool::torch_cpu

using mempool::Address;
using mempool::Client;
using mempool::Hook;
using mempool::Presence;
using mempool::torch_cpu::hook_;
using mempool::torch_cpu::kLargest;

void* mempool_torch_cpu_alloc(size_t bytes, int* served) {
  *served = 0;
  if (hook_.nobody_serves()) return nullptr;
  const Presence::Here here;
  Hook::Entry* const entry = hook_.serving_here();
  if (entry == nullptr) return nullptr;
  *served = 1;
  return bytes > kLargest ? nullptr : reinterpret_cast<void*>(entry->allocate(bytes, false));
}

int mempool_torch_cpu_owns(void* address) {
  if (hook_.nobody_ever_served()) return 0;
  const Presence::Here here;
  std::size_t bytes = 0;
  return hook_.owner_of(reinterpret_cast<Address>(address), bytes) != nullptr ? 1 : 0;
}

int mempool_torch_cpu_free(void* address) {
  if (hook_.nobody_ever_served()) return 0;
  const Presence::Here here;
  return hook_.free(reinterpret_cast<Address>(address)) ? 1 : 0;
}

void mempool_out_of_memory(char* text, size_t size) {
  const mempool::OutOfMemory o = mempool::Client::last_out_of_memory();
  const int written = std::snprintf(text, size, "%zu bytes live, %zu reserved (%zu of them planned)", o.live, o.reserved, o.arena);
  if (written > 0 && static_cast<size_t>(written) < size && o.limit < (std::size_t{1} << 63)) {
    std::snprintf(text + written, size - static_cast<size_t>(written), ", limited to %zu", o.limit);
  }
}

// Ignores the device index: a pool belongs to one device, and the caller has chosen the client by that index.
void* mempool_alloc(void* client, size_t bytes, int, intptr_t stream) {
  return reinterpret_cast<void*>(static_cast<Client*>(client)->allocate(bytes, stream));
}

int mempool_free(void* client, void* address, size_t, int, intptr_t stream) {
  return static_cast<Client*>(client)->free(reinterpret_cast<Address>(address), stream) ? 1 : 0;
}

int64_t mempool_room(void* client) {
  mempool::Pool& pool = static_cast<Client*>(client)->pool();
  const mempool::Guarded guard(pool.lock);
  return pool.room();
}

int64_t mempool_misses(void* client) {
  Client* const one = static_cast<Client*>(client);
  const mempool::Guarded guard(one->pool().lock);
  return static_cast<int64_t>(one->misses());
}

int64_t mempool_unplanned_bytes(void* client, int64_t bytes) {
  return static_cast<int64_t>(static_cast<Client*>(client)->unplanned_bytes(static_cast<uint64_t>(bytes)));
}
