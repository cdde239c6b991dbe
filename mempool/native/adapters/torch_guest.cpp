#include "adapters/torch_guest.hpp"

#include <array>
#include <vector>

#include "devices/cuda_device.hpp"
#include "devices/hosted_memory.hpp"

namespace mempool::torch_guest {
namespace {

constexpr int kDevices = 64;

Hook hook_;
// Captures and private pools in progress, by device and in all; changed under `pooling_`.
std::array<Atomic<int>, kDevices> pools_{};
Atomic<int> all_pools_{0};
Lock pooling_;

Address address_of(void* pointer) noexcept { return reinterpret_cast<Address>(pointer); }
void* pointer_to(Address address) noexcept { return reinterpret_cast<void*>(address); }

bool has_pool(int device) noexcept {
  return device < 0 || device >= kDevices || pools_[static_cast<std::size_t>(device)].load(std::memory_order_acquire) != 0;
}

// Return the client that serves this device, or null: the host alone serves it. Present. A bound device keeps its index:
// a thread that does not see another thread's store yet asks the device itself, with the same answer.
Client* client_of(int device) noexcept {
  Hook::Entry* const entry = hook_.serving_here();
  if (entry == nullptr) return nullptr;
  if (entry->device.load(std::memory_order_relaxed) == device) return entry->client;
  Device& its = entry->client->pool().source().device();
  const bool bound = its.is(device);
  if (!bound && !its.serves(device)) return nullptr;
  entry->device.store(device, std::memory_order_relaxed);
  if (!bound) entry->client->device_is_bound();
  return entry->client;
}

int concerns(std::size_t bytes) {
  if (all_pools_.load(std::memory_order_acquire) != 0) return 1;
  if (hook_.nobody_serves()) return 0;
  const Presence::Here here;
  const Hook::Entry* const entry = hook_.serving_here();
  return entry != nullptr && entry->client->is_concerned_with(bytes) ? 1 : 0;
}

int answer(std::size_t bytes, int device, std::intptr_t stream, void** address) {
  if (has_pool(device)) return mempool_guest_private;
  if (hook_.nobody_serves()) return mempool_guest_host;
  const Presence::Here here;
  Client* const client = client_of(device);
  if (client == nullptr) return mempool_guest_host;
  if (HostedMemory::any_request().load(std::memory_order_relaxed)) return mempool_guest_prepare;
  bool recorded = false;
  *address = pointer_to(client->allocate_planned(bytes, stream, recorded));
  return *address != nullptr ? mempool_guest_planned : recorded ? mempool_guest_record : mempool_guest_host;
}

int allocate(std::size_t bytes, int device, std::intptr_t stream, void** address) {
  const int said = answer(bytes, device, stream, address);
  return HostedMemory::any_returned().load(std::memory_order_relaxed) ? said | mempool_guest_returned : said;
}

void record(void* address, std::size_t bytes, int device, std::intptr_t stream) {
  const Presence::Here here;
  if (Client* const client = client_of(device)) client->record_outside(address_of(address), bytes, stream);
}

// Release the arena of a client that does not replay, if no range in the arena is live. Present.
void release_if_unused(Hook::Entry& entry) noexcept {
  if (!hook_.serves(entry) || !entry.client->replaying()) entry.client->give_back(true);
}

int free(void* address, std::size_t* bytes, int* device) {
  if (hook_.nobody_ever_served()) return 0;
  const Presence::Here here;
  int planned = 0;
  hook_.each_entry([&](Hook::Entry& entry) {
    const Client::Found found = entry.client->free_planned(address_of(address), bytes);
    if (found == Client::Found::planned) {
      *device = entry.device.load(std::memory_order_relaxed);
      release_if_unused(entry);
      planned = 1;
    }
    return found == Client::Found::unknown;
  });
  return planned;
}

int use(void* address, std::intptr_t stream) {
  if (hook_.nobody_ever_served()) return 0;
  const Presence::Here here;
  int planned = 0;
  hook_.each_entry([&](Hook::Entry& entry) {
    Pool& pool = entry.client->pool();
    {
      const Guarded guard(pool.lock);
      if (!pool.at(address_of(address)).is_live()) return true;
      planned = pool.arena_holds(address_of(address)) ? 1 : 0;
    }
    entry.client->use(address_of(address), stream);
    return false;
  });
  return planned;
}

void* arena_of(void* address) {
  const Presence::Here here;
  Address base = 0;
  hook_.each_entry([&](Hook::Entry& entry) {
    Pool& pool = entry.client->pool();
    const Guarded guard(pool.lock);
    if (pool.arena_holds(address_of(address))) base = pool.arena_base();
    return base == 0;
  });
  return pointer_to(base);
}

std::size_t wanted(int device) {
  const Presence::Here here;
  HostedMemory::any_request().store(false);
  Client* const client = client_of(device);
  return client == nullptr ? 0 : client->pool().source().device().hosted()->take_request();
}

void* offer(int device, void* block, std::size_t bytes) {
  const Presence::Here here;
  Client* const client = client_of(device);
  if (client == nullptr) return block;
  HostedMemory& memory = *client->pool().source().device().hosted();
  memory.offer(address_of(block), bytes);
  client->take_offered_arena();
  return pointer_to(memory.end_offer());
}

void* returned() { return pointer_to(HostedMemory::take_returned()); }

int make_room(std::size_t bytes, int device, std::intptr_t stream, void** address) {
  const Presence::Here here;
  if (has_pool(device)) return 0;
  Client* const client = client_of(device);
  if (client != nullptr) *address = pointer_to(client->allocate_in_hole(bytes, stream));
  if (*address != nullptr) return 1;
  bool released = false;
  hook_.each([&](Client& one) {  // closed ones too: the last range of their arena may have waited for an event
    Pool& pool = one.pool();
    released = (pool.source().device().is(device) && pool.arena_bytes() != 0 && one.give_back(true)) || released;
  });
  return released ? 2 : 0;
}

void hold(int device, bool held) noexcept {
  hook_.each([&](Client& client) {
    if (!client.pool().source().device().is(device)) return;
    const Guarded guard(client.pool().lock);
    client.pool().hold(held);
  });
}

void begin_pool(int device) {
  if (device < 0 || device >= kDevices) return;
  const Presence::Here here;
  const Guarded guard(pooling_);
  all_pools_.fetch_add(1);
  if (pools_[static_cast<std::size_t>(device)].fetch_add(1) == 0) hold(device, true);
  CudaDevice::begin_capture(device);
}

void end_pool(int device) {
  if (device < 0 || device >= kDevices) return;
  const Presence::Here here;
  const Guarded guard(pooling_);
  Atomic<int>& count = pools_[static_cast<std::size_t>(device)];
  CudaDevice::end_capture(device);
  all_pools_.fetch_sub(1);
  if (count.fetch_sub(1) == 1) hold(device, false);
}

void empty_cache() {
  const Presence::Here here;
  hook_.each([](Client& client) { client.give_back(false); });
}

int usage(int device, std::size_t* bytes) {
  *bytes = 0;
  int arenas = 0;
  const Presence::Here here;
  hook_.each([&](Client& client) {
    Pool& pool = client.pool();
    if (!pool.source().device().is(device)) return;
    const Guarded guard(pool.lock);
    *bytes += pool.arena_bytes();
    arenas += pool.arena_bytes() != 0 ? 1 : 0;
  });
  return arenas;
}

void each_live(int device, void (*visit)(void*, void*, std::size_t, std::size_t, int), void* context) {
  struct Live {
    Address arena;
    Offset begin, end;
    bool freed;
  };
  std::vector<Live> all;
  {
    const Presence::Here here;
    hook_.each([&](Client& client) {
      Pool& pool = client.pool();
      if (!pool.source().device().is(device)) return;
      const Guarded guard(pool.lock);
      pool.collect();
      if (pool.arena_bytes() == 0) return;
      const Address base = pool.arena_base();
      pool.occupancy().each_live([&](Offset begin, Offset end) { all.push_back({base, begin, end, pool.uses().waits(base + begin)}); });
    });
  }
  for (const Live& one : all) visit(context, pointer_to(one.arena), one.begin, one.end, one.freed ? 1 : 0);
}

int find(void* address, std::size_t* bytes, int* device, std::intptr_t* stream) {
  const Presence::Here here;
  bool found = false;
  hook_.each_entry([&](Hook::Entry& entry) {
    Pool& pool = entry.client->pool();
    const Guarded guard(pool.lock);
    const Pool::Freed tensor = pool.at(address_of(address));
    found = tensor.kind == Pool::Freed::arena;
    if (found) *bytes = tensor.requested, *device = entry.device.load(std::memory_order_relaxed), *stream = tensor.stream;
    return !found;
  });
  return found ? 1 : 0;
}

}  // namespace

Hook& hook() noexcept { return hook_; }

void stop() noexcept {
  const Presence::Here here;
  Client* const client = hook_.serving();
  hook_.stop();
  if (client != nullptr) client->forget_outside();
}

const mempool_guest_functions& functions() noexcept {
  static const mempool_guest_functions all{
      &concerns, &allocate, &record, &free, &use, &arena_of, &wanted, &offer, &returned,
      &make_room, &begin_pool, &end_pool, &empty_cache, &usage, &each_live, &find};
  return all;
}

}  // namespace mempool::torch_guest
