// A hash table from addresses to pointers: open addressing, linear probing, deletion by shifting back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "devices/device.hpp"

namespace mempool {

template <class T>
class AddressMap {
 public:
  T* find(Address key) const noexcept {
    if (entries_.empty()) return nullptr;
    for (std::size_t slot = home(key);; slot = next(slot)) {
      if (entries_[slot].value == nullptr) return nullptr;
      if (entries_[slot].key == key) return entries_[slot].value;
    }
  }

  // Make room for one more entry, so that the next insert does not throw. May throw std::bad_alloc; then
  // nothing has changed.
  void make_room() {
    if (entries_.empty() || size_ * 2 >= entries_.size()) grow();
  }
  // May throw like make_room().
  void insert(Address key, T* value) {
    make_room();
    place(key, value);
    ++size_;
  }

  // Erase and return the value at this key; null: there is none.
  T* erase(Address key) noexcept {
    if (entries_.empty()) return nullptr;
    std::size_t hole = home(key);
    for (; entries_[hole].value != nullptr; hole = next(hole)) {
      if (entries_[hole].key == key) break;
    }
    T* const value = entries_[hole].value;
    if (value == nullptr) return nullptr;
    for (std::size_t slot = next(hole); entries_[slot].value != nullptr; slot = next(slot)) {
      // An entry may move back unless the entry's home lies cyclically in (hole, slot].
      const std::size_t from = home(entries_[slot].key);
      if (((slot - from) & mask()) >= ((slot - hole) & mask())) {
        entries_[hole] = entries_[slot];
        hole = slot;
      }
    }
    entries_[hole].value = nullptr;
    --size_;
    return value;
  }

  // Move the value at key `from` to key `to`.
  void rekey(Address from, Address to) noexcept {
    place(to, erase(from));
    ++size_;
  }

  std::size_t size() const noexcept { return size_; }

 private:
  struct Entry {
    Address key;
    T* value;
  };
  std::size_t mask() const noexcept { return entries_.size() - 1; }
  std::size_t next(std::size_t slot) const noexcept { return (slot + 1) & mask(); }
  std::size_t home(Address key) const noexcept { return (key * 0x9E3779B97F4A7C15ull) >> shift_; }

  void place(Address key, T* value) noexcept {
    std::size_t slot = home(key);
    while (entries_[slot].value != nullptr) slot = next(slot);
    entries_[slot] = {key, value};
  }
  void grow() {
    std::vector<Entry> old(entries_.empty() ? 64 : entries_.size() * 2, Entry{0, nullptr});
    old.swap(entries_);
    shift_ = 64;
    for (std::size_t size = entries_.size(); size > 1; size >>= 1) --shift_;
    for (const Entry& entry : old) {
      if (entry.value != nullptr) place(entry.key, entry.value);
    }
  }

  std::vector<Entry> entries_;
  std::size_t size_ = 0;
  unsigned shift_ = 58;
};

// Set of a segment's committed pages.
class PageSet {
 public:
  void resize(std::size_t pages) {
    words_.resize((pages + 63) / 64);
    size_ = pages;
  }
  std::size_t size() const noexcept { return size_; }  // pages of the segment

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
  std::size_t beyond_ = 0;  // pages from this one on were never in the set
};

}  // namespace mempool
