// Which client counts a live buffer: by a number that is kept with it, so that any client may free it.
//
// While there has only ever been one client at a time, everything is number 0's, and nothing of this is done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mempool {

class Client;

using Owner = std::uint8_t;

class Owners {
 public:
  static constexpr Owner kWhoever = 255;  // of more clients than there are numbers for: counted by whoever frees it

  bool several() const noexcept { return several_; }
  // A number for a client that comes while `alive` buffers are number 0's, if that is the only one so far.
  Owner enlist(Client* client, std::size_t alive) noexcept {
    std::size_t number = 0;
    while (number < kWhoever && (owners_[number].client != nullptr || owners_[number].alive != 0)) ++number;
    if (number != 0 && !several_) {
      several_ = true;
      owners_[0].alive = alive;
    }
    if (number != kWhoever) owners_[number].client = client;
    return static_cast<Owner>(number);
  }
  // What it has left alive is nobody's. `alive`: of number 0, if that is the only one so far.
  void strike(const Client* client, std::size_t alive) noexcept {
    for (One& one : owners_) {
      if (one.client == client) one.client = nullptr;
    }
    if (!several_) owners_[0].alive = alive;
  }
  void hand_over(const Client* from, Client* to) noexcept {
    for (One& one : owners_) {
      if (one.client == from) one.client = to;
    }
  }
  void begins(Owner owner) noexcept { ++owners_[owner].alive; }
  // Who counts a buffer that is over; null: nobody any more.
  Client* ends(Owner owner, Client* freeing) noexcept {
    if (!several_ || owner == kWhoever) return freeing;
    --owners_[owner].alive;
    return owners_[owner].client;
  }
  Client* of(Owner owner, Client* asking) const noexcept {
    return !several_ || owner == kWhoever ? asking : owners_[owner].client;
  }

 private:
  struct One {
    Client* client = nullptr;
    std::size_t alive = 0;  // buffers, once there are several
  };
  bool several_ = false;
  std::array<One, kWhoever + 1> owners_;
};

}  // namespace mempool
