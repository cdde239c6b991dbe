// Page-locked memory on the fake driver: threads fill buffers, queue copies that read them, and free them before these are
// done. Usage: pinned DRIVER SEED ROUNDS
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/client.hpp"
#include "devices/cuda_device.hpp"
#include "fake_driver.hpp"

using namespace mempool;

namespace {

constexpr Stream kHost = -(Stream{1} << 62);  // as mempool/pinned.py has it: the host is on no stream

// Whose memory comes too early shows: a queued copy finds what the next buffer was filled with.
void work(const stress::FakeDriver& fake, Client& client, unsigned seed, int rounds) {
  std::mt19937 random(seed);
  const stress::Context context = fake.primary(0);
  std::vector<stress::Handle> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(fake.stream(context, 0));
  for (int i = 0; i < rounds; ++i) {
    const std::size_t bytes = random() % 8 == 0 ? 100 : 4096 + random() % (std::size_t{3} << 20);
    const auto value = static_cast<unsigned char>(random());
    const Address address = client.allocate(bytes, kHost);
    if (address == 0) stress::fail("a request is refused although there is memory", 0, bytes);
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    for (unsigned uses = random() % 3; uses != 0; --uses) {
      const stress::Handle stream = streams[random() % streams.size()];
      fake.expect(stream, context, address, bytes, value);
      client.use(address, static_cast<Stream>(stream));
    }
    if (!client.free(address, kHost)) stress::fail("a live buffer is not freed", address, bytes);
    if (random() % 4 == 0) fake.finish(streams[random() % streams.size()], context);
    if (random() % 64 == 0) client.give_back(false);
  }
  for (const stress::Handle stream : streams) fake.finish(stream, context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const stress::FakeDriver fake(argv[1]);
  fake.reset(1);
  auto device = std::make_unique<CudaDevice>(0, CudaDriver::open(argv[1]), CudaKind::pinned);
  auto pool = std::make_shared<Pool>(std::move(device), PoolOptions{});
  {
    Client client(pool, "pinned");
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] { work(fake, client, 3 * static_cast<unsigned>(std::atoi(argv[2])) + t, std::atoi(argv[3])); });
    }
    for (std::thread& thread : threads) thread.join();
    client.give_back(true);
    if (client.stats().blocks.current != 0) stress::fail("the count of buffers is wrong", 0, 0);
  }
  pool.reset();
  if (fake.live_allocations() != 0) stress::fail("page-locked memory is left", 0, fake.live_allocations());
  if (fake.live_events() != 0) stress::fail("events are left", 0, fake.live_events());
  fake.check_faults();
}
