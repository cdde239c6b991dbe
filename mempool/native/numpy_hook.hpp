// NumPy's data allocator, served by a client.
//
// NumPy keeps its current handler in a context variable, which new threads do not inherit (NEP 49). So it is left
// alone: the four functions of NumPy's *default* handler, which every thread uses, are replaced in place, once and for
// ever. Ours tell memory by its address: what no client of ours made goes to the functions that were there before, and
// so does every allocation while no client serves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hook.hpp"

namespace mempool::numpy_hook {

// As NumPy's ndarraytypes.h declares them (PyDataMemAllocator and PyDataMem_Handler, version 1), which is part of its
// binary interface.
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

// Puts our functions into the handler; the second time does nothing. False: not a handler we know, nothing happened.
bool attach(Handler& handler) noexcept;

// Who serves NumPy.
Hook& hook() noexcept;

}  // namespace mempool::numpy_hook
