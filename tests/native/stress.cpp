// Seeded random programs on several threads against the core without Python, watched by observers that share nothing
// with it. Usage: stress DEVICE SEED ROUNDS THREADS [fork], DEVICE one of host, pages, whole (the simulated device with and
// without pages). Prints one JSON object; exit status 1 and one line on stderr where something that must hold did not.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <shared_mutex>
#include <thread>

#include "adapters/c_api.h"
#include "checks.hpp"
#include "core/client.hpp"
#include "devices/host_device.hpp"
#include "observer.hpp"
#include "program.hpp"
#include "devices/simulated_device.hpp"

using namespace mempool;
using namespace stress;

namespace {

constexpr Stream kStreams = 3;
// The address sanitizer's allocator is left locked in a child that was forked while another thread was in it; with it,
// forks wait until no thread is at work.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kForksWait = true;
#else
constexpr bool kForksWait = false;
#endif

struct Setting {
  bool host = false;
  bool marks = true;  // or every iteration must be detected
  unsigned strays = 2;  // percent of allocations that are not the program's
  unsigned threads = 0;
  std::shared_ptr<Pool> pool;
  std::size_t alignment = 0;
  SimulatedDevice* simulated = nullptr;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Program> programs;
  Ledger ledger;
  std::atomic<bool> stop{false};
  bool child = false;  // of a fork, where only one thread goes on
  std::shared_mutex forking;
  // A thread that begins or ends is in the sanitizer's allocator too.
  std::atomic<unsigned> begun{0};
  std::atomic<bool> linger{false};
};

// While it lives, no fork where forks wait.
class AtWork {
 public:
  explicit AtWork(Setting& s) {
    if (kForksWait && !s.child) held_ = std::shared_lock(s.forking);
  }

 private:
  std::shared_lock<std::shared_mutex> held_;
};

struct Buffer {
  Address address = 0;
  std::size_t bytes = 0;
  Stream stream = 0;
  std::uint64_t key = 0;  // what its contents are made from
};

// A worker: its buffers, its random numbers, and how to allocate with everything checked.
class Worker {
 public:
  Worker(Setting& setting, unsigned number, std::uint64_t seed)
      : s_(setting), client_(*s_.clients[number % s_.clients.size()]), number_(number), random_(seed) {}

  void run(unsigned iterations) {
    for (unsigned i = 0; i < iterations && !s_.stop.load(std::memory_order_relaxed); ++i) {
      const AtWork at_work(s_);
      if (s_.marks && number_ == 0 && chance(random_, 30)) client_.mark(chance(random_, 70) ? Mark::step : any_mark());
      const bool dynamic = chance(random_, 5);
      if (dynamic) client_.enter_dynamic();
      const std::size_t which = chance(random_, 85) ? number_ : random_();  // at times another thread's role
      iteration(s_.programs[which % s_.programs.size()], which % kStreams == 2 ? 1 : 0);
      if (dynamic) client_.leave_dynamic();
      if (chance(random_, 20)) anything();
      if (kept_.size() > 8) release_some(kept_);
    }
  }
  void finish() {
    while (!kept_.empty()) release_some(kept_);
  }
  void verify_kept() const {
    for (const Buffer& buffer : kept_) verify(buffer);
  }

 private:
  Mark any_mark() { return chance(random_, 50) ? Mark::begin : Mark::end; }

  void iteration(const Program& program, Stream stream) {
    std::vector<Buffer> live(program.sizes.size());
    const std::size_t count = live.size();
    const bool larger = chance(random_, 8);  // than any plan has it
    const unsigned scale = larger ? 101 + static_cast<unsigned>(below(random_, 80)) : Program::any_scale(random_);
    const std::size_t until = chance(random_, 10) ? below(random_, count) : count;  // an exception half-way
    for (std::size_t k = 0; k < until; ++k) {
      if (chance(random_, s_.strays)) kept_.push_back(allocate(any_size(random_), stream));  // an extra one
      const std::uint64_t size = chance(random_, s_.strays) ? any_size(random_) : Program::scaled(program.sizes[k], scale);
      live[k] = allocate(size, stream);
      for (std::size_t i = 0; i <= k; ++i) {
        if (live[i].address != 0 && i + program.lives[i] <= k + 1) release(live[i]);
      }
    }
    for (Buffer& buffer : live) {
      if (buffer.address == 0) continue;
      if (chance(random_, 5)) {
        kept_.push_back(buffer);
      } else {
        release(buffer);
      }
    }
  }

  void anything() {
    for (unsigned i = 0; i < 20; ++i) {
      if (kept_.empty() || chance(random_, 50)) {
        kept_.push_back(allocate(any_size(random_), static_cast<Stream>(below(random_, kStreams))));
      } else if (chance(random_, 30)) {
        resize(kept_[below(random_, kept_.size())]);
      } else {
        release_some(kept_);
      }
    }
  }

  void release_some(std::vector<Buffer>& buffers) {
    std::swap(buffers[below(random_, buffers.size())], buffers.back());
    Buffer buffer = buffers.back();
    buffers.pop_back();
    if (buffer.address != 0) release(buffer);
  }

  Buffer allocate(std::size_t bytes, Stream stream) {
    const bool zeroed = chance(random_, 5);
    Buffer buffer{0, std::max<std::size_t>(1, bytes), stream, random_()};
    buffer.address = zeroed || chance(random_, 50)
                         ? client_.allocate(bytes, stream, zeroed)
                         : reinterpret_cast<Address>(mempool_alloc(&client_, bytes, 0, static_cast<intptr_t>(stream)));
    if (buffer.address == 0) return buffer;
    accept(buffer);
    if (zeroed && s_.host) check_zero(buffer);
    fill(buffer);
    return buffer;
  }
  void accept(const Buffer& buffer) {
    if (buffer.address % s_.alignment != 0) fail("misaligned", buffer.address, buffer.bytes);
    if (!s_.child) s_.ledger.insert(buffer.address, buffer.bytes);
  }

  void release(Buffer& buffer) {
    verify(buffer);
    if (client_.free(buffer.address + 1, buffer.stream)) fail("an address within a buffer is freed", buffer.address, buffer.bytes);
    const Stream last = chance(random_, 90) ? buffer.stream : static_cast<Stream>(below(random_, kStreams));
    if (!s_.child) s_.ledger.erase(buffer.address);
    if (!client_.free(buffer.address, last)) fail("a live buffer is not freed", buffer.address, buffer.bytes);
    buffer.address = 0;
  }

  void resize(Buffer& buffer) {
    if (buffer.address == 0) return;
    verify(buffer);
    const bool gently = chance(random_, 50);  // which may be done in place
    const std::size_t bytes = std::max<std::size_t>(1, gently ? below(random_, 2 * buffer.bytes) : any_size(random_));
    if (!s_.child) s_.ledger.erase(buffer.address);
    bool foreign = true;
    const Address moved = client_.reallocate(buffer.address, bytes, buffer.stream, &foreign);
    if (foreign) fail("a live buffer is foreign to realloc", buffer.address, buffer.bytes);
    const std::size_t before = buffer.bytes;
    if (moved != 0) buffer.address = moved, buffer.bytes = bytes;
    accept(buffer);
    if (moved != 0) {
      check_prefix(buffer, std::min(before, bytes));
      fill(buffer);
    }
  }

  // Every byte of what is small, and of what is large a byte each cache line and both ends.
  template <class Visit>
  void visit(const Buffer& buffer, std::size_t bytes, Visit visit) const {
    if (!s_.host || buffer.address == 0) return;
    auto* const data = reinterpret_cast<unsigned char*>(buffer.address);
    const std::size_t step = bytes <= 1024 ? 1 : 64;
    for (std::size_t i = 0; i < bytes; i += step) visit(data[i], i);
    if (bytes > 0) visit(data[bytes - 1], bytes - 1);
  }
  static unsigned char expected(const Buffer& buffer, std::size_t i) {
    return static_cast<unsigned char>((buffer.key + i * 0x9E37) >> 8);
  }
  void fill(const Buffer& buffer) const {
    visit(buffer, buffer.bytes, [&](unsigned char& byte, std::size_t i) { byte = expected(buffer, i); });
  }
  void verify(const Buffer& buffer) const {
    visit(buffer, buffer.bytes, [&](unsigned char& byte, std::size_t i) {
      if (byte != expected(buffer, i)) fail("contents were overwritten", buffer.address, buffer.bytes);
    });
  }
  // What realloc kept: the bytes that `fill` had written in the old one, before its last.
  void check_prefix(const Buffer& buffer, std::size_t bytes) const {
    auto* const data = reinterpret_cast<const unsigned char*>(buffer.address);
    for (std::size_t i = 0; s_.host && i + 1 < bytes; i += 64) {
      if (data[i] != expected(buffer, i)) fail("realloc lost contents", buffer.address, buffer.bytes);
    }
  }
  void check_zero(const Buffer& buffer) const {
    visit(buffer, buffer.bytes, [&](unsigned char& byte, std::size_t) {
      if (byte != 0) fail("zeros are not zero", buffer.address, buffer.bytes);
    });
  }

  Setting& s_;
  Client& client_;
  unsigned number_;
  Random random_;
  std::vector<Buffer> kept_;
};

std::unique_ptr<Pattern> any_plan(Setting& s, Client& client, Random& random, bool cyclic) {
  return any_pattern(s.programs, client, s.alignment, chance(random, 40), random, cyclic);
}

// Plans come and go, memory becomes scarce, somebody looks, all while the workers go on.
void meddle(Setting& s, Random random) {
  while (!s.stop.load(std::memory_order_relaxed)) {
    std::optional<AtWork> at_work(s);
    Client& client = *s.clients[below(random, s.clients.size())];
    switch (below(random, 19)) {
      case 0: case 1: case 2: client.install(any_plan(s, client, random, true), below(random, 10)); break;
      case 3:
      client.load(chance(random, 50) ? any_plan(s, client, random, false) : nullptr,
                  any_plan(s, client, random, true));
      break;
      case 4: if (chance(random, 20)) client.drop_patterns(); break;
      case 5: client.set_recording(chance(random, 70)); break;
      case 6: client.recording(); break;
      case 7: client.set_tracing(chance(random, 50)); client.take_trace(); break;
      case 8: { const Guarded guard(s.pool->lock); s.pool->trim(); break; }
      case 9: { const Guarded guard(s.pool->lock); s.pool->release_arena(); break; }
      case 10: {
        const Guarded guard(s.pool->lock);
        s.pool->source().set_limit(chance(random, 30) ? s.pool->source().reserved().current + below(random, 1 << 20) : ~0ull);
        s.pool->set_budget(chance(random, 50) ? s.pool->source().reserved().current + below(random, 1 << 20) : ~0ull);
        s.pool->room();
        break;
      }
      case 11: { const Guarded guard(s.pool->lock); s.pool->segments().set_retained_limit(below(random, 1 << 22)); break; }
      case 12: client.request_arena(); client.set_arena_allowed(chance(random, 50)); client.stats(); client.state(); client.divergences(); client.pinned_ranges(); client.reset_peaks(); break;
      case 15: client.set_history(chance(random, 60) ? 100 : 0); break;
      case 16: look_at(take_snapshot(*s.pool, &client)); take_usage(*s.pool); break;
      case 17: client.find_recurrence(); client.wait_for_work({0.0005, 1.0, below(random, 10000)}); break;
      case 13: {
        const Guarded guard(s.pool->lock);  // as all who call the device: a child would find its lock held for ever
        if (s.simulated != nullptr) s.simulated->fail_after(chance(random, 20) ? below(random, 50) : ~0ull);
        break;
      }
      case 14: client.check_again_after(below(random, 100)); client.wake(); break;
      default: client.give_back(chance(random, 30)); break;
    }
    at_work.reset();
    std::this_thread::sleep_for(std::chrono::microseconds(below(random, 500)));
  }
}

// A forked child has its parent's buffers, serves requests, and gets no planned address.
void fork_once(Setting& s, Worker& worker) {
  pid_t pid = 0;
  {
    const std::unique_lock alone = kForksWait ? std::unique_lock(s.forking) : std::unique_lock<std::shared_mutex>();
    const std::lock_guard whole(s.ledger.mutex);
    pid = fork();
  }
  if (pid == 0) {
    alarm(240);
    s.child = true;
    std::uint64_t before = 0, after = 0;
    for (const auto& client : s.clients) before += client->stats().outcomes[0];
    worker.verify_kept();
    worker.run(20);
    worker.finish();
    for (const auto& client : s.clients) after += client->stats().outcomes[0];
    if (before != after) fail("a forked child got planned addresses", 0, after - before);
    std::_Exit(0);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) fail("fork", 0, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail("a forked child did not end well", 0, static_cast<std::size_t>(status));
}

// Nothing runs: the books must agree.
void check_books(Setting& s) {
  std::size_t requested = 0, live = 0, blocks = 0;
  for (const auto& client : s.clients) {
    const ClientStats stats = client->stats();
    requested += stats.requested.current;
    live += stats.live.current;
    blocks += stats.blocks.current;
  }
  const Guarded guard(s.pool->lock);
  const std::size_t reserved = s.pool->source().reserved().current;
  if (requested != s.ledger.bytes()) fail("requested bytes are wrong", 0, requested);
  const std::size_t lying = blocks + s.pool->uses().waiting();  // what was freed on another stream waits for that one
  if (blocks != s.ledger.count() || lying != s.pool->live_blocks()) fail("the count of buffers is wrong", 0, blocks);
  if (live < requested || reserved < live) fail("requested <= live <= reserved does not hold", 0, live);
  check_returnable(s.pool->segments(), s.pool->source().traits().page);
  if (s.simulated != nullptr && reserved != s.simulated->counts().committed) {
    fail("reserved bytes are not what the device has committed", 0, reserved);
  }
}

void run_round(Setting& s, std::uint64_t seed, bool forks, std::vector<std::unique_ptr<Worker>>& workers) {
  Random random(seed);
  s.stop = false;
  s.begun = 0;
  std::thread meddler([&s, seed = random()] {
    ++s.begun;
    meddle(s, Random(seed));
  });
  std::vector<std::thread> threads;
  s.linger = forks && kForksWait;
  for (unsigned i = 1; i < s.threads; ++i) {
    threads.emplace_back([&s, &workers, i] {
      ++s.begun;
      workers[i]->run(60);
      while (s.linger) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  workers[0]->run(30);
  while (s.linger && s.begun != s.threads) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (forks) fork_once(s, *workers[0]);
  s.linger = false;
  workers[0]->run(30);
  for (std::thread& thread : threads) thread.join();
  s.stop = true;
  meddler.join();
  check_books(s);
}

void check_empty(Setting& s) {
  for (const auto& client : s.clients) client->drop_patterns();
  const Guarded guard(s.pool->lock);
  if (s.simulated != nullptr) s.simulated->synchronize();  // no thread finishes a stream any more
  s.pool->trim();
  if (s.pool->uses().waiting() != 0) fail("memory waits for streams that have finished", 0, s.pool->uses().waiting());
  s.pool->release_arena();
  if (s.simulated == nullptr) return;
  const std::size_t committed = s.simulated->counts().committed;
  if (committed != 0) fail("memory is left although everything was given back", 0, committed);
  if (s.simulated->counts().errors != 0) fail("calls that the device refused as wrong", 0, 0);
}

std::unique_ptr<Device> any_device(Setting& s, const std::string& name, Random& random) {
  if (s.host) return std::make_unique<HostDevice>();
  SimulatedOptions options;
  options.page = name == "pages" ? std::size_t{4096} << below(random, 6) : 0;
  options.capacity = chance(random, 50) ? std::size_t{12} << 20 : std::size_t{1} << 40;
  options.shared_segment = std::size_t{1} << 20;
  options.large = std::size_t{256} << 10;
  options.alignment = std::size_t{64} << below(random, 4);
  auto device = std::make_unique<SimulatedDevice>(options);
  s.simulated = device.get();
  return device;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string name = argv[1];
  const std::uint64_t seed = std::strtoull(argv[2], nullptr, 10);
  const unsigned rounds = static_cast<unsigned>(std::atoi(argv[3]));
  const bool forks = argc > 5;
  pthread_atfork(Client::prepare_fork, Client::after_fork_in_parent, Client::after_fork_in_child);
  Random random(seed);
  Setting s;
  s.host = name == "host";
  s.marks = chance(random, 50);
  s.strays = chance(random, 50) ? 2 : 0;
  s.threads = static_cast<unsigned>(std::atoi(argv[4]));
  auto device = any_device(s, name, random);
  s.alignment = device->traits().alignment;
  s.pool = std::make_shared<Pool>(std::move(device), PoolOptions{512, ~std::size_t{0}, 4096});
  const std::uint64_t clients = 1 + below(random, 2);
  for (unsigned i = 0; i < clients; ++i) s.clients.push_back(std::make_unique<Client>(s.pool, "stress"));
  for (unsigned i = 0; i < s.threads + 1; ++i) {
    const bool part = i != 0 && chance(random, 50);
    const Program& whole = part ? s.programs[below(random, i)] : s.programs.emplace_back(Program::make(random));
    if (part) s.programs.push_back(whole.beginning(1 + below(random, whole.sizes.size())));
  }

  std::vector<std::unique_ptr<Worker>> workers;
  for (unsigned i = 0; i < s.threads; ++i) workers.push_back(std::make_unique<Worker>(s, i, random()));
  for (unsigned round = 0; round < rounds; ++round) run_round(s, random(), forks && round % 4 == 1, workers);
  for (auto& worker : workers) worker->finish();
  check_books(s);
  check_empty(s);
  ClientStats sum;
  for (const auto& client : s.clients) {
    const ClientStats stats = client->stats();
    for (std::size_t i = 0; i < sum.outcomes.size(); ++i) sum.outcomes[i] += stats.outcomes[i];
    sum.out_of_memory += stats.out_of_memory;
  }
  std::printf("{\"seed\": %llu", static_cast<unsigned long long>(seed));
  for (std::size_t i = 0; i < sum.outcomes.size(); ++i) {
    std::printf(", \"%s\": %llu", kOutcomeNames[i], static_cast<unsigned long long>(sum.outcomes[i]));
  }
  std::printf(", \"out_of_memory\": %llu", static_cast<unsigned long long>(sum.out_of_memory));
  std::printf(", \"conversions\": %llu}\n", static_cast<unsigned long long>(s.pool->arena_stats().conversions));
}
