// Captures that PyTorch begins and ends in other ways than one after the other: with conditional nodes, whose bodies have
// a begin and an end each while the graph around them goes on, and captures that fail, of which it never says the end.
//
//   torch_captures FAKE_DRIVER
#include <cstdio>

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

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  Setting s(argv[1]);
  bodies_of_conditional_nodes(s);
  a_capture_that_fails(s);
  s.fake.check_faults();
  std::puts("holds");
}
