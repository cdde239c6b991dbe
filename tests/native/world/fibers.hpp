// Host threads of the simulated world: fibers on one thread of the machine, so that every switch is a choice of the seed.
//
// The core's locks, atomics and guards call `world::point()`, where the thread that runs may be made to wait while others
// go on. Without fibers (whole calls as steps) a point costs one look at a flag.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace world {

inline constexpr std::size_t kMostThreads = 8;

// What a seed decides, one number after the other. The same for the same seed on every machine.
class Choices {
 public:
  explicit Choices(std::uint64_t seed) noexcept : state_(seed) {}
  std::uint64_t next() noexcept {  // splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t limit) noexcept {
    return static_cast<std::size_t>((static_cast<unsigned __int128>(next()) * limit) >> 64);
  }
  bool chance(unsigned percent) noexcept { return below(100) < percent; }
  // As a generator of the standard library's kind.
  using result_type = std::uint64_t;
  static constexpr result_type min() noexcept { return 0; }
  static constexpr result_type max() noexcept { return ~result_type{0}; }
  result_type operator()() noexcept { return next(); }

 private:
  std::uint64_t state_;
};

// The thread of the simulated world that runs now. What the core keeps for each thread is kept by this number.
extern std::size_t current;
// Whether a fiber runs, and not whoever decides which one goes on.
bool in_fiber() noexcept;

// Where the running fiber may be stopped. Nothing where there are no fibers.
void maybe_switch() noexcept;
extern bool inside;  // a fiber runs, and not the scheduler
inline void point() noexcept {
  if (inside) maybe_switch();
}
// The running fiber cannot go on before others have: the next one, please.
void block() noexcept;

class Fiber {
 public:
  explicit Fiber(std::size_t thread);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  bool idle() const noexcept { return !busy_; }
  bool blocked() const noexcept { return blocked_; }
  // Begins a call, which is not over when this returns unless idle() says so. `choices` decides where it is stopped, one
  // time in `one_in` points.
  void begin(std::function<void()> call, Choices choices, unsigned one_in);
  void go_on();

 private:
  friend void maybe_switch() noexcept;
  friend void block() noexcept;
  static void entry() noexcept;
  void leave(bool for_ever) noexcept;

  static constexpr std::size_t kStack = std::size_t{512} << 10;
  std::size_t thread_;
  char* stack_;
  ucontext_t mine_{}, scheduler_{};
  std::function<void()> call_;
  Choices choices_{0};
  unsigned one_in_ = 1;
  bool busy_ = false, blocked_ = false;
  [[maybe_unused]] void* fake_stack_ = nullptr;  // of the sanitizers
  [[maybe_unused]] void* scheduler_fake_stack_ = nullptr;
  [[maybe_unused]] const void* scheduler_stack_ = nullptr;
  [[maybe_unused]] std::size_t scheduler_stack_bytes_ = 0;
  [[maybe_unused]] void* fiber_ = nullptr;
  [[maybe_unused]] void* scheduler_fiber_ = nullptr;
};

}  // namespace world
