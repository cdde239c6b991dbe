// Short programs of PyTorch's calls: captures with conditional nodes, whose bodies begin and end while the graph around
// them goes on; captures that fail, whose end PyTorch never reports; and a memory fraction that two pools share.
//
//   torch_scenarios FAKE_DRIVER
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "devices/cuda_device.hpp"
#include "fake_driver.hpp"
#include "torch_calls.hpp"

namespace {

using namespace stress;

constexpr std::size_t kBytes = std::size_t{30} << 20;

struct Setting {
  explicit Setting(const char* library) : fake(library) {
    fake.reset(1);
    mempool::torch_cuda::prepare(mempool::CudaDriver::open(library));
    context = fake.primary(0);
    fake.set_current(context);
    captured = fake.stream(context, 0);
  }

  void begin() {
    torch.begin_allocate_to_pool(0, {7, 0}, [this](cudaStream_t stream) {
      return reinterpret_cast<Handle>(stream) == captured && fake.capture_status(captured, context) == 1;
    });
  }
  void come_and_go(Handle stream) {
    void* const address = torch.alloc(kBytes, 0, reinterpret_cast<cudaStream_t>(stream));
    torch.free(address, kBytes, 0, reinterpret_cast<cudaStream_t>(stream));
  }
  void expect(bool holds, const char* what) const {
    if (!holds) fail(what, 0, 0);
  }

  FakeDriver fake;
  TorchCalls torch;
  Context context = 0;
  Handle captured = 0;
};

void bodies_of_conditional_nodes(Setting& s) {
  s.begin();
  FakeDriver::check(s.fake.begin_capture(s.captured, s.context, 0), "begin a capture");
  for (int body = 0; body < 3; ++body) {
    s.come_and_go(s.captured);
    s.torch.end_allocate_to_pool(0, {7, 0});
    s.come_and_go(0);   // other memory, that would go back
    s.torch.reset();
    s.expect(s.fake.capture_status(s.captured, s.context) == 1, "the body's end has broken the capture");
    s.begin();
  }
  const int graph = s.fake.end_capture(s.captured, s.context);
  s.expect(graph > 0, "the capture has failed");
  s.torch.end_allocate_to_pool(0, {7, 0});
  for (int body = 0; body < 4; ++body) s.torch.release_pool(0, {7, 0});
  s.fake.destroy_graph(graph);
  s.torch.reset();
  s.expect(s.fake.live_allocations() == 0, "after conditional nodes memory does not go back");
}

void a_capture_that_fails(Setting& s) {
  s.begin();
  FakeDriver::check(s.fake.begin_capture(s.captured, s.context, 0), "begin a capture");
  s.come_and_go(s.captured);
  const int graph = s.fake.end_capture(s.captured, s.context);  // and PyTorch raises
  s.expect(graph > 0, "the capture has failed");
  s.fake.destroy_graph(graph);
  s.come_and_go(0);
  s.come_and_go(s.captured);  // no graph's any more
  s.torch.reset();
  s.expect(s.fake.live_allocations() == 1, "after a capture that failed memory does not go back");
  s.torch.release_pool(0, {7, 0});
  s.torch.reset();
  s.expect(s.fake.live_allocations() == 0, "the graph's memory does not go back");
}

// PyTorch limits what a process holds of a device, with however many pools.
void memory_fraction_of_two_pools(Setting& s, const char* library) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const auto fits = [&](std::size_t bytes) -> void* {
    try {
      return s.torch.alloc(bytes, 0, nullptr);
    } catch (const std::runtime_error&) {
      return nullptr;
    }
  };
  s.fake.set_capacity(0, 400 * kMiB);
  s.torch.memory_fraction(0.5, 0);
  void* const first = fits(150 * kMiB);
  s.expect(first != nullptr, "a buffer below the fraction is refused");
  auto pool = std::make_shared<mempool::Pool>(
      std::make_unique<mempool::CudaDevice>(0, mempool::CudaDriver::open(library)), mempool::PoolOptions{});
  mempool::Client client(pool, "second");
  mempool::torch_cuda::hook().serve(client, nullptr, &client);
  s.expect(fits(100 * kMiB) == nullptr, "two pools hold more than the fraction");
  void* const second = fits(50 * kMiB);
  s.expect(second != nullptr, "the rest of the fraction is refused");
  s.torch.free(first, 150 * kMiB, 0, nullptr);
  s.torch.free(second, 50 * kMiB, 0, nullptr);
  void* const whole = fits(190 * kMiB);
  s.expect(whole != nullptr, "memory that the other pool has given back is refused");
  s.torch.free(whole, 190 * kMiB, 0, nullptr);
  mempool::torch_cuda::hook().stop();
  s.torch.reset();
  mempool::torch_cuda::hook().reclaim();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  Setting s(argv[1]);
  bodies_of_conditional_nodes(s);
  a_capture_that_fails(s);
  memory_fraction_of_two_pools(s, argv[1]);
  s.fake.check_faults();
  std::puts("holds");
}
