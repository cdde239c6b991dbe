// The client that counts a live buffer, stored with the buffer as a number so that any client may free it.
//
// As long as there has been only one client at a time, every buffer has number 0 and no bookkeeping is done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mempool {

class Client;

using Owner = std::uint8_t;

class Owners {
 public:
  // for clients beyond the available numbers: their buffers are counted by the client that frees them
  static constexpr Owner kWhoever = 255;

  bool several() const noexcept { return several_; }
  // Return a number for a new client. `alive`: live buffers, all of number 0 if that is the only number so
  // far.
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
  // Remove a client and orphan the client's live buffers. `alive`: live buffers of number 0 if that is the
  // only number so far.
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
  // Count the end of a buffer. Return the client that counts the buffer; null: the client no longer exists.
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
    std::size_t alive = 0;  // live buffers, counted once there are several clients
  };
  bool several_ = false;
  std::array<One, kWhoever + 1> owners_;
};

}  // namespace mempool
