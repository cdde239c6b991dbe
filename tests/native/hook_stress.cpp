// NumPy's hook without NumPy: threads allocate, resize and free through a handler while clients come, go and are
// destroyed. Every buffer holds its thread's number, so that memory handed out twice or freed too early shows.
//
//   hook_stress ROUNDS [check]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../mempool/native/adapters/numpy_hook.cpp"  // which the harness leaves out of its objects
#include "devices/host_device.hpp"

namespace {

using namespace mempool;

numpy_hook::Handler handler{
    "default_allocator",
    1,
    {nullptr, [](void*, std::size_t n) { return std::malloc(n); },
     [](void*, std::size_t n, std::size_t each) { return std::calloc(n, each); },
     [](void*, void* old, std::size_t n) { return std::realloc(old, n); },
     [](void*, void* old, std::size_t) { std::free(old); }}};

std::atomic<bool> over{false};
std::atomic<long> wrong{0};

struct Buffer {
  unsigned char* data;
  std::size_t bytes;
};

void expect(const Buffer& buffer, std::size_t bytes, int value) {
  for (std::size_t i = 0; i < bytes; ++i) wrong += buffer.data[i] != value;
}

void fill(const Buffer& buffer, int value) { std::memset(buffer.data, value, buffer.bytes); }

Buffer fresh(std::size_t bytes, bool zeroed) {
  const numpy_hook::Allocator& a = handler.allocator;
  const Buffer buffer{static_cast<unsigned char*>(zeroed ? a.calloc(a.ctx, bytes, 1) : a.malloc(a.ctx, bytes)), bytes};
  if (zeroed) expect(buffer, bytes, 0);
  return buffer;
}

void resize(Buffer& buffer, std::size_t bytes, int value) {
  const std::size_t common = std::min(bytes, buffer.bytes);
  buffer = {static_cast<unsigned char*>(handler.allocator.realloc(nullptr, buffer.data, bytes)), bytes};
  expect(buffer, common, value);
  fill(buffer, value);
}

void work(int me) {
  std::mt19937 random(static_cast<unsigned>(me));
  std::deque<Buffer> live;
  while (!over) {
    live.push_back(fresh(1 + random() % 5000, random() % 3 == 0));
    fill(live.back(), me);
    if (random() % 5 == 0) resize(live.front(), 1 + random() % 6000, me);
    if (live.size() < 8) continue;
    expect(live.front(), live.front().bytes, me);
    handler.allocator.free(nullptr, live.front().data, 0);
    live.pop_front();
  }
  for (const Buffer& buffer : live) handler.allocator.free(nullptr, buffer.data, 0);
}

// An overflowing product is refused, and none of anything is something.
void refuse_overflow() {
  const numpy_hook::Allocator& a = handler.allocator;
  wrong += a.calloc(a.ctx, std::size_t{1} << 40, std::size_t{1} << 40) != nullptr;
  void* const nothing = a.calloc(a.ctx, 0, 8);
  wrong += nothing == nullptr;
  a.free(a.ctx, nothing, 0);
}

struct Served {
  explicit Served(bool check)
      : client(std::make_shared<Pool>(std::make_unique<HostDevice>(), PoolOptions{}), "stress"),
        checked(check ? std::make_unique<Checked>(client, Checked::FrontEnd{}) : nullptr) {}
  Client client;
  std::unique_ptr<Checked> checked;
};

int reclaim() {
  int count = 0;
  for (void* owner : numpy_hook::hook().reclaim()) {
    const std::unique_ptr<Served> served(static_cast<Served*>(owner));
    if (served->checked != nullptr) wrong += static_cast<long>(served->checked->faults_found());
    ++count;
  }
  return count;
}

}  // namespace

int main(int arguments, char** argument) {
  const int rounds = arguments > 1 ? std::atoi(argument[1]) : 100;
  if (!numpy_hook::attach(handler)) return 2;
  std::vector<std::thread> threads;
  for (int me = 1; me <= 4; ++me) threads.emplace_back(work, me);
  int reclaimed = 0;
  for (int round = 0; round < rounds; ++round) {
    auto served = std::make_unique<Served>(arguments > 2);
    Served* const owner = served.release();
    numpy_hook::hook().serve(owner->client, owner->checked.get(), owner);
    refuse_overflow();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    numpy_hook::hook().stop();
    reclaimed += reclaim();
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  reclaimed += reclaim();
  std::printf("%ld wrong, %d of %d clients reclaimed, %zu held\n", wrong.load(), reclaimed, rounds, numpy_hook::hook().held());
  return wrong == 0 && reclaimed == rounds && numpy_hook::hook().held() == 0 ? 0 : 1;
}
