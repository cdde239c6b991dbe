// A framework's allocator, served by one client at a time; buffers of former clients return to the
// pools that they came from.
//
// A framework keeps the installed functions permanently: buffers outlive their pool, their thread, a fork, and the
// interpreter. A client that no longer serves is therefore held until it has no live memory. Foreign addresses, made by
// no client, go to the previously installed functions.
#pragma once

#include <cstddef>
#include <vector>

#include "core/checked.hpp"
#include "core/client.hpp"
#include "core/threads.hpp"

namespace mempool {

class Hook {
 public:
  // A client that serves or has served.
  struct Entry {
    Client* client;
    Checked* checked;     // in front of the client; or null
    void* owner;          // keeps both in existence
    Atomic<Entry*> next;  // older entries
    Entry* also_unlinked = nullptr;
    // a newer entry on the same pool, which frees and counts the buffers this one left live
    Entry* heir = nullptr;
    Atomic<int> device{-1};  // the CUDA device that is known to be the client's; a bound device stays the same

    Address allocate(std::size_t bytes, bool zeroed, Stream stream = 0) noexcept {
      return checked == nullptr ? client->allocate(bytes, stream, zeroed) : checked->allocate(bytes, stream, zeroed);
    }
    bool free(Address address, bool* dead, Stream stream = 0) noexcept {
      return checked == nullptr ? client->free(address, stream, dead) : checked->free(address, stream, dead);
    }
    Address reallocate(Address address, std::size_t bytes) noexcept;
    std::size_t size_of(Address address, bool& ours) noexcept;
    bool nothing_alive() noexcept;
  };

  // static hooks exist before any code runs and are never destroyed, because buffers outlive everything
  constexpr Hook() = default;

  // --- called by the installer

  // Make `client` serve, through `checked` if not null. `owner` is an opaque object that keeps both in existence, held
  // until reclaim() returns the object. `instead`: replace the present server without a gap. no: another client serves;
  // again: the entry was still held; anew: `owner` was taken
  enum class Served { no, again, anew };
  // may throw std::bad_alloc
  Served serve(Client& client, Checked* checked, void* owner, bool instead = false);
  // Let no client serve from now on; buffers made before are still freed correctly.
  void stop() noexcept;
  Client* serving() noexcept;
  // Return and forget the owners of clients that do not serve and whose memory has no live buffers.
  std::vector<void*> reclaim();
  std::size_t held() noexcept;  // number of clients
  // Call before the first use; repeated calls do nothing.
  void prepare();

  // --- called by the framework; "present" means while the caller holds a Presence::Here

  bool nobody_serves() const noexcept { return serving_.load(std::memory_order_relaxed) == nullptr; }
  bool nobody_ever_served() const noexcept { return entries_.load(std::memory_order_relaxed) == nullptr; }
  // Return the entry that serves this thread's requests, or null: use the previously installed functions.
  // Present.
  Entry* serving_here() const noexcept {
    Entry* const entry = serving_.load(std::memory_order_acquire);
    return entry == nullptr || Client::Bypass::active() ? nullptr : entry;
  }
  // Free a buffer into the client of its allocation. False: foreign. Present.
  bool free(Address address, Stream stream = 0) noexcept;
  // Call `act` with each client that serves or has served. Present.
  template <class Act>
  void each(Act act) const {
    for (Entry* entry = entries_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->next.load(std::memory_order_acquire)) {
      act(*entry->client);
    }
  }
  // Call `act` with each entry, newest first, until it returns false. Present.
  template <class Act>
  void each_entry(Act act) const {
    for (Entry* entry = entries_.load(std::memory_order_acquire); entry != nullptr && act(*entry);
         entry = entry->next.load(std::memory_order_acquire)) {
    }
  }
  bool serves(const Entry& entry) const noexcept { return serving_.load(std::memory_order_relaxed) == &entry; }
  // Return the entry whose client made this live buffer, and the buffer's size; or null. Present.
  Entry* owner_of(Address address, std::size_t& bytes) noexcept;

 private:
  Atomic<Entry*> serving_{nullptr};  // one of entries_, or null
  Atomic<Entry*> entries_{nullptr};  // newest first; changed under `lock_`, read by threads that are present
  Entry* unlinked_ = nullptr;        // removed from entries_, but possibly still in use by a thread
  Lock lock_;
  bool prepared_ = false;
  Hook* also_prepared_ = nullptr;

  static void after_fork_in_child();
  static void inherit(Entry& heir) noexcept;
};

// The hook of PyTorch's CPU tensors. The libtorch part is in the companion (mempool/torch/companion.cpp), which
// is compiled against the user's libtorch and calls the functions of c_api.h.
namespace torch_cpu {
Hook& hook() noexcept;
}

}  // namespace mempool
