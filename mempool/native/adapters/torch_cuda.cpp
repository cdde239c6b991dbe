#include "adapters/torch_cuda.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "devices/cuda_device.hpp"

namespace mempool::torch_cuda {
namespace {

constexpr int kDevices = 64;

Hook hook_;
const CudaDriver* driver_ = nullptr;
Atomic<void (*)(const char*)> raise_{nullptr};
std::array<Atomic<Client*>, kDevices> plain_{};
Lock making_;

// Fraction of the memory to which all pools of a device together are limited, by device; 0: never set.
std::array<Atomic<double>, kDevices> fractions_{};
std::array<SharedLimit, kDevices> limits_{};
std::array<Atomic<Client*>, kDevices> limited_{};  // the client to which the limit was applied last
Atomic<bool> any_fraction_{false};

// Graphs being captured. All pools of the device take part, also pools that no longer serve or begin to serve
// during the capture: memory freed there is used by captured streams too, and the serving pool keeps the
// graph's memory.
struct Capture {
  struct Streams {  // streams on which the capture was observed
    Lock lock;
    std::vector<Stream> seen;
  };
  int device;
  PoolId id;
  GraphPools::Filter takes;
  std::shared_ptr<Streams> streams;
  CudaDevice* probe;  // device object for stream queries
  // PyTorch has ended the capture, but a stream is still captured: the body of a conditional node is over
  bool ended = false;
};
// never destroyed, because tensors are freed until the very end
std::vector<Capture>& captures_ = *new std::vector<Capture>;
Lock capturing_;  // protects `captures_`; taken before a pool's lock
Atomic<unsigned> captured_{0};  // number of captures

Stream stream_of(StreamHandle handle) noexcept { return reinterpret_cast<Stream>(handle); }
Address address_of(void* pointer) noexcept { return reinterpret_cast<Address>(pointer); }

void limit(Client& client, std::size_t device, double fraction) noexcept {
  const std::size_t total = client.pool().source().device().memory().total;
  if (total == 0) return;
  limits_[device].bytes.store(static_cast<std::size_t>(std::floor(static_cast<double>(total) * fraction)));
  const Guarded guard(client.pool().lock);
  client.pool().source().share_limit(limits_[device]);
}

// Apply the fraction to a pool that was created after the fraction was set.
void limit_new_pool(Client& client, int device) noexcept {
  if (!any_fraction_.load(std::memory_order_relaxed) || device < 0 || device >= kDevices) return;
  const auto at = static_cast<std::size_t>(device);
  const double fraction = fractions_[at].load();
  if (fraction == 0 || limited_[at].exchange(&client) == &client) return;
  limit(client, at, fraction);
}

Client* make_client(int device);

// Return the client that serves this device now, creating one if needed; null: none can be created. Present.
Client* client_of(int device) {
  Client* const client = make_client(device);
  if (client != nullptr) limit_new_pool(*client, device);
  return client;
}

Client* make_client(int device) {
  if (Hook::Entry* const entry = hook_.serving_here()) {
    Device& its = entry->client->pool().source().device();
    if (its.is(device)) return entry->client;
    if (its.serves(device)) {  // binds the device from now on
      entry->client->device_is_bound();
      return entry->client;
    }
  }
  if (device < 0 || device >= kDevices || driver_ == nullptr) return nullptr;
  Atomic<Client*>& plain = plain_[static_cast<std::size_t>(device)];
  if (Client* const client = plain.load(std::memory_order_acquire)) return client;
  if (device >= driver_->count()) return nullptr;
  const Guarded guard(making_);
  if (plain.load(std::memory_order_relaxed) == nullptr) {
    const auto pool = std::make_shared<Pool>(std::make_unique<CudaDevice>(device, *driver_), PoolOptions{});
    pool->segments().set_retained_limit(~std::size_t{0});  // a plain caching allocator
    plain.store(new Client(pool, "plain"), std::memory_order_release);
  }
  return plain.load(std::memory_order_relaxed);
}

// Return the device object for stream queries, which belongs to no pool and outlives all of them.
CudaDevice* probe_of(int device) {
  static std::array<CudaDevice*, kDevices> probes{};
  const Guarded guard(making_);
  CudaDevice*& probe = probes[static_cast<std::size_t>(device)];
  if (probe == nullptr) probe = new CudaDevice(device, *driver_);
  return probe;
}

// Return the client that owns a live buffer, or null. Present.
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

// Call `act` with each client of a device: those that serve or have served, and the plain one.
template <class Act>
void with_pools(int device, Act act) {
  hook_.each([&](Client& client) {
    if (client.pool().source().device().is(device)) act(client);
  });
  if (device < 0 || device >= kDevices) return;
  if (Client* const client = plain_client(device)) act(*client);
}

bool goes_on(const Capture& capture) noexcept {
  const Guarded guard(capture.streams->lock);
  const std::vector<Stream>& seen = capture.streams->seen;
  return std::any_of(seen.begin(), seen.end(), [&](Stream stream) { return capture.probe->capturing(stream); });
}

// Finish a capture that is over; return the iterator behind it. Call with `capturing_` held, here and below.
std::vector<Capture>::iterator finish(std::vector<Capture>::iterator capture) {
  const auto [device, id] = std::pair(capture->device, capture->id);
  const auto next = captures_.erase(capture);
  captured_.fetch_sub(1);
  CudaDevice::end_capture(device);
  with_pools(device, [id = id](Client& client) {
    const Guarded guard(client.pool().lock);
    client.pool().end_graph(id);
  });
  return next;
}

// Finish captures that are over without a call of PyTorch, which does not report failed captures.
void settle() {
  for (auto it = captures_.begin(); it != captures_.end();) {
    const bool known = [&] {
      const Guarded guard(it->streams->lock);
      return !it->streams->seen.empty();
    }();
    it = known && !goes_on(*it) ? finish(it) : it + 1;
  }
}

void take_part(Client& client, const Capture& capture) {
  const Guarded guard(client.pool().lock);
  if (client.pool().capturing(capture.id)) return;
  if (!capture.ended) client.pool().begin_graph(capture.id, capture.takes);
}

// Add a client to the captures that began without it, before the client does anything else.
void take_part(Client& client) {
  if (captured_.load() == 0) return;
  const Guarded guard(capturing_);
  settle();
  for (const Capture& capture : captures_) {
    if (client.pool().source().device().is(capture.device)) take_part(client, capture);
  }
}

// Release memory that other pools of the device keep for later. `mine`: the client of the request.
void make_room(int device, const Client& mine) {
  with_pools(device, [&](Client& client) {
    if (&client != &mine) client.give_back(true);
  });
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
    Address address = 0;
    if (client != nullptr) {
      const Client::FirstAttempt first;
      address = client->allocate(bytes, stream_of(stream));
    }
    if (address == 0 && client != nullptr) {
      const Device& its = client->pool().source().device();
      const std::uint64_t refusals = its.refusals();
      make_room(device, *client);
      address = client->allocate(bytes, stream_of(stream));
      if (address == 0 && its.refusals() != refusals) throw std::runtime_error("CUDA error: " + its.last_refusal_text());
    }
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
  if (device < 0 || device >= kDevices) throw std::invalid_argument("there is no CUDA device " + std::to_string(device));
  const Presence::Here here;
  const auto at = static_cast<std::size_t>(device);
  fractions_[at].store(std::max(fraction, std::numeric_limits<double>::min()));  // 0 means never set
  limited_[at].store(nullptr);
  any_fraction_.store(true);
  with_pools(device, [&](Client& client) { limit(client, at, fraction); });
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
  if (device >= kDevices || client_of(device) == nullptr) {
    throw std::invalid_argument("there is no CUDA device " + std::to_string(device));
  }
  auto streams = std::make_shared<Capture::Streams>();
  const Guarded guard(capturing_);
  settle();
  const auto same = [&](const Capture& capture) { return capture.device == device && capture.id == id; };
  const auto known = std::find_if(captures_.begin(), captures_.end(), same);
  if (known != captures_.end()) streams = known->streams;  // the next part of a capture that continues
  CudaDevice* const probe = probe_of(device);
  GraphPools::Filter takes = [filter = std::move(filter), streams, probe](Stream stream) {
    if (!filter(reinterpret_cast<StreamHandle>(stream))) return false;
    // The default stream cannot be captured, and a query would report other streams' captures.
    if (stream == 0 || !probe->capturing(stream)) return true;
    const Guarded guard(streams->lock);
    std::vector<Stream>& seen = streams->seen;
    if (std::find(seen.begin(), seen.end(), stream) == seen.end()) seen.push_back(stream);
    return true;
  };
  if (known != captures_.end()) {
    known->takes = takes;
    known->ended = false;
    with_pools(device, [&](Client& client) {
      const Guarded guard(client.pool().lock);
      client.pool().begin_graph(id, takes);
    });
    return;
  }
  captures_.push_back({device, id, std::move(takes), std::move(streams), probe});
  captured_.fetch_add(1);
  CudaDevice::begin_capture(device);
  try {
    with_pools(device, [](Client& client) { take_part(client, captures_.back()); });
  } catch (...) {
    finish(captures_.end() - 1);
    throw;
  }
}

void end_pool(int device, PoolId id) {
  const Presence::Here here;
  const Guarded guard(capturing_);
  const auto same = [&](const Capture& capture) {
    return capture.device == device && capture.id == id && !capture.ended;
  };
  const auto found = std::find_if(captures_.begin(), captures_.end(), same);
  if (found == captures_.end()) return;
  if (!goes_on(*found)) {
    finish(found);
    return;
  }
  found->ended = true;
  with_pools(device, [&](Client& client) {
    const Guarded guard(client.pool().lock);
    client.pool().end_graph(id, true);
  });
}

// Release a graph's memory. Graphs may share an id, and PyTorch does not say which of them is gone. A pool
// that was created after some of them has seen fewer begin: the memory kept may belong to the others and is
// therefore kept until no more graphs are left than the pool has seen.
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
