#include "torch_cuda.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda_device.hpp"

namespace mempool::torch_cuda {
namespace {

constexpr int kDevices = 64;

Hook hook_;
const CudaDriver* driver_ = nullptr;
Atomic<void (*)(const char*)> raise_{nullptr};
std::array<Atomic<Client*>, kDevices> plain_{};
Lock making_;

// Graphs that are being captured. All pools of the device take part, those too that serve no more or begin to serve in the
// middle: what is freed there is used by streams of the capture too, and whichever serves keeps the graph's memory.
struct Capture {
  int device;
  PoolId id;
  GraphPools::Filter takes;
};
std::vector<Capture> captures_;
Lock capturing_;  // of `captures_`; taken before a pool's
Atomic<unsigned> captured_{0};  // how many there are

Stream stream_of(StreamHandle handle) noexcept { return reinterpret_cast<Stream>(handle); }
Address address_of(void* pointer) noexcept { return reinterpret_cast<Address>(pointer); }

// The client that serves this device now, made where there is none; null: none can be made. Present.
Client* client_of(int device) {
  if (Hook::Entry* const entry = hook_.serving_here()) {
    Device& its = entry->client->pool().source().device();
    if (its.is(device)) return entry->client;
    if (its.serves(device)) {  // from now on
      entry->client->device_is_bound();
      return entry->client;
    }
  }
  if (device < 0 || device >= kDevices || driver_ == nullptr || device >= driver_->count()) return nullptr;
  Atomic<Client*>& plain = plain_[static_cast<std::size_t>(device)];
  if (Client* const client = plain.load(std::memory_order_acquire)) return client;
  const Guarded guard(making_);
  if (plain.load(std::memory_order_relaxed) == nullptr) {
    const auto pool = std::make_shared<Pool>(std::make_unique<CudaDevice>(device, *driver_), PoolOptions{});
    pool->segments().set_retained_limit(~std::size_t{0});  // a caching allocator like others
    plain.store(new Client(pool, "plain"), std::memory_order_release);
  }
  return plain.load(std::memory_order_relaxed);
}

// The client of whose memory a live buffer is, or null. Present.
Client* owner_of(Address address) noexcept {
  std::size_t bytes = 0;
  if (Hook::Entry* const entry = hook_.owner_of(address, bytes)) return entry->client;
  for (const Atomic<Client*>& plain : plain_) {
    Client* const client = plain.load(std::memory_order_acquire);
    if (client == nullptr) continue;
    const Guarded guard(client->pool().lock);
    if (client->pool().at(address).is_live()) return client;
  }
  return nullptr;
}

// Calls `act` with each pool of a device, of clients that serve or served, and plain ones.
template <class Act>
void with_pools(int device, Act act) {
  hook_.each([&](Client& client) {
    if (client.pool().source().device().is(device)) act(client);
  });
  if (device < 0 || device >= kDevices) return;
  if (Client* const client = plain_client(device)) act(*client);
}

// `capturing_` is held.
void take_part(Client& client, const Capture& capture) {
  const Guarded guard(client.pool().lock);
  if (!client.pool().capturing(capture.id)) client.pool().begin_graph(capture.id, capture.takes);
}

// Before a client does anything while a graph is captured that began without it.
void take_part(Client& client) {
  if (captured_.load() == 0) return;
  const Guarded guard(capturing_);
  for (const Capture& capture : captures_) {
    if (client.pool().source().device().is(capture.device)) take_part(client, capture);
  }
}

std::string mebibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

[[noreturn]] void refuse(std::size_t bytes, int device, Client* client) {
  std::string text = "CUDA out of memory. Tried to allocate " + mebibytes(bytes) + ". ";
  if (client == nullptr) {
    text += "There is no CUDA device " + std::to_string(device) + ".";
  } else {
    const DeviceMemory memory = client->pool().source().device().memory();
    const OutOfMemory o = Client::last_out_of_memory();
    text += "GPU " + std::to_string(device) + " has a total capacity of " + mebibytes(memory.total) + " of which " +
            mebibytes(memory.free) + " is free. The pool holds " + mebibytes(o.reserved) + " (" + mebibytes(o.arena) +
            " of them planned), of which " + mebibytes(o.live) + " is live";
    if (o.limit < (std::size_t{1} << 62)) text += "; it is limited to " + mebibytes(o.limit);
    text += ".";
  }
  if (const auto raise = raise_.load()) raise(text.c_str());
  throw std::runtime_error(text);
}

}  // namespace

Hook& hook() noexcept { return hook_; }

void prepare(const CudaDriver& driver) {
  hook_.prepare();
  const Guarded guard(making_);
  if (driver_ == nullptr) driver_ = &driver;
}

void set_refusal(void (*raise)(const char*)) noexcept { raise_.store(raise); }

Client* plain_client(int device) noexcept {
  if (device < 0 || device >= kDevices) return nullptr;
  return plain_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
}

void* allocate(std::size_t bytes, int device, StreamHandle stream) {
  if (bytes == 0) return nullptr;
  Client* client = nullptr;
  {
    const Presence::Here here;
    client = client_of(device);
    if (client != nullptr) take_part(*client);
    const Address address = client == nullptr ? 0 : client->allocate(bytes, stream_of(stream));
    if (address != 0) return reinterpret_cast<void*>(address);
    refuse(bytes, device, client);
  }
}

void free(void* pointer, std::size_t, int device, StreamHandle stream) {
  if (pointer == nullptr) return;
  const Presence::Here here;
  const Address address = address_of(pointer);
  Client* const plain = plain_client(device);
  if (plain != nullptr) {
    bool dead = false;
    if (plain->free(address, stream_of(stream), &dead) || dead) return;
  }
  hook_.free(address, stream_of(stream));
}

void init(int) {}

void empty_cache() {
  const Presence::Here here;
  const auto give_back = [](Client& client) {
    take_part(client);
    client.give_back(false);
  };
  hook_.each(give_back);
  for (const Atomic<Client*>& plain : plain_) {
    if (Client* const client = plain.load(std::memory_order_acquire)) give_back(*client);
  }
}

void set_memory_fraction(double fraction, int device) {
  if (!(fraction >= 0) || fraction > 1) throw std::invalid_argument("a memory fraction is between 0 and 1");
  const Presence::Here here;
  client_of(device);  // so that there is one to keep it
  with_pools(device, [&](Client& client) {
    const std::size_t total = client.pool().source().device().memory().total;
    if (total == 0) return;
    const auto limit = static_cast<std::size_t>(std::floor(static_cast<double>(total) * fraction));
    const Guarded guard(client.pool().lock);
    client.pool().source().set_limit(std::min(limit, client.pool().options().max_reserved));
  });
}

void* base_of(void* pointer, std::size_t* bytes) {
  const Presence::Here here;
  Pool::Range range{address_of(pointer), 0};
  if (Client* const client = owner_of(range.base)) {
    const Guarded guard(client->pool().lock);
    range = client->pool().reservation_of(range.base);
  }
  if (bytes != nullptr) *bytes = range.bytes;
  return reinterpret_cast<void*>(range.base);
}

void record_stream(void* pointer, StreamHandle stream) {
  if (pointer == nullptr) return;
  const Presence::Here here;
  if (Client* const client = owner_of(address_of(pointer))) client->use(address_of(pointer), stream_of(stream));
}

void begin_pool(int device, PoolId id, std::function<bool(StreamHandle)> filter) {
  const Presence::Here here;
  if (client_of(device) == nullptr) throw std::invalid_argument("there is no CUDA device " + std::to_string(device));
  GraphPools::Filter takes = [filter = std::move(filter)](Stream stream) {
    return filter(reinterpret_cast<StreamHandle>(stream));
  };
  try {
    const Guarded guard(capturing_);
    captures_.push_back({device, id, std::move(takes)});
    captured_.fetch_add(1);
    CudaDevice::begin_capture(device);
    with_pools(device, [](Client& client) { take_part(client, captures_.back()); });
  } catch (...) {
    end_pool(device, id);
    release_pool(device, id);
    throw;
  }
}

void end_pool(int device, PoolId id) {
  const Presence::Here here;
  const Guarded guard(capturing_);
  const auto same = [&](const Capture& capture) { return capture.device == device && capture.id == id; };
  const auto found = std::find_if(captures_.begin(), captures_.end(), same);
  if (found == captures_.end()) return;
  captures_.erase(found);
  captured_.fetch_sub(1);
  CudaDevice::end_capture(device);
  with_pools(device, [&](Client& client) {
    const Guarded guard(client.pool().lock);
    client.pool().end_graph(id);
  });
}

// Graphs may share an id, and nobody says which of them is gone. A pool that came after some of them has seen fewer begin:
// what it keeps may be the others', so it keeps it until no more graphs are left than it has seen.
void release_pool(int device, PoolId id) {
  const Presence::Here here;
  const Guarded guard(capturing_);
  unsigned most = 0;
  const auto uses = [&](Client& client) {
    const Guarded guard(client.pool().lock);
    return client.pool().graph_uses(id);
  };
  with_pools(device, [&](Client& client) { most = std::max(most, uses(client)); });
  with_pools(device, [&](Client& client) {
    if (uses(client) != most) return;
    const Guarded guard(client.pool().lock);
    client.pool().release_graph(id);
  });
}

}  // namespace mempool::torch_cuda
