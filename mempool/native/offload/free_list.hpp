// Free list of an arena of host memory for copies, in whole pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace mempool {

// Free ranges, sorted by offset and by length, in bytes. Not thread-safe: Python calls it with the interpreter's lock.
// In C++, unlike in Python, Ctrl-C cannot interrupt a change.
class FreeList {
 public:
  using Size = std::int64_t;
  static constexpr Size kPage = 4096;

  // A free list of `size` bytes, a multiple of a page.
  explicit FreeList(Size size) : size_(size) { add(0, size); }

  Size size() const { return size_; }
  Size used() const { return used_; }

  // Take `size` bytes of the smallest free range that is large enough, and return their offset.
  std::optional<Size> allocate(Size size) {
    const auto found = by_length_.lower_bound({pages(size), -1});
    if (found == by_length_.end()) return std::nullopt;
    return take(ranges_.find(found->second), found->second, pages(size));
  }

  // Allocate the end of the last sufficient free range.
  std::optional<Size> allocate_last(Size size) {
    for (auto at = ranges_.rbegin(); at != ranges_.rend(); ++at)
      if (at->second >= pages(size)) return take(std::prev(at.base()), at->first + at->second - pages(size), pages(size));
    return std::nullopt;
  }

  // Take `size` bytes from page `at` on; return false if some of them are taken.
  bool allocate_at(Size at, Size size) {
    auto found = ranges_.upper_bound(at);
    if (found == ranges_.begin()) return false;
    --found;
    if (found->first + found->second < at + pages(size)) return false;
    take(found, at, pages(size));
    return true;
  }

  // Free bytes taken before, and merge them with adjacent free ranges.
  void release(Size at, Size size) {
    Size length = pages(size);
    used_ -= length;
    auto after = ranges_.lower_bound(at);
    if (after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second == at) {
      const auto [start, before] = *std::prev(after);
      remove(std::prev(after));
      at = start;
      length += before;
    }
    if (after != ranges_.end() && after->first == at + length) {
      length += after->second;
      remove(after);
    }
    add(at, length);
  }

  // Return the high-water mark of the bytes taken since the last call.
  Size take_peak() { return std::exchange(peak_, used_); }

  // Return the free ranges as (begin, end), by place.
  std::vector<std::pair<Size, Size>> free_ranges() const {
    std::vector<std::pair<Size, Size>> found;
    for (const auto& [at, length] : ranges_) found.emplace_back(at, at + length);
    return found;
  }

 private:
  using Ranges = std::map<Size, Size>;  // offset -> length
  static Size pages(Size size) { return (size + kPage - 1) / kPage * kPage; }

  Size take(Ranges::iterator range, Size at, Size length) {
    const auto [start, whole] = *range;
    remove(range);
    add(start, at - start);
    add(at + length, start + whole - at - length);
    used_ += length;
    peak_ = std::max(peak_, used_);
    return at;
  }
  void add(Size at, Size length) {
    if (length == 0) return;
    ranges_.emplace(at, length);
    by_length_.emplace(length, at);
  }
  void remove(Ranges::iterator range) {
    by_length_.erase({range->second, range->first});
    ranges_.erase(range);
  }

  Size size_, used_ = 0, peak_ = 0;
  Ranges ranges_;
  std::set<std::pair<Size, Size>> by_length_;  // (length, offset)
};

// A range taken from a free list, and released with the object.
class TakenRange {
 public:
  TakenRange(std::shared_ptr<FreeList> list, FreeList::Size at, FreeList::Size size) : list_(std::move(list)), at_(at), size_(size) {}
  ~TakenRange() { list_->release(at_, size_); }
  TakenRange(const TakenRange&) = delete;
  TakenRange& operator=(const TakenRange&) = delete;

  FreeList::Size at() const { return at_; }

  // Allocate `size` bytes at offset `at` if free, else at the highest offset; for a negative `at`, the best fit. Null
  // if no range suffices.
  static std::shared_ptr<TakenRange> of(const std::shared_ptr<FreeList>& list, FreeList::Size size, FreeList::Size at) {
    if (at < 0 || !list->allocate_at(at, size)) {
      const auto found = at < 0 ? list->allocate(size) : list->allocate_last(size);
      if (!found) return nullptr;
      at = *found;
    }
    return std::make_shared<TakenRange>(list, at, size);
  }

 private:
  std::shared_ptr<FreeList> list_;
  FreeList::Size at_, size_;
};

}  // namespace mempool
