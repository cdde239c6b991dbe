#include "core/flight.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/sync.hpp"

namespace mempool::flight {
namespace {

constexpr char kMagic[8] = {'m', 'p', 'f', 'l', 'i', 'g', 'h', 't'};
constexpr std::size_t kNames = 400, kNameBytes = 40;

// traces.formats.flight knows the layout.
struct Header {
  char magic[8];
  std::uint32_t version, pid;
  std::uint64_t capacity;             // records
  std::atomic<std::uint64_t> next;  // number of records so far
  std::uint64_t epoch_ns, began_ns;   // the same moment by the calendar and by CLOCK_MONOTONIC
  std::uint64_t names;
  char unused[200];
  char name[kNames][kNameBytes];      // by number of a call
  char padding[16384 - 256 - kNames * kNameBytes];
};
static_assert(sizeof(Header) == 16384, "whole pages");

constexpr const char* kCallNames[kCalls] = {
    "device_made", "pool_made", "client_made", "client_gone", "allocate", "free", "use", "reallocate", "mark",
    "enter_dynamic", "leave_dynamic", "next_at", "recording", "tracing", "pattern", "table", "slot", "table_mark",
    "install", "load", "drop_patterns", "device_bound", "request_arena", "arena_allowed", "give_back", "retire_unused",
    "return_idle", "retained_limit", "thread_ends", "arena", "max_reserved", "budget", "begin_graph", "end_graph",
    "release_graph"};

struct State {
  Lock lock;
  std::string path;
  std::size_t capacity = kRecords;
  const char* symbols[kNames] = {};  // behind the calls of pools
  std::size_t symbols_known = 0;
  std::atomic<Header*> header{nullptr};
};
State& state() {
  static auto* const made = new State;  // never destroyed, since calls occur until the process ends
  return *made;
}

std::uint64_t clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

void write_name(Header& header, std::size_t index, const char* name) {
  std::strncpy(header.name[index], name, kNameBytes - 1);
  if (header.names <= index) header.names = index + 1;
}

// Return true if another running process has the file.
bool taken(const std::string& path) {
  Header header{};
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool whole = read(file, &header, sizeof header) == static_cast<ssize_t>(sizeof header);
  close(file);
  if (!whole || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  return static_cast<pid_t>(header.pid) != getpid() && (kill(static_cast<pid_t>(header.pid), 0) == 0 || errno == EPERM);
}

// Create the file; null, without recording, if impossible.
Header* made(State& s) {
  const std::string path = taken(s.path) ? s.path + "." + std::to_string(getpid()) : s.path;
  const std::size_t bytes = sizeof(Header) + s.capacity * sizeof(Record);
  // A new file, since a reader may have mapped the old one.
  unlink(path.c_str());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  void* const mapped = file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0
                           ? MAP_FAILED
                           : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) std::fprintf(stderr, "mempool: no flight recorder: %s: %s\n", path.c_str(), std::strerror(errno));
  if (file >= 0) close(file);
  if (mapped == MAP_FAILED) {
    switched_on.store(false);
    return nullptr;
  }
  auto* const header = static_cast<Header*>(mapped);
  header->version = 1;
  header->pid = static_cast<std::uint32_t>(getpid());
  header->capacity = s.capacity;
  header->epoch_ns = clock_ns(CLOCK_REALTIME);
  header->began_ns = now();
  for (std::size_t i = 0; i < kCalls; ++i) write_name(*header, i, kCallNames[i]);
  for (std::size_t i = 0; i < s.symbols_known; ++i) write_name(*header, kCalls + i, s.symbols[i]);
  std::memcpy(header->magic, kMagic, sizeof kMagic);
  return header;
}

Header* opened() {
  State& s = state();
  const Guarded guard(s.lock);
  if (s.header.load(std::memory_order_relaxed) == nullptr && on()) s.header.store(made(s), std::memory_order_release);
  return s.header.load(std::memory_order_relaxed);
}

}  // namespace

void begin(const char* path, std::size_t records) noexcept {
  State& s = state();
  const Guarded guard(s.lock);
  s.path = path;
  s.capacity = records;
  s.header.store(nullptr);  // an earlier file stays mapped: a thread may be writing to it
  switched_on.store(!s.path.empty());
}

void leave() noexcept { switched_on.store(false); }

std::uint16_t number_of(const char* symbol) noexcept {
  State& s = state();
  const Guarded guard(s.lock);
  std::size_t i = 0;
  while (i < s.symbols_known && std::strcmp(s.symbols[i], symbol) != 0) ++i;
  if (i == s.symbols_known && i + kCalls < kNames) {
    s.symbols[s.symbols_known++] = symbol;
    if (Header* const header = s.header.load()) write_name(*header, kCalls + i, symbol);
  }
  return static_cast<std::uint16_t>(kCalls + i);
}

std::uint64_t now() noexcept { return clock_ns(CLOCK_MONOTONIC); }

void add(std::uint16_t call, std::uint64_t user, int result, std::array<std::uint64_t, 4> arguments, std::uint64_t begin_ns) noexcept {
  Header* header = state().header.load(std::memory_order_acquire);
  if (header == nullptr) header = opened();
  if (header == nullptr) return;
  const std::uint64_t index = header->next.fetch_add(1, std::memory_order_relaxed), end = now();
  Record& record = reinterpret_cast<Record*>(header + 1)[index % header->capacity];
  auto& number = reinterpret_cast<std::atomic<std::uint64_t>&>(record.number);
  number.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_release);  // after a crash, the file has the order of the writes
  record.end_ns = end;
  record.arguments = arguments;
  record.ns = begin_ns == 0 ? 0 : static_cast<std::uint32_t>(std::min<std::uint64_t>(end - begin_ns, 0xffffffff));
  record.result = result;
  record.thread = static_cast<std::uint32_t>(static_cast<std::uint64_t>(pthread_self()) >> 12);
  record.call = call;
  record.user = static_cast<std::uint16_t>(user);
  number.store(index + 1, std::memory_order_release);
}

}  // namespace mempool::flight
