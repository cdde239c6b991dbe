#include "adapters/numpy_hook.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace mempool::numpy_hook {
namespace {

Hook hook_;
struct Installed {
  Allocator saved{};  // the functions installed before; set before the new functions are
  bool attached = false;
  Lock lock;          // protects attach()
};
Installed installed;

void* at(Address address) { return reinterpret_cast<void*>(address); }
Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

constexpr std::size_t kLargest = std::numeric_limits<std::ptrdiff_t>::max();

void* hook_malloc(void* ctx, std::size_t bytes) {
  if (!hook_.nobody_serves()) {
    const Presence::Here here;
    if (Hook::Entry* entry = hook_.serving_here()) return bytes > kLargest ? nullptr : at(entry->allocate(bytes, false));
  }
  return installed.saved.malloc(ctx, bytes);
}

void* hook_calloc(void* ctx, std::size_t count, std::size_t each) {
  if (!hook_.nobody_serves()) {
    const Presence::Here here;
    if (Hook::Entry* entry = hook_.serving_here()) {
      std::size_t bytes = 0;
      if (__builtin_mul_overflow(count, each, &bytes) || bytes > kLargest) return nullptr;
      return at(entry->allocate(bytes, true));
    }
  }
  return installed.saved.calloc(ctx, count, each);
}

// Free a buffer. NumPy passes the length, but the array may have been changed since, so that the pool ignores
// the length.
void hook_free(void* ctx, void* old, std::size_t bytes) {
  if (old != nullptr && !hook_.nobody_ever_served()) {
    const Presence::Here here;
    if (hook_.free(address_of(old))) return;
  }
  installed.saved.free(ctx, old, bytes);
}

// Move the memory of a client that no longer serves to the place of new allocations.
void* move_out(void* ctx, Hook::Entry* from, void* old, std::size_t old_bytes, std::size_t bytes) {
  void* const fresh = hook_malloc(ctx, bytes);
  if (fresh == nullptr) return nullptr;
  std::memcpy(fresh, old, std::min(old_bytes, bytes));
  from->free(address_of(old), nullptr);
  return fresh;
}

void* hook_realloc(void* ctx, void* old, std::size_t bytes) {
  if (old == nullptr) return hook_malloc(ctx, bytes);
  if (!hook_.nobody_ever_served()) {
    const Presence::Here here;
    std::size_t old_bytes = 0;
    if (Hook::Entry* entry = hook_.owner_of(address_of(old), old_bytes)) {
      if (bytes > kLargest) return nullptr;
      if (entry != hook_.serving_here()) return move_out(ctx, entry, old, old_bytes, bytes);
      return at(entry->reallocate(address_of(old), bytes));
    }
  }
  // foreign memory stays foreign, because the number of bytes to copy is unknown
  return installed.saved.realloc(ctx, old, bytes);
}

}  // namespace

Hook& hook() noexcept { return hook_; }

bool attach(Handler& handler) noexcept {
  const Guarded guard(installed.lock);
  if (installed.attached) return true;
  if (std::strcmp(handler.name, "default_allocator") != 0 || handler.version != 1) return false;
  hook_.prepare();
  installed.saved = handler.allocator;
  // Replace one function at a time, while other threads may call: each new function works with each of the
  // old ones, by address.
  Allocator& functions = handler.allocator;
  __atomic_store_n(&functions.free, &hook_free, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.realloc, &hook_realloc, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.calloc, &hook_calloc, __ATOMIC_RELEASE);
  __atomic_store_n(&functions.malloc, &hook_malloc, __ATOMIC_RELEASE);
  installed.attached = true;
  return true;
}

}  // namespace mempool::numpy_hook
