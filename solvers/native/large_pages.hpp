// Room for very many values in large pages, where the kernel has them. To touch a page of 4 KB for the first time takes
// longer than to write it, and what is read here and there is found sooner when there are fewer pages to tell apart.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace packing {

// As the member, and new memory is asked for in large pages if it is worth it. The kernel may as well refuse.
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
