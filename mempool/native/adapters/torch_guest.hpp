// The core's part of the guest: an allocator in front of PyTorch's own CUDA allocator, the *host*. The guest serves
// planned requests from the arena, and passes all other requests on.
//
// The guest itself is compiled against the user's PyTorch (mempool/torch/guest.cpp) and calls the functions
// below, by their addresses, from any thread, with or without the interpreter's lock. The host is never called
// from here: it may run any code (see hosted_memory.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "adapters/hook.hpp"

namespace mempool::torch_guest {

Hook& hook() noexcept;
// End the service of the serving client; its live planned buffers stay valid.
void stop() noexcept;

extern "C" {

enum mempool_guest_answer {
  mempool_guest_host = 0,     // the host serves the request, unrecorded, and frees the buffer
  mempool_guest_planned = 1,  // served at a planned address
  mempool_guest_record = 2,   // the host serves the request, and `record` follows
  mempool_guest_prepare = 3,  // get a block from the host first (`wanted`, `offer`), then ask again
  mempool_guest_private = 4,  // a graph is captured, or a private pool is active: the host serves the request
  mempool_guest_returned = 8,  // added to another answer: there is a block to hand back first (`returned`)
};

// Table of functions for the guest; guest.cpp declares the same one.
struct mempool_guest_functions {
  // 0: the host serves a request of this size, which `allocate` need not know.
  int (*concerns)(std::size_t bytes);
  int (*allocate)(std::size_t bytes, int device, std::intptr_t stream, void** address);
  void (*record)(void* address, std::size_t bytes, int device, std::intptr_t stream);
  // 1: planned, and freed, with the requested size in `bytes` and the device; 0: the host frees the buffer.
  int (*free)(void* address, std::size_t* bytes, int* device);
  // 1: planned, and the free waits for the stream; 0: the host has to know.
  int (*use)(void* address, std::intptr_t stream);
  // The arena that contains the address, or null.
  void* (*arena_of)(void* address);
  // Bytes of a requested block; 0: release the host's cache.
  std::size_t (*wanted)(int device);
  // Offer a block, or null: the host has refused; return the block if it has to go back.
  void* (*offer)(int device, void* block, std::size_t bytes);
  // A block to hand back to the host; null: none.
  void* (*returned)();
  // Serve a request that the host has refused from a hole of the arena, or release the arena for it. 1: served;
  // 2: a block is to be handed back, then the host may try again; 0: nothing can be done.
  int (*make_room)(std::size_t bytes, int device, std::intptr_t stream, void** address);
  // A graph is captured, or a private pool is active, until the matching end.
  void (*begin_pool)(int device);
  void (*end_pool)(int device);
  void (*empty_cache)();
  // The number of arenas of a device, with their bytes, and their live tensors, by their offsets in an arena. `freed`: 1
  // for a freed tensor that other streams still use.
  int (*usage)(int device, std::size_t* bytes);
  void (*each_live)(int device, void (*visit)(void* context, void* arena, std::size_t begin, std::size_t end, int freed),
                    void* context);
  // 1: a live planned tensor, with its requested size, device and stream.
  int (*find)(void* address, std::size_t* bytes, int* device, std::intptr_t* stream);
};

}  // extern "C"

const mempool_guest_functions& functions() noexcept;

}  // namespace mempool::torch_guest
