// Storage for very many values in large pages, if the operating system has them. The first touch of a 4 KB
// page takes longer than writing the page, and random reads are faster with fewer pages (fewer TLB misses).
#pragma once

#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <vector>

namespace packing {

// Like the vector's member function, but asks for new memory in large pages if the size is worth it. The
// operating system may refuse.
template <class T>
void reserve(std::vector<T>& values, size_t count) {
  constexpr size_t page = 4096, worth = size_t{4} << 20;  // bytes
  const size_t bytes = count * sizeof(T);
  if (count <= values.capacity()) return;
  values.reserve(count);
  if (bytes < worth) return;
  const size_t skipped = (page - reinterpret_cast<uintptr_t>(values.data()) % page) % page;
  madvise(reinterpret_cast<char*>(values.data()) + skipped, (bytes - skipped) / page * page, MADV_HUGEPAGE);
}

template <class T>
std::vector<T> filled(size_t count, T value) {
  std::vector<T> values;
  reserve(values, count);
  values.assign(count, value);
  return values;
}

}  // namespace packing
