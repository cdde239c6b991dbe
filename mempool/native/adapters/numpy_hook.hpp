// NumPy's data allocator, served by a client.
//
// NumPy keeps the current handler in a context variable, which new threads do not inherit (NEP 49). So the variable is
// unchanged, and the four functions of NumPy's *default* handler, which every thread uses, are replaced in place, once
// and permanently. The new functions recognise memory by address: memory made
// by no client goes to the functions that were installed before, and so does every allocation while no client
// serves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adapters/hook.hpp"

namespace mempool::numpy_hook {

// Copies of the declarations in NumPy's ndarraytypes.h (PyDataMemAllocator and PyDataMem_Handler, version 1),
// which are part of NumPy's binary interface.
struct Allocator {
  void* ctx;
  void* (*malloc)(void* ctx, std::size_t bytes);
  void* (*calloc)(void* ctx, std::size_t count, std::size_t bytes);
  void* (*realloc)(void* ctx, void* old, std::size_t bytes);
  void (*free)(void* ctx, void* old, std::size_t bytes);
};
struct Handler {
  char name[127];
  std::uint8_t version;
  Allocator allocator;
};

// Install the functions in the handler; repeated calls do nothing. False: an unknown handler, nothing
// happened.
bool attach(Handler& handler) noexcept;

// Return the hook that serves NumPy.
Hook& hook() noexcept;

}  // namespace mempool::numpy_hook
