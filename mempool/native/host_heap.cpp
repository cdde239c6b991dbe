#include "host_heap.hpp"

#include <cstdlib>

#ifdef __GLIBC__
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <vector>
#endif

namespace mempool {

#ifdef __GLIBC__
namespace {

// Below the least size, 128 KiB, for which glibc asks the system, and above that of small blocks.
constexpr std::size_t kBlock = 120 << 10;
// What an arena of a thread lies in is never larger. The arena of the program, in one that may be, ends where `malloc_trim` put it.
constexpr std::size_t kMostMapped = 64 << 20;
// Where less than this is there, taking blocks to return it would touch as much.
constexpr std::size_t kLeastPages = 16;

struct Range {
  std::uintptr_t begin = 0, end = 0;
};

// Of this process's mappings that with the address. It is read without malloc, whose memory is looked for.
Range mapping_of(std::uintptr_t address) noexcept {
  Range found;
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (file < 0) return found;
  std::array<char, 4096> text;
  std::array<char, 40> line{};  // its beginning: "begin-end "
  std::size_t in_line = 0;
  for (ssize_t got; !found.end && (got = read(file, text.data(), text.size())) > 0;) {
    for (ssize_t i = 0; i < got && !found.end; ++i) {
      if (text[i] != '\n') {
        if (in_line < line.size() - 1) line[in_line++] = text[i];
        continue;
      }
      line[in_line] = '\0';
      in_line = 0;
      std::uintptr_t begin = 0, end = 0;
      if (std::sscanf(line.data(), "%lx-%lx", &begin, &end) == 2 && begin <= address && address < end) found = {begin, end};
    }
  }
  close(file);
  return found;
}

// Blocks of the calling thread's arena, given back together.
class Blocks {
 public:
  explicit Blocks(std::size_t most) { blocks_.reserve(most); }
  ~Blocks() {
    for (void* block : blocks_) std::free(block);
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  // The next one, or null when there are as many as it may have.
  void* take() noexcept {
    if (blocks_.size() == blocks_.capacity()) return nullptr;
    void* block = std::malloc(kBlock);
    if (block != nullptr) blocks_.push_back(block);
    return block;
  }

 private:
  std::vector<void*> blocks_;
};

// Pages of a thread's arena behind its last buffer stay the process's until they are more than glibc's threshold, which rises up to
// 64 MiB with what the program has freed. They are had by asking for blocks until nothing that is there lies behind one; what is in
// a block is nobody's else.
void give_back_end(std::uintptr_t page) {
  void* first = std::malloc(kBlock);
  const auto place = reinterpret_cast<std::uintptr_t>(first);
  const Range mapped = first == nullptr ? Range{} : mapping_of(place);
  std::free(first);
  if (mapped.end - mapped.begin == 0 || mapped.end - mapped.begin > kMostMapped) return;
  std::vector<unsigned char> there((mapped.end - mapped.begin) / page);
  if (mincore(reinterpret_cast<void*>(mapped.begin), mapped.end - mapped.begin, there.data()) != 0) return;
  std::size_t pages = 0, last = 0;
  for (std::size_t i = 0; i < there.size(); ++i) {
    if ((there[i] & 1) != 0) ++pages, last = i;
  }
  if (pages < kLeastPages) return;
  const std::uintptr_t hot_end = mapped.begin + (last + 1) * page;
  Blocks blocks((mapped.end - mapped.begin) / kBlock);
  while (void* block = blocks.take()) {
    const auto at = reinterpret_cast<std::uintptr_t>(block);
    const std::uintptr_t begin = (at + page - 1) / page * page, end = (at + kBlock) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    if (at + 2 * kBlock > hot_end) return;  // one more would write behind what is there, each time a block further
  }
}

}  // namespace

void give_back_host_heap() noexcept {
  malloc_trim(0);
  try {
    give_back_end(static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)));
  } catch (const std::bad_alloc&) {  // then it stays
  }
}
#else
void give_back_host_heap() noexcept {}
#endif

}  // namespace mempool
