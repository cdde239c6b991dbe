// The set of a segment's committed pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mempool {

class PageSet {
 public:
  void resize(std::size_t pages) {
    words_.resize((pages + 63) / 64);
    size_ = pages;
  }
  std::size_t size() const noexcept { return size_; }  // pages, in the set or not

  // Return the first page of [page, end) that is in the set, or (`in` false) not in the set; `end` if none.
  std::size_t find(std::size_t page, std::size_t end, bool in) const noexcept {
    const std::size_t stop = in ? std::min(end, beyond_) : end;
    while (page < stop) {
      const std::uint64_t word = (in ? words_[page / 64] : ~words_[page / 64]) >> (page % 64);
      if (word != 0) return std::min(end, page + static_cast<std::size_t>(__builtin_ctzll(word)));
      page = (page / 64 + 1) * 64;
    }
    return end;
  }
  void assign(std::size_t page, std::size_t end, bool in) noexcept {
    for (; page < end; page = (page / 64 + 1) * 64) {
      std::uint64_t& word = words_[page / 64];
      word = in ? word | mask(page, end) : word & ~mask(page, end);
    }
    if (in) beyond_ = std::max(beyond_, end);
  }
  std::size_t count(std::size_t page, std::size_t end) const noexcept {
    std::size_t pages = 0;
    for (end = std::min(end, beyond_); page < end; page = (page / 64 + 1) * 64) {
      const std::uint64_t word = words_[page / 64] & mask(page, end);
      // Most words are all zeros or all ones, and not every processor counts bits in one instruction.
      pages += word == 0 ? 0 : word == ~std::uint64_t{0} ? 64 : static_cast<std::size_t>(__builtin_popcountll(word));
    }
    return pages;
  }

 private:
  // Return the bits of [page, end) in the word that holds `page`.
  static std::uint64_t mask(std::size_t page, std::size_t end) noexcept {
    const std::uint64_t above = ~std::uint64_t{0} << (page % 64);
    const std::size_t left = end - page / 64 * 64;
    return left >= 64 ? above : above & ((std::uint64_t{1} << left) - 1);
  }

  std::vector<std::uint64_t> words_;
  std::size_t size_ = 0;
  std::size_t beyond_ = 0;  // no page from here on was ever in the set
};

}  // namespace mempool
