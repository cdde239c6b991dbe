#include "fallback/blocks.hpp"

namespace mempool {

unsigned FreeBins::bin_of(std::size_t bytes) noexcept {
  const unsigned power = 63 - static_cast<unsigned>(__builtin_clzll(bytes | 8));
  return power * 8 + static_cast<unsigned>(bytes >> (power - 3) & 7);
}

void FreeBins::add(Block* block) noexcept {
  const unsigned bin = bin_of(block->size);
  block->bin_before = nullptr;
  block->bin_after = heads_[bin];
  if (heads_[bin] != nullptr) heads_[bin]->bin_before = block;
  heads_[bin] = block;
  nonempty_[bin / 64] |= std::uint64_t{1} << (bin % 64);
}

void FreeBins::remove(Block* block) noexcept {
  const unsigned bin = bin_of(block->size);
  if (block->bin_after != nullptr) block->bin_after->bin_before = block->bin_before;
  if (block->bin_before != nullptr) {
    block->bin_before->bin_after = block->bin_after;
  } else {
    heads_[bin] = block->bin_after;
    if (heads_[bin] == nullptr) nonempty_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  }
}

Block* FreeBins::best_of(unsigned bin, std::size_t bytes, unsigned most) const noexcept {
  Block* best = nullptr;
  for (Block* block = heads_[bin]; block != nullptr && most > 0; block = block->bin_after, --most) {
    if (block->size < bytes) continue;
    if (best == nullptr || block->size < best->size || (block->size == best->size && block->address < best->address)) {
      best = block;
    }
  }
  return best;
}

Block* FreeBins::best_fit(std::size_t bytes) const noexcept {
  // a program may leave thousands of holes of one size; a search of all would be quadratic
  constexpr unsigned kFew = 32;
  const unsigned first = bin_of(bytes);
  for (unsigned word = first / 64; word < nonempty_.size(); ++word) {
    std::uint64_t bits = nonempty_[word];
    if (word == first / 64) bits &= ~std::uint64_t{0} << (first % 64);
    for (; bits != 0; bits &= bits - 1) {
      Block* best = best_of(word * 64 + static_cast<unsigned>(__builtin_ctzll(bits)), bytes, kFew);
      if (best != nullptr) return best;
    }
  }
  return best_of(first, bytes, ~0u);  // all larger bins are empty
}

void IdleList::add(Block* block) noexcept {
  block->idle_before = last_;
  block->idle_after = nullptr;
  (last_ != nullptr ? last_->idle_after : first_) = block;
  last_ = block;
  bytes_ += block->idle;
}

void IdleList::remove(Block* block) noexcept {
  (block->idle_before != nullptr ? block->idle_before->idle_after : first_) = block->idle_after;
  (block->idle_after != nullptr ? block->idle_after->idle_before : last_) = block->idle_before;
  bytes_ -= block->idle;
}

}  // namespace mempool
