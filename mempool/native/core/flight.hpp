// Flight recorder: writes the newest calls of pools and of the CUDA driver, with arguments, result and time, to a file
// that survives a crash of the process. mempool.rehearsal.flight reads the file and replays the pools' calls.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mempool::flight {

// Calls of pools and clients by number; functions of the driver have the next numbers. Comments name the arguments in
// order; addresses and streams are numbers.
enum Call : std::uint16_t {
  device_made,     // index, kind, else_plain
  pool_made,       // small_bytes, max_reserved, share_streams, address of the pool object
  client_made,     // address of the pool object
  client_gone,     //
  allocate,        // bytes, stream, address, reserved bytes afterwards
  free,            // address, stream, reserved bytes afterwards
  use,             // address, stream
  reallocate,      // address, bytes, stream, new address
  mark,            // mark, detected
  enter_dynamic,   //
  leave_dynamic,   //
  next_at,         // offset in the arena
  recording,       // event of recording_state.hpp
  tracing,         // on
  pattern,         // arena_bytes, unroll, low_water, cyclic + 2 * marked: begins a pattern of `install` or `load`
  table,           // sequence, stream, phase
  slot,            // size, least size or 0, offset
  table_mark,      // position
  install,         // iterations_seen, instead
  load,            // warm-up, unsure
  drop_patterns,   //
  device_bound,    //
  request_arena,   //
  arena_allowed,   // allowed
  give_back,       // force
  retire_unused,   //
  return_idle,     //
  retained_limit,  // bytes
  thread_ends,     //
  arena,           // bytes before, bytes afterwards
  max_reserved,    // bytes
  budget,          // bytes
  begin_graph,     // first half of the id, second half
  end_graph,       // first half of the id, second half
  release_graph,   // first half of the id, second half
  kCalls
};

struct Record {
  std::uint64_t number;  // serial number, from 1; written last: a record with 0 or an older lap's number is incomplete
  std::uint64_t end_ns;  // CLOCK_MONOTONIC
  std::array<std::uint64_t, 4> arguments;
  std::uint32_t ns;  // that a call of the driver took
  std::int32_t result;  // 0: success; other values: the driver's error code, 1 for the pool
  std::uint32_t thread;
  std::uint16_t call, user;  // user: number of the client or the pool; 0 for the driver
};
static_assert(sizeof(Record) == 64, "one line of the cache");
constexpr std::size_t kRecords = std::size_t{1} << 20;

inline std::atomic<bool> switched_on{false};
inline bool on() noexcept { return switched_on.load(std::memory_order_relaxed); }

// Start recording all calls. The first call creates the file; if another running process writes a file of this name,
// this process's number is appended to the name. An empty path ends the recording.
void begin(const char* path, std::size_t records = kRecords) noexcept;
void leave() noexcept;  // in a forked child

std::uint16_t number_of(const char* symbol) noexcept;  // of a driver's function
std::uint64_t now() noexcept;                          // nanoseconds
void add(std::uint16_t call, std::uint64_t user, int result, std::array<std::uint64_t, 4> arguments, std::uint64_t begin_ns = 0) noexcept;

template <class... Numbers>
void note(Call call, std::uint64_t user, int result, Numbers... numbers) noexcept {
  if (on()) add(call, user, result, {static_cast<std::uint64_t>(numbers)...});
}

// Return an argument of the driver as a number; for an output argument, the written value.
template <class T>
std::uint64_t number(T argument, [[maybe_unused]] bool written) noexcept {
  using Target = std::remove_pointer_t<T>;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<std::uint64_t>(argument);
  } else if constexpr (std::is_class_v<Target> && std::is_const_v<Target>) {
    return static_cast<std::uint64_t>(argument->place.id);
  } else if constexpr (std::is_pointer_v<Target>) {
    return written ? reinterpret_cast<std::uint64_t>(*argument) : 0;
  } else if constexpr (std::is_integral_v<Target>) {
    return written ? static_cast<std::uint64_t>(*argument) : 0;
  } else {
    return reinterpret_cast<std::uint64_t>(argument);
  }
}

}  // namespace mempool::flight
