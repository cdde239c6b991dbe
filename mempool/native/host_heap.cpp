#include "host_heap.hpp"

#include <cstdlib>

#ifdef __GLIBC__
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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
// Less than this, next to each other, is not looked for.
constexpr std::size_t kLeast = 2 * kBlock;

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

// The end of what is there of a mapping, or 0 where no part of it that is there as a whole is long enough to be worth while.
std::uintptr_t end_of_what_is_there(const Range& mapped, std::uintptr_t page) {
  std::vector<unsigned char> there((mapped.end - mapped.begin) / page);
  if (mincore(reinterpret_cast<void*>(mapped.begin), mapped.end - mapped.begin, there.data()) != 0) return 0;
  std::size_t longest = 0, run = 0, end = 0;
  for (std::size_t i = 0; i < there.size(); ++i) {
    run = (there[i] & 1) != 0 ? run + 1 : 0;
    if (run != 0) end = i + 1;
    longest = std::max(longest, run);
  }
  return longest * page < kLeast ? 0 : mapped.begin + end * page;
}

// Pages of a thread's arena behind its last buffer stay the process's until they are more than glibc's threshold, which rises up to
// 64 MiB with what the program has freed. They are had by asking for blocks until nothing that is there lies behind one; what is in
// a block is nobody else's. True if blocks were taken: what is written beside one, before and behind, is there again.
bool give_back_end(std::uintptr_t page) {
  void* first = std::malloc(kBlock);
  const auto place = reinterpret_cast<std::uintptr_t>(first);
  const Range mapped = first == nullptr ? Range{} : mapping_of(place);
  std::free(first);
  if (mapped.end == 0 || mapped.end - mapped.begin > kMostMapped) return false;
  const std::uintptr_t end = end_of_what_is_there(mapped, page);
  if (end == 0) return false;
  Blocks blocks((mapped.end - mapped.begin) / kBlock);
  while (void* block = blocks.take()) {
    const auto at = reinterpret_cast<std::uintptr_t>(block);
    const std::uintptr_t inner = (at + page - 1) / page * page, outer = (at + kBlock) / page * page;
    madvise(reinterpret_cast<void*>(inner), outer - inner, MADV_DONTNEED);
    if (at + 2 * kBlock > end) break;  // one more would write behind what is there, each time a block further
  }
  return true;
}

}  // namespace

void give_back_host_heap() noexcept {
  malloc_trim(0);
  try {
    if (give_back_end(static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)))) malloc_trim(0);
  } catch (const std::bad_alloc&) {  // then it stays
  }
}
#else
void give_back_host_heap() noexcept {}
#endif

}  // namespace mempool
