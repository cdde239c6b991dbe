// A table that only grows, in chunks, so that growing never needs twice its size.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "refused.hpp"

namespace traces {

template <class Row>
class Chunked {
 public:
  explicit Chunked(Budget& budget) : budget_(budget) {}

  size_t size() const { return size_; }
  Row& operator[](size_t at) { return chunks_[at / kChunk][at % kChunk]; }
  const Row& operator[](size_t at) const { return chunks_[at / kChunk][at % kChunk]; }
  void push(const Row& row) {
    if (size_ == chunks_.size() * kChunk) {
      budget_.take(kChunk * sizeof(Row));
      chunks_.emplace_back(new Row[kChunk]);
    }
    (*this)[size_++] = row;
  }
  void clear() {
    budget_.give(chunks_.size() * kChunk * sizeof(Row));
    chunks_.clear();
    size_ = 0;
  }

 private:
  static constexpr size_t kChunk = size_t{1} << 14;
  Budget& budget_;
  std::vector<std::unique_ptr<Row[]>> chunks_;
  size_t size_ = 0;
};

}  // namespace traces
