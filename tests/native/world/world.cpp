#include "world/world.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "checks.hpp"
#include "core/client.hpp"
#include "world/report.hpp"

namespace world {

using mempool::Client;
using mempool::Guarded;
using mempool::Mark;
using mempool::Pool;
using stress::Program;

namespace {

constexpr Stream kGraphs = kStreams - 1;  // what is captured is queued here, and nothing else
constexpr std::size_t kMostKept = 16;

struct Due {
  std::uint64_t at;  // its thread's count of allocations
  Buffer* buffer;
};

struct Thread {
  std::size_t number = 0;
  Core client;
  std::size_t program = 0;
  Stream stream = 0;
  std::size_t position = 0;
  unsigned scale = 100;     // percent, of this iteration's sizes
  std::uint64_t count = 0;  // of its program's allocations
  std::vector<Due> due;
  std::vector<Buffer*> kept;
  unsigned scopes = 0;
  std::unique_ptr<Fiber> fiber;
};

class World {
 public:
  explicit World(const Setting& setting) : setting_(setting), choices_(setting.seed) {
    auto device = std::make_unique<Device>(setting.memory);
    device_ = device.get();
    pool_ = std::make_shared<Pool>(std::move(device), mempool::PoolOptions{512, ~std::size_t{0}, 4096, setting.distinguished_streams, !setting.apart});
    for (int i = 0; i < 2; ++i) clients_.push_back(std::make_unique<Client>(pool_, "world"));
    for (std::size_t i = 0; i < setting.threads; ++i) {
      const bool part = i != 0 && choices_.chance(40);
      programs_.push_back(part ? programs_[0].beginning(1 + choices_.below(programs_[0].sizes.size())) : Program::make(choices_));
    }
    programs_.push_back(Program::make(choices_));  // an evaluation's
    for (std::size_t i = 0; i < setting.threads; ++i) {
      Thread& thread = threads_.emplace_back();
      thread.number = i;
      thread.client = Core(clients_[i % 2 == 1 && choices_.chance(50) ? 1 : 0].get());
      thread.program = i;
      thread.stream = i % 3 == 2 ? 1 : 0;
      if (setting.interleaved) thread.fiber = std::make_unique<Fiber>(i);
    }
    limited_ = setting.memory.capacity < (std::size_t{1} << 40);
    host_memory.fibers = setting.interleaved;
  }

  Counts run() {
    for (const Client* client : {clients_[0].get(), clients_[1].get()}) const_cast<Client*>(client)->set_recording(true);
    for (const Step& step : setting_.steps) take(step);
    drain();
    end();
    return counts_;
  }

 private:
  // --- who goes on

  void take(const Step& step) {
    Thread& thread = threads_[step.thread % threads_.size()];
    ++counts_.steps;
    if (!setting_.interleaved) {
      current = thread.number;
      act(step, thread);
      current = 0;
      return;
    }
    if (step.kind == Step::check || step.kind == Step::fork) {  // of a world at rest
      drain();
      current = thread.number;
      act(step, thread);
      current = 0;
      return;
    }
    while (!thread.fiber->idle()) let_somebody_go_on();
    Choices choices(step.seed ^ 0x5DEECE66Du);
    thread.fiber->begin([this, step, &thread] { act(step, thread); }, choices, setting_.one_in);
    while (choices_.chance(50) && busy()) let_somebody_go_on();
  }
  bool busy() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) { return !t.fiber->idle(); });
  }
  void let_somebody_go_on() {
    const std::size_t first = choices_.below(threads_.size());
    Thread* waits = nullptr;
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      Thread& thread = threads_[(first + i) % threads_.size()];
      if (thread.fiber->idle()) continue;
      if (thread.fiber->blocked()) {
        waits = &thread;
        continue;
      }
      stuck_ = 0;
      return thread.fiber->go_on();
    }
    if (waits == nullptr) return;
    if (++stuck_ > 1000) fail("a deadlock", "every thread waits for a lock");
    waits->fiber->go_on();
  }
  void drain() {
    while (setting_.interleaved && busy()) let_somebody_go_on();
  }

  // --- the program

  Buffer* allocate(Thread& thread, std::size_t bytes, Stream stream, Choices& choices, std::uint64_t graph = 0) {
    pay(stream);
    auto* const buffer = new Buffer;
    const bool zeroed = graph == 0 && choices.chance(4);
    buffer->bytes = std::max<std::size_t>(1, bytes);
    buffer->stream = stream;
    buffer->graph = graph;
    buffer->stamped = zeroed ? buffer->bytes : 0;
    ++counts_.events, ++counts_.allocations;
    buffer->address = thread.client->allocate(bytes, stream, zeroed);
    if (buffer->address == 0) {
      if (!limited_) fail("a request is refused although there is memory", "%zu bytes on stream %zu", bytes, static_cast<std::size_t>(stream));
      WORLD_TELL("  thread %zu: %zu bytes on stream %zu are refused", thread.number, bytes, static_cast<std::size_t>(stream));
      ++counts_.refused;
      delete buffer;
      return nullptr;
    }
    device_->begin(*buffer);
    buffer->client = &*thread.client;
    ++books_[buffer->client].blocks;
    books_[buffer->client].requested += buffer->bytes;
    WORLD_TELL("  thread %zu: buffer #%zu, %zu bytes on stream %zu, at %#zx%s", thread.number, buffer->number, buffer->bytes,
               static_cast<std::size_t>(stream), buffer->address, zeroed ? ", of zeros" : "");
    if (zeroed) device_->read(*buffer, stream);
    if (choices.chance(90)) device_->write(*buffer, stream);
    return buffer;
  }
  void release(Thread& thread, Buffer* buffer, Choices& choices) {
    Stream last = buffer->stream;
    if (buffer->graph == 0) {
      if (setting_.late_orders && choices.chance(30)) {
        const auto other = static_cast<Stream>(choices.below(kGraphs));
        order(buffer->stream, other);
        device_->read(*buffer, other);
        owed_[static_cast<std::size_t>(buffer->stream)].push_back(other);
      }
      if (choices.chance(5)) {
        pay(buffer->stream);
        last = static_cast<Stream>(choices.below(kGraphs));
        order(buffer->stream, last);
      }
      if (choices.chance(40)) device_->read(*buffer, last);
    }
    WORLD_TELL("  thread %zu: buffer #%zu is freed on stream %zu", thread.number, buffer->number, static_cast<std::size_t>(last));
    device_->end(*buffer);
    Books& books = books_[buffer->client];
    --books.blocks;
    books.requested -= buffer->bytes;
    ++counts_.events;
    bool dead = false;
    if (choices.chance(2) && thread.client->free(buffer->address + 1, last, &dead)) {
      fail("an address within a buffer is freed", "buffer #%zu", buffer->number);
    }
    if (!thread.client->free(buffer->address, last)) fail("a live buffer is not freed", "buffer #%zu", buffer->number);
    delete buffer;
  }
  // As a program does: `then` goes on when `first` has come so far.
  void order(Stream first, Stream then) {
    if (first == then) return;
    const Event event = device_->record(first);
    if (!device_->wait(then, event)) fail("the world is wrong", "a program cannot wait");
    device_->forget(event);
  }
  // What other streams do with buffers of this one is waited for at last.
  void pay(Stream stream) {
    for (const Stream other : std::exchange(owed_[static_cast<std::size_t>(stream)], {})) order(other, stream);
  }
  void release_due(Thread& thread, Choices& choices, std::uint64_t until) {
    for (std::size_t i = thread.due.size(); i-- > 0;) {
      if (i >= thread.due.size() || thread.due[i].at > until) continue;
      Buffer* const buffer = thread.due[i].buffer;
      thread.due.erase(thread.due.begin() + static_cast<std::ptrdiff_t>(i));
      release(thread, buffer, choices);
    }
  }
  void next(Thread& thread, Choices& choices) {
    const Program& program = programs_[thread.program];
    if (thread.scopes != 0 && choices.chance(10)) {
      --thread.scopes;
      thread.client->leave_dynamic();
    }
    if (thread.position == 0 && setting_.marks && thread.number == 0) {
      ++counts_.events;
      thread.client->mark(Mark::step);
    }
    const std::size_t k = thread.position;
    if (k == 0) thread.scale = Program::any_scale(choices);
    thread.position = k + 1 == program.sizes.size() ? 0 : k + 1;
    Buffer* const buffer = allocate(thread, Program::scaled(program.sizes[k], thread.scale), thread.stream, choices);
    ++thread.count;
    if (buffer != nullptr) thread.due.push_back({thread.count - 1 + program.lives[k], buffer});
    release_due(thread, choices, thread.count);
  }
  void keep(Thread& thread, Buffer* buffer, Choices& choices) {
    if (buffer == nullptr) return;
    thread.kept.push_back(buffer);
    if (thread.kept.size() > kMostKept) release_kept(thread, thread, choices);
  }
  Buffer* take_kept(Thread& thread, Choices& choices) {
    if (thread.kept.empty()) return nullptr;
    std::swap(thread.kept[choices.below(thread.kept.size())], thread.kept.back());
    Buffer* const buffer = thread.kept.back();
    thread.kept.pop_back();
    return buffer;
  }
  void release_kept(Thread& whose, Thread& by, Choices& choices) {
    if (Buffer* const buffer = take_kept(whose, choices)) release(by, buffer, choices);
  }
  void resize(Thread& whose, Thread& thread, Choices& choices) {
    Buffer* const buffer = take_kept(whose, choices);
    if (buffer == nullptr) return;
    pay(buffer->stream);
    const bool gently = choices.chance(50);
    const std::size_t bytes = std::max<std::size_t>(1, gently ? choices.below(2 * buffer->bytes) : stress::any_size(choices));
    WORLD_TELL("  thread %zu: buffer #%zu, of %zu bytes, is to have %zu", thread.number, buffer->number, buffer->bytes, bytes);
    device_->end(*buffer, true);
    Books& books = books_[buffer->client];
    --books.blocks;
    books.requested -= buffer->bytes;
    counts_.events += 2;
    bool foreign = true;
    const Address moved = thread.client->reallocate(buffer->address, bytes, buffer->stream, &foreign);
    if (foreign) fail("a live buffer is foreign to realloc", "buffer #%zu", buffer->number);
    if (moved == 0 && !limited_) fail("a request is refused although there is memory", "%zu bytes", bytes);
    if (moved == 0) {
      device_->stays(*buffer);
    } else {
      device_->arrived(buffer->address);
      buffer->stamped = std::min({buffer->stamped, buffer->bytes, bytes});
      buffer->address = moved;
      buffer->bytes = bytes;
      buffer->uses = {};
      buffer->writes = {};
      device_->begin(*buffer);
    }
    if (moved != 0) buffer->client = &*thread.client;
    ++books_[buffer->client].blocks;
    books_[buffer->client].requested += buffer->bytes;
    device_->read(*buffer, buffer->stream);
    if (moved != 0 && choices.chance(50)) device_->write(*buffer, buffer->stream);
    whose.kept.push_back(buffer);
  }
  // Another stream uses a buffer: with a wait of the buffer's own stream afterwards, or told to the pool (record_stream).
  void share(Thread& thread, Choices& choices) {
    if (!thread.due.empty() && choices.chance(60)) {
      share(thread, *thread.due[choices.below(thread.due.size())].buffer, choices);
    } else if (Buffer* const buffer = take_kept(thread, choices)) {  // so that no other thread frees it meanwhile
      share(thread, *buffer, choices);
      thread.kept.push_back(buffer);
    }
  }
  void share(Thread& thread, Buffer& buffer, Choices& choices) {
    const auto other = static_cast<Stream>(choices.below(kGraphs));
    if (buffer.stream == other) return;
    order(buffer.stream, other);
    device_->read(buffer, other);
    ++counts_.events;
    if (choices.chance(30)) {
      if (setting_.late_orders) {
        owed_[static_cast<std::size_t>(buffer.stream)].push_back(other);
      } else {
        order(other, buffer.stream);
      }
    } else if (!tell(thread, buffer, other)) {
      order(other, buffer.stream);  // the host has no memory to remember it
    }
    WORLD_TELL("  thread %zu: stream %zu uses buffer #%zu", thread.number, static_cast<std::size_t>(other), buffer.number);
  }
  static bool tell(Thread& thread, const Buffer& buffer, Stream other) try {
    if (!thread.client->use(buffer.address, other)) {
      fail("a use by another stream is taken for its own's", "buffer #%zu, stream %zu", buffer.number, static_cast<std::size_t>(other));
    }
    if (thread.client->use(buffer.address, buffer.stream)) fail("a use by its own stream is taken for another's", "buffer #%zu", buffer.number);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
  void capture(Thread& thread, Choices& choices) {
    if (capturing_ || graphs_.size() >= 3) return;
    capturing_ = true;
    const std::uint64_t graph = ++last_graph_;
    device_->finish();
    {
      const Guarded guard(pool_->lock);
      pool_->begin_graph({graph, 0}, [](Stream stream) { return stream == kGraphs; });
    }
    device_->begin_capture(graph, kGraphs);
    WORLD_TELL("  thread %zu: graph %zu is captured", thread.number, static_cast<std::size_t>(graph));
    std::vector<Buffer*> alive;
    for (std::size_t i = 0; i < 8; ++i) {
      if (Buffer* const buffer = allocate(thread, stress::any_size(choices), kGraphs, choices, graph)) {
        if (buffer->stamped == 0) device_->write(*buffer, kGraphs);
        alive.push_back(buffer);
      }
      if (!alive.empty()) device_->read(*alive[choices.below(alive.size())], kGraphs);
      if (alive.size() > 3) {
        std::swap(alive[choices.below(alive.size())], alive.back());
        release(thread, alive.back(), choices);
        alive.pop_back();
      }
    }
    device_->end_capture();
    {
      const Guarded guard(pool_->lock);
      pool_->end_graph({graph, 0});
    }
    graphs_.push_back({graph, std::move(alive)});
    capturing_ = false;
  }
  void end_graph(Thread& thread, Choices& choices) {
    if (graphs_.empty() || capturing_) return;
    std::swap(graphs_[choices.below(graphs_.size())], graphs_.back());
    Graph graph = std::move(graphs_.back());
    graphs_.pop_back();
    const bool first = choices.chance(50);  // the pool goes before its buffers, or after
    if (first) release_graph(graph.number);
    for (Buffer* const buffer : graph.alive) release(thread, buffer, choices);
    if (!first) release_graph(graph.number);
  }
  void release_graph(std::uint64_t number) {
    WORLD_TELL("  graph %zu is over", static_cast<std::size_t>(number));
    device_->end_graph(number);
    const Guarded guard(pool_->lock);
    pool_->release_graph({number, 0});
  }
  // A forked child has its parent's buffers, serves requests, and gets no planned address.
  void fork_here(Thread& thread, Choices& choices) {
    if (!setting_.forks) return;
    std::fflush(stdout);
    Client::prepare_fork();
    const pid_t pid = fork();
    if (pid != 0) {
      Client::after_fork_in_parent();
      int status = 0;
      if (pid < 0 || waitpid(pid, &status, 0) != pid) fail("the world is wrong", "it cannot fork");
      if (status != 0) fail("a forked child did not end well", "status %d", status);
      return;
    }
    Client::after_fork_in_child();
    const std::uint64_t hits = thread.client->stats().outcomes[0];
    for (int i = 0; i < 40; ++i) next(thread, choices);
    if (thread.client->stats().outcomes[0] != hits) fail("a forked child gets planned addresses", "%zu of them", static_cast<std::size_t>(thread.client->stats().outcomes[0] - hits));
    std::fflush(stdout);
    std::_Exit(0);
  }

  // --- what happens

  void act(const Step& step, Thread& thread) try {
    Choices choices(step.seed);
    const Core client = thread.client;
    ++counts_.events;
    switch (step.kind) {
      case Step::next: next(thread, choices); break;
      case Step::stray: keep(thread, allocate(thread, stress::any_size(choices), static_cast<Stream>(choices.below(kGraphs)), choices), choices); break;
      case Step::release: release_kept(thread, thread, choices); break;
      case Step::resize: {
        Choices whose(step.seed ^ 0xE7037ED1A0B428DBu);
        resize(whose.chance(20) ? threads_[whose.below(threads_.size())] : thread, thread, choices);
        break;
      }
      case Step::share: share(thread, choices); break;
      case Step::drop_shared: {
        Thread& other = threads_[choices.below(threads_.size())];
        release_kept(other, thread, choices);
        break;
      }
      case Step::work: device_->run(choices, 1 + choices.below(40)); break;
      case Step::mark: if (setting_.marks) client->mark(choices.chance(50) ? Mark::begin : Mark::end); break;
      case Step::other_program:
        release_due(thread, choices, ~std::uint64_t{0});
        thread.program = choices.chance(50) ? thread.number : choices.below(programs_.size());
        thread.position = 0;
        break;
      case Step::abandon:
        release_due(thread, choices, ~std::uint64_t{0});
        thread.position = 0;
        break;
      case Step::scope:
        if (thread.scopes != 0) {
          --thread.scopes;
          client->leave_dynamic();
        } else {
          ++thread.scopes;
          client->enter_dynamic();
        }
        break;
      case Step::thread_ends: {
        mempool::ThreadCache& cache = mempool::ThreadCache::mine();
        cache.~ThreadCache();
        new (&cache) mempool::ThreadCache;
        break;
      }
      case Step::install:
        client->install(stress::any_pattern(programs_, *client, setting_.memory.alignment, setting_.lies && choices.chance(40), choices, true), choices.below(10));
        break;
      case Step::load: {
        auto warm_up = choices.chance(50) ? stress::any_pattern(programs_, *client, setting_.memory.alignment, setting_.lies, choices, false) : nullptr;
        client->load(std::move(warm_up), stress::any_pattern(programs_, *client, setting_.memory.alignment, setting_.lies, choices, true));
        break;
      }
      case Step::drop_plans: client->drop_patterns(); break;
      case Step::record: client->set_recording(choices.chance(70)); break;
      case Step::look:
        client->find_recurrence();
        client->wait_for_work({0.0, 1.0, choices.below(10000)});
        client->check_again_after(choices.below(100));
        break;
      case Step::tape:
        client->set_tracing(choices.chance(50));
        client->take_trace();
        client->set_history(choices.chance(60) ? 100 : 0);
        break;
      case Step::rest: for (std::size_t i = choices.below(12); i-- > 0;) client->retire_unused_patterns(); break;
      case Step::trim: { const Guarded guard(pool_->lock); pool_->trim(); break; }
      case Step::give_back: client->give_back(choices.chance(30)); break;
      case Step::limit: {
        const Guarded guard(pool_->lock);
        limited_ = true;
        pool_->source().set_limit(choices.chance(40) ? pool_->source().reserved().current + choices.below(1 << 20) : ~std::size_t{0});
        pool_->set_budget(choices.chance(40) ? pool_->source().reserved().current + choices.below(1 << 20) : ~std::size_t{0});
        break;
      }
      case Step::retain: { const Guarded guard(pool_->lock); pool_->segments().set_retained_limit(choices.below(1 << 22)); break; }
      case Step::statistics:
        client->stats(), client->state(), client->divergences(), client->pinned_ranges(), client->reset_peaks();
        stress::look_at(mempool::take_snapshot(*pool_, &*client));
        mempool::take_usage(*pool_);
        break;
      case Step::refuse:
        limited_ = true;
        device_->fail_after(choices.chance(60) ? choices.below(20) : ~std::uint64_t{0});
        break;
      case Step::no_host_memory:
        limited_ = true;
        host_memory.left = choices.below(12);
        host_memory.failing = 1 + choices.below(3);
        break;
      case Step::no_wait:
        device_->fail_waits(1 + choices.below(3));
        device_->fail_event_waits(choices.below(4));
        break;
      case Step::capture: capture(thread, choices); break;
      case Step::replay: if (!graphs_.empty() && !capturing_) device_->replay(graphs_[choices.below(graphs_.size())].number, kGraphs); break;
      case Step::end_graph: end_graph(thread, choices); break;
      case Step::fork: fork_here(thread, choices); break;
      case Step::check: check(); break;
      default: break;
    }
  } catch (const std::bad_alloc&) {  // of what may throw it; nothing has changed
    WORLD_TELL("  thread %zu: no host memory", thread.number);
  }

  // Nothing is at work on the host: the books must agree.
  void check() {
    std::size_t requested = 0, live = 0;
    for (const auto& client : clients_) {
      const mempool::ClientStats stats = client->stats();
      const Books& books = books_[client.get()];
      const std::size_t requested_now = stats.requested.current, blocks = stats.blocks.current;
      if (requested_now != books.requested) fail("requested bytes are wrong", "%zu instead of %zu", requested_now, books.requested);
      if (blocks != books.blocks) fail("the count of buffers is wrong", "%zu instead of %zu", blocks, books.blocks);
      requested += requested_now;
      live += stats.live.current;
    }
    const Guarded guard(pool_->lock);
    const std::size_t reserved = pool_->source().reserved().current;
    if (live < requested || reserved < live) fail("requested <= live <= reserved does not hold", "%zu, %zu, %zu", requested, live, reserved);
    if (reserved != device_->committed()) fail("reserved bytes are not what the device has committed", "%zu, %zu", reserved, device_->committed());
    stress::check_returnable(pool_->segments(), pool_->source().traits().page);
  }
  void end() {
    Choices choices(setting_.seed);
    device_->fail_after(~std::uint64_t{0});
    device_->fail_waits(0);
    device_->fail_event_waits(0);
    host_memory.left = HostMemory::kPlenty;
    for (Thread& thread : threads_) {
      current = thread.number;
      for (; thread.scopes != 0; --thread.scopes) thread.client->leave_dynamic();
      release_due(thread, choices, ~std::uint64_t{0});
      while (!thread.kept.empty()) release_kept(thread, thread, choices);
    }
    current = 0;
    while (!graphs_.empty()) end_graph(threads_[0], choices);
    check();
    device_->finish();
    for (const auto& client : clients_) {
      client->drop_patterns();
      const mempool::ClientStats stats = client->stats();
      for (std::size_t i = 0; i < stats.outcomes.size(); ++i) counts_.outcomes[i] += stats.outcomes[i];
    }
    {
      const Guarded guard(pool_->lock);
      pool_->trim();  // may record again an event that could not be recorded at a free
      device_->finish();
      pool_->trim();
      pool_->release_arena();
    }
    if (device_->committed() != 0) fail("memory is left although everything was given back", "%zu bytes", device_->committed());
    counts_.events += device_->works();
    for (std::size_t i = 0; i < kMostThreads; ++i) {  // threads end before their clients or after
      current = i;
      mempool::ThreadCache& cache = mempool::ThreadCache::mine();
      cache.~ThreadCache();
      new (&cache) mempool::ThreadCache;
    }
    current = 0;
    clients_.clear();
    pool_.reset();  // the device looks that nothing is left
  }

  struct Graph {
    std::uint64_t number;
    std::vector<Buffer*> alive;
  };
  const Setting& setting_;
  Choices choices_;
  Device* device_ = nullptr;
  std::shared_ptr<Pool> pool_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<Program> programs_;
  std::deque<Thread> threads_;
  std::vector<Graph> graphs_;
  std::uint64_t last_graph_ = 0;
  bool capturing_ = false;
  struct Books {
    std::size_t blocks = 0, requested = 0;
  };
  std::map<const Client*, Books> books_;  // what of each client's is alive
  unsigned stuck_ = 0;
  std::array<std::vector<Stream>, kStreams> owed_;  // by stream, whom it has still to wait for
  bool limited_ = false;
  Counts counts_;
};

}  // namespace

Setting Setting::of(std::uint64_t seed, std::size_t steps, bool interleaved) {
  Choices choices(seed);
  Setting setting;
  setting.seed = seed;
  setting.interleaved = interleaved;
  setting.threads = interleaved ? 2 + static_cast<unsigned>(choices.below(3)) : 1 + static_cast<unsigned>(choices.below(3));
  setting.one_in = 1u << choices.below(6);
  setting.marks = choices.chance(50);
  setting.lies = choices.chance(40);
  setting.forks = choices.chance(3);
  MemoryOptions& memory = setting.memory;
  memory.page = choices.chance(60) ? std::size_t{4096} << choices.below(6) : 0;
  memory.alignment = std::size_t{64} << choices.below(4);
  memory.capacity = choices.chance(30) ? std::size_t{12} << 20 : std::size_t{1} << 40;
  memory.fresh_is_zero = choices.chance(50);
  memory.slow_return = choices.chance(25);
  memory.prefetches = Choices(seed ^ 0xA0761D6478BD642Fu).chance(15);
  const bool forgets = Choices(seed ^ 0x9E3779B97F4A7C15u).chance(25);  // the host's memory runs out, too
  setting.apart = Choices(seed ^ 0xD1B54A32D192ED03u).chance(30);
  setting.distinguished_streams = Choices(seed ^ 0x2545F4914F6CDD1Du).chance(30) ? 2 : mempool::ArenaStreams::kMostStreams;
  setting.late_orders = setting.apart && !interleaved;  // who takes turns with nobody cannot say what comes next on a stream
  const bool strays = choices.chance(70), scarce = choices.chance(40), graphs = choices.chance(30);
  static constexpr Step::Kind kOdd[] = {
      Step::stray, Step::stray, Step::release, Step::release, Step::resize, Step::share, Step::share, Step::share, Step::drop_shared,
      Step::mark, Step::other_program, Step::abandon, Step::scope, Step::thread_ends, Step::install, Step::install, Step::install,
      Step::load, Step::drop_plans, Step::record, Step::look, Step::tape, Step::rest, Step::trim, Step::give_back, Step::retain,
      Step::statistics, Step::check, Step::fork};
  static constexpr Step::Kind kScarce[] = {Step::limit, Step::refuse, Step::no_wait};
  static constexpr Step::Kind kGraph[] = {Step::capture, Step::replay, Step::replay, Step::end_graph};
  setting.steps.reserve(steps);
  for (std::size_t i = 0; i < steps; ++i) {
    Step step{Step::next, static_cast<std::uint8_t>(choices.below(setting.threads)), choices.next()};
    const std::size_t what = choices.below(1000);
    if (what < 80) step.kind = Step::work;
    else if (what < (strays ? 140 : 90)) step.kind = kOdd[choices.below(std::size(kOdd))];
    else if (what < 145 && scarce) step.kind = kScarce[choices.below(std::size(kScarce))];
    else if (what < 155 && graphs) step.kind = kGraph[choices.below(std::size(kGraph))];
    else if (what < 165 && forgets) step.kind = Step::no_host_memory;
    setting.steps.push_back(step);
  }
  return setting;
}

Counts run(const Setting& setting) { return World(setting).run(); }

}  // namespace world
