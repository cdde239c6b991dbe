// A checking client: redzones around buffers, poison in freed buffers, and the sites of allocations and
// frees.
//
// Memory of the client:
//   | 64 bytes of redzone | the buffer | redzone to the next multiple of 64, and 64 more |
//
// A freed buffer is filled with poison and kept in quarantine before it returns to the client; the oldest buffers leave
// first. Redzones are checked at the free of a buffer, poison at its end of quarantine, and both by verify(). Faults are
// collected and reported to a listener, and the program continues. Host memory only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "core/client.hpp"

namespace mempool {

// Number of a site in the program, assigned and explained by a front end; 0: unknown.
using Site = std::uint32_t;

struct Fault {
  enum Kind : std::uint8_t { past_end, before_begin, after_free, double_free, inside } kind;
  Address address;        // of the buffer
  std::size_t bytes;      // of the buffer
  std::ptrdiff_t offset;  // offset from `address` of the first overwritten byte, or of the freed address
  Site allocated, freed;  // freed: 0 while the buffer is live
  Site noticed;           // where the fault was detected
};

class Checked {
 public:
  struct FrontEnd {  // called without locks held, by any thread
    Site (*here)() = nullptr;
    void (*found)() = nullptr;
  };
  Checked(Client& client, const FrontEnd& front_end);
  ~Checked();  // ends the quarantine; live buffers stay with the client
  Checked(const Checked&) = delete;
  Checked& operator=(const Checked&) = delete;

  // Same as the client's functions.
  Address allocate(std::size_t bytes, Stream stream, bool zeroed = false) noexcept;
  bool free(Address address, Stream stream, bool* dead = nullptr) noexcept;
  Address reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept;
  std::size_t size_of(Address address, bool& ours) noexcept;

  void verify() noexcept;  // checks all buffers now
  void flush() noexcept;   // ends the quarantine
  std::vector<Fault> faults();
  std::uint64_t faults_found();  // unlike the list, not bounded
  Client& client() noexcept { return client_; }

 private:
  struct Record {
    std::size_t bytes;
    Stream stream;
    Site allocated, freed;
    bool live;
  };
  using Records = std::map<Address, Record>;

  bool fault(Fault::Kind kind, const Records::value_type& record, std::ptrdiff_t offset, Site noticed) noexcept;
  bool inspect(const Records::value_type& record, Site noticed) noexcept;
  bool wrong_free(Address address, Site here) noexcept;
  // memory for the client, to be returned once the lock is free; fixed size, because freeing must not
  // allocate
  struct Released {
    static constexpr std::size_t kMost = 16;
    Address base[kMost];
    Stream stream[kMost];
    std::size_t count = 0;
    bool full() const noexcept { return count == kMost; }
    void add(Address address, Stream of) noexcept {
      base[count] = address;
      stream[count++] = of;
    }
  };
  void bury(Records::iterator record, Stream stream, Site here, Released& released);
  void discharge(bool all, Site here, Released& released) noexcept;
  void make_room(bool all, Site here) noexcept;
  void give_back(const Released& released) noexcept;
  Site here() const noexcept { return front_end_.here == nullptr ? 0 : front_end_.here(); }
  void tell(bool found) const noexcept {
    if (found && front_end_.found != nullptr) front_end_.found();
  }

  Client& client_;
  FrontEnd front_end_;
  Lock lock_;                        // never held while the client is called
  Records records_;                  // live and quarantined buffers, by address
  std::deque<Address> quarantine_;   // oldest first
  std::size_t quarantined_ = 0;      // bytes
  std::vector<Fault> faults_;
  std::uint64_t found_ = 0;

  friend struct CheckedFork;
};

}  // namespace mempool
