// Time of alloc + free in replay, through the C entry points, guard on. Usage: replay_bench BUFFERS THREADS ROUNDS
// Prints one JSON object: nanoseconds for each alloc + free pair of one thread, per round, and the hits counted.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "adapters/c_api.h"
#include "core/client.hpp"
#include "devices/simulated_device.hpp"

using namespace mempool;

namespace {

struct Event {
  bool alloc;
  std::uint32_t buffer;
};

// Training-shaped: activations freed in reverse, with short temporaries between.
struct Workload {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> offsets;
  std::vector<Event> events;
  std::size_t arena = 0;
};

Workload make(std::uint32_t buffers, Offset base, unsigned seed) {
  Workload w;
  std::mt19937 random(seed);
  std::vector<std::uint32_t> kept;
  Offset top = base;
  std::size_t peak = base;
  const auto allocate = [&] {
    const std::uint64_t size = 1024 + (random() % 4096) * 64;
    w.sizes.push_back(size);
    w.offsets.push_back(top);
    top += (size + 511) / 512 * 512;
    peak = std::max<std::size_t>(peak, top);
    w.events.push_back({true, static_cast<std::uint32_t>(w.sizes.size() - 1)});
    return static_cast<std::uint32_t>(w.sizes.size() - 1);
  };
  const auto release = [&](std::uint32_t buffer) {
    w.events.push_back({false, buffer});
    top = w.offsets[buffer];
  };
  for (std::uint32_t i = 0; i < buffers / 4; ++i) {
    kept.push_back(allocate());
    release(allocate());
  }
  while (!kept.empty()) {
    const std::uint32_t a = allocate(), b = allocate();
    release(b);
    release(a);
    release(kept.back());
    kept.pop_back();
  }
  w.arena = peak;
  return w;
}

void replay(Client& client, const Workload& w, unsigned iterations) {
  std::vector<void*> live(w.sizes.size());
  for (unsigned i = 0; i < iterations; ++i) {
    for (const Event& event : w.events) {
      if (event.alloc) {
        live[event.buffer] = mempool_alloc(&client, w.sizes[event.buffer], 0, 0);
      } else {
        mempool_free(&client, live[event.buffer], 0, 0, 0);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint32_t buffers = argc > 1 ? static_cast<std::uint32_t>(std::atoi(argv[1])) : 1000;
  const unsigned threads = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const unsigned rounds = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 5;
  auto pool = std::make_shared<Pool>(std::make_unique<SimulatedDevice>(SimulatedOptions{}), PoolOptions{});
  Client client(pool, "bench");
  std::vector<Workload> work;
  auto pattern = std::make_unique<Pattern>();
  Offset base = 0;
  for (unsigned t = 0; t < threads; ++t) {
    work.push_back(make(buffers / threads, base, t));
    base = work.back().arena;
    Table table;
    table.sequence = t;
    table.sizes = work.back().sizes;
    for (const Offset offset : work.back().offsets) {
      table.slots.emplace_back();
      table.slots.back().offset = offset;
    }
    pattern->tables.push_back(std::move(table));
  }
  pattern->arena_bytes = base;
  client.load(nullptr, std::move(pattern));

  const unsigned iterations = std::max(1u, 2000000u / buffers);
  std::printf("{\"buffers\": %u, \"threads\": %u, \"ns\": [", buffers, threads);
  for (unsigned round = 0; round <= rounds; ++round) {  // round 0 warms up and is not printed
    Atomic<unsigned> ready{0};
    const auto body = [&](unsigned t) {
      ready.fetch_add(1);
      while (ready.load() < threads) {
      }
      replay(client, work[t], iterations);
    };
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (unsigned t = 1; t < threads; ++t) others.emplace_back(body, t);
    body(0);
    for (std::thread& other : others) other.join();
    const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    const double pairs = static_cast<double>(iterations) * static_cast<double>(work[0].sizes.size());
    if (round > 0) std::printf("%s%.2f", round > 1 ? ", " : "", ns / pairs);
  }
  const ClientStats stats = client.stats();
  const auto hits = stats.steady[0];
  std::uint64_t all = 0;
  for (const auto count : stats.steady) all += count;
  std::printf("], \"hits\": %llu, \"allocations\": %llu, \"table_bytes_per_buffer\": %.1f}\n",
              static_cast<unsigned long long>(hits), static_cast<unsigned long long>(all),
              static_cast<double>(pool->table_bytes()) / buffers);
}
