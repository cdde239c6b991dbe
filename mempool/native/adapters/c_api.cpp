#include "adapters/c_api.h"

#include "core/client.hpp"

using mempool::Address;
using mempool::Client;

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
