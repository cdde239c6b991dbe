// A framework's allocator, which one client at a time serves, while what former ones gave is freed where it came from.
//
// A framework keeps our functions for ever: buffers outlive the pool that made them, their thread, a fork, and the
// interpreter. So a client that no longer serves is held until nothing of its memory is alive. What no client made is
// foreign, and goes to the functions that were there before.
#pragma once

#include <cstddef>
#include <vector>

#include "checked.hpp"
#include "client.hpp"
#include "presence.hpp"

namespace mempool {

class Hook {
 public:
  // A client that serves or served.
  struct Entry {
    Client* client;
    Checked* checked;     // before the client; or null
    void* owner;          // keeps both in existence
    Atomic<Entry*> next;  // older ones
    Entry* also_unlinked = nullptr;
    Entry* heir = nullptr;  // a newer one on the same pool, which frees and counts what this one left alive

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

  constexpr Hook() = default;  // statics are made before anything runs and never destroyed: buffers outlive them all

  // --- by whoever installs

  // From now on `client` serves, through `checked` if that is not null. `owner` is what keeps both in existence, opaque
  // here; it is held until reclaim() gives it back. `instead`: of whoever serves now, without a moment in between.
  enum class Served { no, again, anew };  // no: another one serves; again: it was still held; anew: `owner` was taken
  Served serve(Client& client, Checked* checked, void* owner, bool instead = false);  // may throw std::bad_alloc
  // Nobody serves from now on; buffers made before are freed as they should.
  void stop() noexcept;
  Client* serving() noexcept;
  // The owners of clients that do not serve and of whose memory nothing is alive; they are forgotten.
  std::vector<void*> reclaim();
  std::size_t held() noexcept;  // clients
  // Before the first use; more than once does nothing.
  void prepare();

  // --- by the framework; where it says "present", while a Presence::Here of the caller lives

  bool nobody_serves() const noexcept { return serving_.load(std::memory_order_relaxed) == nullptr; }
  bool nobody_ever_served() const noexcept { return entries_.load(std::memory_order_relaxed) == nullptr; }
  // What this thread's requests go to, or null: to the functions that were there before. Present.
  Entry* serving_here() const noexcept {
    Entry* const entry = serving_.load(std::memory_order_acquire);
    return entry == nullptr || Client::Bypass::active() ? nullptr : entry;
  }
  // Frees into whichever client made it. False: foreign. Present.
  bool free(Address address, Stream stream = 0) noexcept;
  // Calls `act` with each client that serves or served. Present.
  template <class Act>
  void each(Act act) const {
    for (Entry* entry = entries_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->next.load(std::memory_order_acquire)) {
      act(*entry->client);
    }
  }
  // The entry whose client made this live buffer, and its size; or null. Present.
  Entry* owner_of(Address address, std::size_t& bytes) noexcept;

 private:
  Atomic<Entry*> serving_{nullptr};  // one of entries, or null
  Atomic<Entry*> entries_{nullptr};  // newest first; changed under `lock_`, followed by anybody who is present
  Entry* unlinked_ = nullptr;        // taken out of entries; somebody may still be on them
  Lock lock_;
  bool prepared_ = false;
  Hook* also_prepared_ = nullptr;

  static void after_fork_in_child();
  static void inherit(Entry& heir) noexcept;
};

}  // namespace mempool
