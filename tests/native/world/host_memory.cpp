#include "world/host_memory.hpp"

#include <cstdlib>
#include <new>

namespace world {
HostMemory host_memory;
}

void* operator new(std::size_t bytes) {
  if (world::host_memory.fails()) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
