#include "world/fibers.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace world {

std::size_t current = 0;
bool inside = false;

namespace {

Fiber* running = nullptr;

}  // namespace

Fiber::Fiber(std::size_t thread) : thread_(thread) {
  void* const memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  stack_ = static_cast<char*>(memory);
  getcontext(&mine_);
  mine_.uc_stack.ss_sp = stack_;
  mine_.uc_stack.ss_size = kStack;
  mine_.uc_link = nullptr;
  makecontext(&mine_, entry, 0);
#ifdef __SANITIZE_THREAD__
  fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef __SANITIZE_THREAD__
  __tsan_destroy_fiber(fiber_);
#endif
  munmap(stack_, kStack);
}

void Fiber::begin(std::function<void()> call, Choices choices, unsigned one_in) {
  call_ = std::move(call);
  choices_ = choices;
  one_in_ = one_in;
  busy_ = true;
  go_on();
}

void Fiber::go_on() {
  const std::size_t before = current;
  current = thread_;
  running = this;
  inside = true;
  blocked_ = false;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, stack_, kStack);
#endif
#ifdef __SANITIZE_THREAD__
  scheduler_fiber_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_, 0);
#endif
  swapcontext(&scheduler_, &mine_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  inside = false;
  running = nullptr;
  current = before;
}

void Fiber::leave(bool for_ever) noexcept {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake_stack_, scheduler_stack_, scheduler_stack_bytes_);
#else
  static_cast<void>(for_ever);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(scheduler_fiber_, 0);
#endif
  swapcontext(&mine_, &scheduler_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
}

void Fiber::entry() noexcept {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &running->scheduler_stack_, &running->scheduler_stack_bytes_);
#endif
  for (;;) {
    Fiber* const me = running;
    me->call_();
    me->busy_ = false;
    me->leave(false);
  }
}

void maybe_switch() noexcept {
  Fiber* const me = running;
  if (me->choices_.below(me->one_in_) == 0) me->leave(false);
}

void block() noexcept {
  if (!inside) std::abort();  // whole calls never wait for each other
  running->blocked_ = true;
  running->leave(false);
}

bool in_fiber() noexcept { return running != nullptr; }

}  // namespace world
