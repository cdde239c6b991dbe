// PyTorch's CUDA tensors without PyTorch and without a GPU: threads call what PyTorch is given on a fake driver, whose
// streams lag behind the host. Every buffer is written when it is made and looked at when it goes, in stream order, so
// that memory reused too early, or by somebody else than the graph that has it, shows as a fault of the driver.
//
//   torch_cuda DRIVER SEED ROUNDS THREADS
//
// Prints one JSON object; exit status 1 and one line on stderr where something that must hold did not.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "devices/cuda_device.hpp"
#include "fake_driver.hpp"
#include "observer.hpp"
#include "program.hpp"
#include "torch_calls.hpp"

using namespace stress;
using mempool::Client;
using mempool::Hook;
using mempool::Pool;

namespace {

constexpr int kDevices = 2;
constexpr std::size_t kMiB = std::size_t{1} << 20;

struct Buffer {
  Address address = 0;
  std::size_t bytes = 0;
  int device = 0;
  Handle stream = 0;
  unsigned char value = 0;
};

struct Refused {
  std::string text;
};

struct Setting {
  explicit Setting(const char* path) : fake(path) {}

  FakeDriver fake;
  TorchCalls torch;
  bool kinds = false;  // pools have memory of every kind, not plain memory alone
  Context contexts[kDevices] = {};
  std::vector<Handle> streams[kDevices];  // which all threads use
  Ledger ledgers[kDevices];
  Program program;  // of the streams that are planned
  std::mutex mutex;
  std::vector<Buffer> mailbox;  // made by one thread, freed by any
  std::atomic<bool> stop{false};
  std::atomic<bool> plenty{false};  // no request may be refused
  std::atomic<std::uint64_t> made{0}, refused{0}, foreign{0}, captures{0}, launches{0}, clients{0}, hits{0};
  std::atomic<unsigned> next_graph_pool{1};
};

void* pointer(Address address) { return reinterpret_cast<void*>(address); }
cudaStream_t stream_of(Handle handle) { return reinterpret_cast<cudaStream_t>(handle); }

std::size_t tensor_size(Random& random) {
  switch (below(random, 20)) {
    case 0: return 10 * kMiB + below(random, 4 * kMiB);  // a segment of its own
    case 1: case 2: case 3: return 1 + below(random, 512);
    case 4: return 1 * kMiB + below(random, 2 * kMiB);
    default: return 513 + below(random, 100000);
  }
}

struct Graph {
  int number = 0;
  MempoolId pool;
  bool shared = false;          // the pool is another graph's too, and each launch may write to the other's memory
  bool launched = false;
  std::vector<Buffer> outputs;  // alive
};

class Worker {
 public:
  Worker(Setting& setting, std::uint64_t seed) : s_(setting), random_(seed) {
    device_ = static_cast<int>(below(random_, kDevices));
    captured_ = s_.fake.stream(s_.contexts[device_], 0);
    side_ = s_.fake.stream(s_.contexts[device_], 0);
  }

  void run(unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
      step();
      s_.fake.check_faults();
    }
  }
  void finish() {
    while (!s_.mailbox.empty()) take_over();
    while (!kept_.empty()) free_one(kept_, below(random_, kept_.size()));
    while (!graphs_.empty()) destroy(below(random_, graphs_.size()));
    while (!outputs_.empty()) free_one(outputs_, 0);
    for (const Handle stream : {captured_, side_}) s_.fake.finish(stream, s_.contexts[device_]);
  }

 private:
  void step() {
    switch (below(random_, 24)) {
      case 0: iteration(); break;
      case 1: nothing(); break;
      case 2: if (chance(random_, 20)) s_.torch.reset(); break;
      case 3: if (chance(random_, 10)) fraction(); break;
      case 4: hand_over(); break;
      case 5: take_over(); break;
      case 6: if (graphs_.size() < 3) capture(); break;
      case 7: if (graphs_.size() > 1 || chance(random_, 10)) destroy(below(random_, 4)); break;
      case 8: case 9: launch(); break;
      case 10: case 11: let_go_on(); break;
      case 12: case 13: case 14: case 15: use_elsewhere(); break;
      default:
        if (kept_.size() < 4 || (kept_.size() < 24 && chance(random_, 50))) keep(make(any_device(), tensor_size(random_)));
        else free_one(kept_, below(random_, kept_.size()));
    }
  }

  int any_device() { return static_cast<int>(below(random_, kDevices)); }
  Handle any_stream(int device) { return s_.streams[device][below(random_, s_.streams[device].size())]; }

  // --- tensors

  Buffer make(int device, std::size_t bytes) { return make(device, bytes, any_stream(device)); }
  Buffer make(int device, std::size_t bytes, Handle stream) {
    Buffer buffer{0, bytes, device, stream, static_cast<unsigned char>(1 + below(random_, 255))};
    try {
      buffer.address = reinterpret_cast<Address>(s_.torch.alloc(bytes, device, stream_of(stream)));
    } catch (const std::runtime_error& error) {
      refused(error.what(), bytes);
      return buffer;
    } catch (const Refused& error) {
      refused(error.text.c_str(), bytes);
      return buffer;
    }
    if (buffer.address == 0) fail("null where it should throw", 0, bytes);
    if (buffer.address % 512 != 0) fail("misaligned", buffer.address, bytes);
    s_.ledgers[device].insert(buffer.address, bytes);
    ++s_.made;
    if (chance(random_, 10)) check_base(buffer);
    s_.fake.write(stream, s_.contexts[device], buffer.address, bytes, buffer.value);
    return buffer;
  }
  void refused(const char* text, std::size_t bytes) {
    ++s_.refused;
    if (std::strncmp(text, "CUDA out of memory.", 19) != 0) fail(text, 0, bytes);
    if (s_.plenty) fail("refused although there is plenty", 0, bytes);
  }
  void check_base(const Buffer& buffer) {
    std::size_t bytes = 0;
    const auto base = reinterpret_cast<Address>(s_.torch.base_alloc(pointer(buffer.address), &bytes));
    if (base > buffer.address || buffer.address + buffer.bytes > base + bytes) {
      fail("a buffer is not in its reservation", buffer.address, buffer.bytes);
    }
  }
  void look(const Buffer& buffer, Handle stream) {
    s_.fake.expect(stream, s_.contexts[buffer.device], buffer.address, buffer.bytes, buffer.value);
  }
  // PyTorch names the stream that a tensor was made on, whoever frees it.
  void free(const Buffer& buffer) {
    look(buffer, buffer.stream);
    give_back(buffer);
  }
  void give_back(const Buffer& buffer) {
    s_.ledgers[buffer.device].erase(buffer.address);
    s_.torch.free(pointer(buffer.address), buffer.bytes, buffer.device, stream_of(buffer.stream));
  }
  void keep(const Buffer& buffer) {
    if (buffer.address != 0) kept_.push_back(buffer);
  }
  void free_one(std::vector<Buffer>& buffers, std::size_t index) {
    std::swap(buffers[index], buffers.back());
    const Buffer buffer = buffers.back();
    buffers.pop_back();
    free(buffer);
  }

  // A side stream reads what another made; the program forgets it while the side stream lags.
  void use_elsewhere() {
    if (kept_.empty()) return keep(make(any_device(), tensor_size(random_)));
    const std::size_t index = below(random_, kept_.size());
    const Buffer buffer = kept_[index];
    const Handle other = any_stream(buffer.device);
    if (other != buffer.stream) s_.fake.order(s_.contexts[buffer.device], buffer.stream, other);
    look(buffer, other);
    s_.torch.record_stream(pointer(buffer.address), stream_of(other));
    ++s_.foreign;
    if (chance(random_, 60)) free_one(kept_, index);
  }

  // What a plan knows: the same sizes in the same order on one of two streams.
  void iteration() {
    const Program& program = s_.program;
    const Handle stream = s_.streams[0][chance(random_, 70) ? 0 : 1];
    const unsigned scale = Program::any_scale(random_);
    std::vector<Buffer> live(program.sizes.size());
    for (std::size_t k = 0; k < live.size(); ++k) {
      if (chance(random_, 2)) keep(make(0, tensor_size(random_), stream));
      live[k] = make(0, Program::scaled(program.sizes[k], scale), stream);
      for (std::size_t i = 0; i <= k; ++i) {
        if (live[i].address == 0 || i + program.lives[i] > k + 1) continue;
        free(live[i]);
        live[i].address = 0;
      }
    }
    for (const Buffer& buffer : live) keep(buffer);
    while (kept_.size() > 12) free_one(kept_, below(random_, kept_.size()));
  }

  void nothing() {
    if (s_.torch.alloc(0, any_device(), nullptr) != nullptr) fail("something for no bytes", 0, 0);
    s_.torch.free(nullptr, 0, any_device(), nullptr);
    s_.torch.record_stream(nullptr, nullptr);
    try {
      s_.torch.alloc(100, 7, nullptr);
      fail("memory of a device that is not there", 0, 0);
    } catch (const std::runtime_error&) {
    } catch (const Refused&) {
    }
  }
  void fraction() {
    s_.torch.memory_fraction(0.5, any_device());
    keep(make(any_device(), tensor_size(random_)));
    for (int device = 0; device < kDevices; ++device) s_.torch.memory_fraction(1, device);
  }

  void hand_over() {
    if (kept_.empty()) return;
    const std::lock_guard<std::mutex> guard(s_.mutex);
    s_.mailbox.push_back(kept_.back());
    kept_.pop_back();
  }
  void take_over() {
    const std::lock_guard<std::mutex> guard(s_.mutex);
    if (s_.mailbox.empty()) return;
    kept_.push_back(s_.mailbox.back());
    s_.mailbox.pop_back();
  }
  void let_go_on() {
    const int device = any_device();
    s_.fake.finish(any_stream(device), s_.contexts[device]);
  }

  // --- graphs

  void capture() {
    const Context context = s_.contexts[device_];
    s_.fake.set_current(context);
    // A pool of its own, or a former graph's.
    const bool shared = !graphs_.empty() && chance(random_, 40);
    Graph graph{0, shared ? graphs_.back().pool : MempoolId{s_.next_graph_pool++, 0}, shared, false, {}};
    if (shared) graphs_.back().shared = true;
    const auto filter = [this, context](cudaStream_t stream) {
      const auto handle = reinterpret_cast<Handle>(stream);
      return (handle == captured_ || handle == side_) && s_.fake.capture_status(handle, context) == 1;
    };
    s_.torch.begin_allocate_to_pool(device_, graph.pool, filter);
    FakeDriver::check(s_.fake.begin_capture(captured_, context, static_cast<int>(below(random_, 3))), "begin a capture");
    captured_work(graph);
    if (s_.fake.capture_status(captured_, context) != 1) fail("a capture was broken", 0, 0);
    graph.number = s_.fake.end_capture(captured_, context);
    if (graph.number <= 0) fail("a capture has failed", 0, static_cast<std::size_t>(-graph.number));
    s_.torch.end_allocate_to_pool(device_, graph.pool);
    ++s_.captures;
    graphs_.push_back(graph);
  }
  void captured_work(Graph& graph) {
    std::vector<Buffer> inside;
    const std::size_t count = 4 + below(random_, 12);
    for (std::size_t i = 0; i < count; ++i) {
      const Buffer buffer = make(device_, tensor_size(random_), captured_);
      if (buffer.address != 0) inside.push_back(buffer);
      if (!inside.empty() && chance(random_, 20)) captured_side(inside[below(random_, inside.size())]);
      if (!inside.empty() && chance(random_, 60)) free_one(inside, below(random_, inside.size()));
      if (chance(random_, 5)) s_.torch.reset();
      if (chance(random_, 10)) keep(make(device_, tensor_size(random_)));  // outside, meanwhile
      if (!kept_.empty() && chance(random_, 10)) free_one(kept_, below(random_, kept_.size()));
      if (chance(random_, 20)) std::this_thread::yield();
    }
    for (const Buffer& buffer : inside) look(buffer, captured_);
    graph.outputs = inside;
  }
  // Another stream takes part in the capture, and is joined again.
  void captured_side(const Buffer& buffer) {
    const Context context = s_.contexts[device_];
    s_.fake.order(context, captured_, side_);
    look(buffer, side_);
    s_.torch.record_stream(pointer(buffer.address), stream_of(side_));
    const Buffer there = make(device_, tensor_size(random_), side_);
    if (there.address != 0) free(there);
    s_.fake.order(context, side_, captured_);
  }

  void launch() {
    if (graphs_.empty()) return;
    Graph& graph = graphs_[below(random_, graphs_.size())];
    const Context context = s_.contexts[device_];
    FakeDriver::check(s_.fake.launch(graph.number, captured_, context), "launch a graph");
    for (const Buffer& output : graph.outputs) look(output, captured_);
    graph.launched = true;
    ++s_.launches;
    if (!graph.outputs.empty() && chance(random_, 20)) free_one(graph.outputs, graph.outputs.size() - 1);
    if (chance(random_, 50)) s_.fake.finish(captured_, context);
  }
  void destroy(std::size_t index) {
    if (index >= graphs_.size()) return;
    const Graph graph = graphs_[index];
    graphs_.erase(graphs_.begin() + static_cast<std::ptrdiff_t>(index));
    s_.fake.destroy_graph(graph.number);
    s_.torch.release_pool(device_, graph.pool);
    for (const Buffer& output : graph.outputs) {
      if (graph.launched && !graph.shared) {
        outputs_.push_back(output);
      } else {
        give_back(output);
      }
    }
    while (outputs_.size() > 8) free_one(outputs_, below(random_, outputs_.size()));
  }

  Setting& s_;
  Random random_;
  int device_ = 0;       // whose graphs it captures
  Handle captured_ = 0;  // its own streams
  Handle side_ = 0;
  std::vector<Buffer> kept_;
  std::vector<Buffer> outputs_;  // of graphs that are gone; nobody looks at them while their stream is captured again
  std::vector<Graph> graphs_;
};

// --- clients that come and go

struct Served {
  std::shared_ptr<Pool> pool;
  std::unique_ptr<Client> client;
};

std::unique_ptr<mempool::Pattern> pattern_for(const Setting& s, Random& random) {
  auto pattern = std::make_unique<mempool::Pattern>();
  const bool enveloped = chance(random, 30);
  std::size_t base = 0;
  for (std::uint32_t sequence = 0; sequence < 16; ++sequence) {  // whichever thread comes when
    const std::size_t from = chance(random, 30) ? 0 : base;  // some share addresses
    Planned part = plan(s.program, sequence, 0, from, 512, chance(random, 20), random);
    if (enveloped) envelop(part.table);
    base = std::max(base, part.bytes);
    pattern->arena_bytes = std::max(pattern->arena_bytes, part.bytes);
    pattern->tables.push_back(std::move(part.table));
  }
  if (chance(random, 50)) pattern->low_water = static_cast<std::uint32_t>(below(random, pattern->tables.front().length()));
  return pattern;
}

void reclaim(Setting& s) {
  for (void* const owner : mempool::torch_cuda::hook().reclaim()) {
    const std::unique_ptr<Served> served(static_cast<Served*>(owner));
    s.hits += served->client->stats().outcomes[0];
  }
}

void serve(Setting& s, const mempool::CudaDriver& driver, Random& random) {
  auto served = std::make_unique<Served>();
  const int index = chance(random, 30) ? mempool::CudaDevice::kUnbound : chance(random, 80) ? 0 : 1;
  const auto kind = static_cast<mempool::CudaKind>(s.kinds ? random() % 3 : 0);  // plain, growing, managed
  served->pool = std::make_shared<Pool>(std::make_unique<mempool::CudaDevice>(index, driver, kind), mempool::PoolOptions{});
  served->pool->segments().set_retained_limit(chance(random, 30) ? 0 : ~std::size_t{0});
  served->client = std::make_unique<Client>(served->pool, "torch");
  Served* const owner = served.release();
  if (mempool::torch_cuda::hook().serve(*owner->client, nullptr, owner) != Hook::Served::anew) fail("not served", 0, 0);
  ++s.clients;
  if (index == 1 || !chance(random, 80)) return;
  owner->client->load(nullptr, pattern_for(s, random));
}

void come_and_go(Setting& s, const mempool::CudaDriver& driver, Random random) {
  while (!s.stop) {
    serve(s, driver, random);
    for (std::size_t i = below(random, 10); i > 0 && !s.stop; --i) {
      std::this_thread::sleep_for(std::chrono::microseconds(below(random, 500)));
      Client* const client = mempool::torch_cuda::hook().serving();
      if (chance(random, 5)) client->drop_patterns();
      if (chance(random, 5)) client->give_back(chance(random, 30));
      if (chance(random, 5)) client->set_recording(chance(random, 50));
    }
    mempool::torch_cuda::hook().stop();
    if (chance(random, 50)) std::this_thread::sleep_for(std::chrono::microseconds(below(random, 2000)));
    reclaim(s);
  }
}

void run_round(Setting& s, const mempool::CudaDriver& driver, std::vector<std::unique_ptr<Worker>>& workers, Random& random) {
  const bool scarce = chance(random, 40);
  for (int device = 0; device < kDevices; ++device) {
    s.fake.set_capacity(device, scarce ? 100 * kMiB : std::size_t{1} << 40);
    s.torch.memory_fraction(1, device);  // of what there is now
  }
  s.plenty = !scarce;
  s.stop = false;
  std::thread meddler(come_and_go, std::ref(s), std::cref(driver), Random(random()));
  std::vector<std::thread> threads;
  for (auto& worker : workers) threads.emplace_back([&worker] { worker->run(300); });
  for (std::thread& thread : threads) thread.join();
  s.stop = true;
  meddler.join();
}

// Nothing runs: everything goes back, whoever gave it.
void check_end(Setting& s) {
  for (int device = 0; device < kDevices; ++device) {
    for (const Handle stream : s.streams[device]) s.fake.finish(stream, s.contexts[device]);
  }
  s.torch.reset();
  reclaim(s);
  s.fake.check_faults();
  for (Ledger& ledger : s.ledgers) {
    if (ledger.count() != 0) fail("the test has lost buffers", 0, ledger.count());
  }
  if (mempool::torch_cuda::hook().held() != 0) fail("clients are held for nothing", 0, mempool::torch_cuda::hook().held());
  if (s.fake.live_allocations() != 0) fail("memory is left", 0, s.fake.live_allocations());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::uint64_t seed = std::strtoull(argv[2], nullptr, 10);
  Random random(seed);
  Setting s(argv[1]);
  s.kinds = seed % 2 == 1;
  s.fake.reset(kDevices);
  const mempool::CudaDriver& driver = mempool::CudaDriver::open(argv[1]);
  mempool::torch_cuda::prepare(driver);
  if (chance(random, 50)) mempool::torch_cuda::set_refusal([](const char* text) { throw Refused{text}; });
  for (int device = 0; device < kDevices; ++device) {
    s.contexts[device] = s.fake.primary(device);
    s.streams[device] = {0};  // the default stream
    for (int i = 0; i < 3; ++i) s.streams[device].push_back(s.fake.stream(s.contexts[device], 0));
  }
  s.program = Program::make(random);
  s.torch.init(kDevices);
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < std::atoi(argv[4]); ++i) workers.push_back(std::make_unique<Worker>(s, random()));
  for (int round = 0; round < std::atoi(argv[3]); ++round) run_round(s, driver, workers, random);
  for (auto& worker : workers) worker->finish();
  std::printf("{\"seed\": %llu, \"made\": %llu, \"refused\": %llu, \"foreign\": %llu, \"captures\": %llu, "
              "\"launches\": %llu, \"clients\": %llu",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(s.made),
              static_cast<unsigned long long>(s.refused), static_cast<unsigned long long>(s.foreign),
              static_cast<unsigned long long>(s.captures), static_cast<unsigned long long>(s.launches),
              static_cast<unsigned long long>(s.clients));
  check_end(s);
  std::printf(", \"hits\": %llu}\n", static_cast<unsigned long long>(s.hits));
}
