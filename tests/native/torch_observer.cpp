// Stands between the companion and the pool and watches addresses: no two live buffers may overlap, and none may be handed
// out misaligned. It also counts what is alive, in bytes asked for. Shares nothing with the pool.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace {

struct Functions {
  void* (*alloc)(std::size_t, int*);
  int (*owns)(void*);
  int (*free)(void*);
  void (*out_of_memory)(char*, std::size_t);
};
Functions real;
std::mutex mutex;
std::map<std::uintptr_t, std::size_t> live;
long wrong = 0, seen = 0, load = 0, most = 0;

// Outside the mutex, as PyTorch calls: the order of an insertion and the erasure of what was freed is that of the calls.
void* alloc(std::size_t bytes, int* served) {
  void* const address = real.alloc(bytes, served);
  if (*served == 0 || address == nullptr) return address;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard guard(mutex);
  ++seen;
  const auto after = live.lower_bound(begin);
  const bool over_next = after != live.end() && after->first < begin + bytes;
  const bool over_last = after != live.begin() && std::prev(after)->first + std::prev(after)->second > begin;
  wrong += over_next || over_last || begin % 64 != 0;
  live[begin] = bytes;
  load += static_cast<long>(bytes);
  most = std::max(most, load);
  return address;
}

int release(void* address) {
  {
    const std::lock_guard guard(mutex);
    const auto found = live.find(reinterpret_cast<std::uintptr_t>(address));
    if (found != live.end()) {
      load -= static_cast<long>(found->second);
      live.erase(found);
    }
  }
  return real.free(address);
}

}  // namespace

extern "C" {
// Takes the pool's four functions, and leaves those to be called in their place.
void observe(void** functions) {
  real = {reinterpret_cast<void* (*)(std::size_t, int*)>(functions[0]), reinterpret_cast<int (*)(void*)>(functions[1]),
          reinterpret_cast<int (*)(void*)>(functions[2]), reinterpret_cast<void (*)(char*, std::size_t)>(functions[3])};
  functions[0] = reinterpret_cast<void*>(&alloc);
  functions[2] = reinterpret_cast<void*>(&release);
}
long overlaps() { return wrong; }
long observed() { return seen; }
// Bytes alive now.
long load_bytes() { return load; }
// Most bytes that were alive at once since the last call.
long take_peak_bytes() {
  const std::lock_guard guard(mutex);
  return std::exchange(most, load);
}
}
