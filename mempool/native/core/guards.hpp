// Checks that can be removed one at a time, to show that the tests detect the removal. In every build except
// the mutation tests' (-DMEMPOOL_MUTATIONS) a guard is the constant true and costs nothing.
#pragma once

#ifdef MEMPOOL_MUTATIONS

#include <cstdlib>
#include <cstring>

namespace mempool {

// Name of the guard that the environment removes, or null. Read once, before there are threads.
inline const char* const removed_guard = std::getenv("MEMPOOL_REMOVED_GUARD");

inline bool guarded(const char* name) noexcept {
  return removed_guard == nullptr || std::strcmp(removed_guard, name) != 0;
}

}  // namespace mempool

#ifdef MEMPOOL_WORLD  // between a check and the consequence another thread may run
#include "world/fibers.hpp"
#define MEMPOOL_GUARDED(name) (::world::point(), ::mempool::guarded(name))
#else
#define MEMPOOL_GUARDED(name) ::mempool::guarded(name)
#endif

#else
#define MEMPOOL_GUARDED(name) true
#endif
