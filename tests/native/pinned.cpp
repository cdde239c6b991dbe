// Page-locked memory on the fake driver: threads fill buffers, queue copies that read them, and free them before these are
// done. Usage: pinned DRIVER SEED ROUNDS
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/client.hpp"
#include "devices/cuda_device.hpp"
#include "observer.hpp"

using namespace mempool;

namespace {

using Handle = std::uintptr_t;   // a stream's
using Context = std::uintptr_t;  // a device's primary one

// The fake CUDA driver of mempool/rehearsal/native/driver/, opened as a program opens the real one.
class FakeDriver {
 public:
  explicit FakeDriver(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) stress::fail(dlerror(), 0, 0);
    find(reset, "fake_reset");
    find(primary, "fake_primary");
    find(stream, "fake_stream");
    find(finish, "fake_finish");
    find(live_allocations, "fake_live_allocations");
    find(live_events, "fake_live_events");
    find(faults_, "fake_faults");
    find(fault_, "fake_fault");
    find(expect_, "fake_expect");
  }

  void (*reset)(int devices);
  Context (*primary)(int device);
  Handle (*stream)(Context context, int blocking);
  void (*finish)(Handle stream, Context context);
  std::size_t (*live_allocations)();
  std::size_t (*live_events)();

  // A kernel that reads: of what is large, both ends are enough.
  void expect(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value) const {
    const std::size_t end = std::min<std::size_t>(bytes, 4096);
    for (const Address at : {address, address + bytes - end}) {
      const int code = expect_(stream, context, at, end, value);
      if (code != 0) stress::fail("a kernel that reads", 0, static_cast<std::size_t>(code));
    }
  }
  // The device has seen nothing that no correct program does.
  void check_faults() const {
    if (faults_() == 0) return;
    static char text[200];
    fault_(0, text, sizeof text);
    stress::fail(text, 0, 0);
  }

 private:
  template <class Function>
  void find(Function& function, const char* symbol) {
    void* const found = dlsym(library_, symbol);
    if (found == nullptr) stress::fail(symbol, 0, 0);
    function = reinterpret_cast<Function>(found);
  }

  void* library_;
  std::size_t (*faults_)();
  void (*fault_)(std::size_t index, char* text, std::size_t bytes);
  int (*expect_)(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value);
};

constexpr Stream kHost = -(Stream{1} << 62);  // as mempool/pinned.py has it: the host is on no stream

// Whose memory comes too early shows: a queued copy finds what the next buffer was filled with.
void work(const FakeDriver& fake, Client& client, unsigned seed, int rounds) {
  std::mt19937 random(seed);
  const Context context = fake.primary(0);
  std::vector<Handle> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(fake.stream(context, 0));
  for (int i = 0; i < rounds; ++i) {
    const std::size_t bytes = random() % 8 == 0 ? 100 : 4096 + random() % (std::size_t{3} << 20);
    const auto value = static_cast<unsigned char>(random());
    const Address address = client.allocate(bytes, kHost);
    if (address == 0) stress::fail("a request is refused although there is memory", 0, bytes);
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    for (unsigned uses = random() % 3; uses != 0; --uses) {
      const Handle stream = streams[random() % streams.size()];
      fake.expect(stream, context, address, bytes, value);
      client.use(address, static_cast<Stream>(stream));
    }
    if (!client.free(address, kHost)) stress::fail("a live buffer is not freed", address, bytes);
    if (random() % 4 == 0) fake.finish(streams[random() % streams.size()], context);
    if (random() % 64 == 0) client.give_back(false);
  }
  for (const Handle stream : streams) fake.finish(stream, context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const FakeDriver fake(argv[1]);
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
