// Live buffers that the framework's own allocator serves, of which the pool records only lifetimes and counts.
#pragma once

#include <deque>

#include "core/address_tables.hpp"
#include "core/owners.hpp"

namespace mempool {

class OutsideBuffers {
 public:
  struct Buffer {
    std::size_t requested = 0;  // bytes
    Stream stream = 0;          // the stream of the allocation
    Owner owner = 0;
    Buffer* next = nullptr;     // in the list of unused records
  };

  // May throw std::bad_alloc; then nothing has changed. No buffer is known at the address.
  void add(Address address, std::size_t requested, Stream stream) {
    buffers_.make_room();
    if (unused_ == nullptr) {
      records_.emplace_back();
      unused_ = &records_.back();
    }
    Buffer* const buffer = unused_;
    unused_ = buffer->next;
    *buffer = {requested, stream, 0, nullptr};
    buffers_.insert(address, buffer);
  }
  Buffer* find(Address address) const noexcept { return buffers_.find(address); }
  // Return and forget the buffer at this address; an unknown buffer has 0 requested bytes.
  Buffer take(Address address) noexcept {
    Buffer* const buffer = buffers_.erase(address);
    if (buffer == nullptr) return {};
    const Buffer taken = *buffer;
    buffer->next = unused_;
    unused_ = buffer;
    return taken;
  }
  std::size_t size() const noexcept { return buffers_.size(); }

 private:
  AddressMap<Buffer> buffers_;
  std::deque<Buffer> records_;
  Buffer* unused_ = nullptr;
};

}  // namespace mempool
