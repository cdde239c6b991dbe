// What every symbol of the fake driver has in common.
#pragma once

#include "gpu.hpp"
#include "timeline.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fake {

using Handle = std::uintptr_t;

inline Gpu* const gpu = new Gpu;  // never destroyed: calls come until the process has ended

struct Thread {
  int generation = 0;
  int mode = kGlobal;
  std::vector<Context*> contexts;
  std::vector<std::shared_ptr<Cost>> operations = {};  // of PyTorch, the innermost last: costs of their first kernels
};

inline std::list<Thread>* const threads = new std::list<Thread>;  // never destroyed either

// The calling thread's state. Never destroyed, because destructors of static objects call the driver after the objects of
// the main thread are gone.
inline Thread& self() {
  thread_local Thread* const kept = [] {
    const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
    return &threads->emplace_back();
  }();
  Thread& thread = *kept;
  if (thread.generation != gpu->generation) thread = Thread{gpu->generation, kGlobal, {}, {}};
  return thread;
}

inline Context* current() { return self().contexts.empty() ? nullptr : self().contexts.back(); }

// Return the cost of a kernel that the calling thread launches. The first kernel of an operation has the operation's time, which
// is known when the operation ends; the others have none. If the host waited for that kernel meanwhile, the next kernel has the time.
inline std::shared_ptr<Cost> kernel_cost() {
  auto& operations = self().operations;
  if (gpu->timeline == nullptr || (!operations.empty() && operations.back() != nullptr && operations.back()->open)) return nullptr;
  auto made = std::make_shared<Cost>(Cost{Cost::kKernels, Timeline::kShortest, !operations.empty()});
  if (!operations.empty()) operations.back() = made;
  return made;
}
// Note a kernel of a library whose functions compute nothing.
inline int launch_unseen(Handle handle) {
  const std::lock_guard<std::recursive_mutex> guard(gpu->mutex);
  if (gpu->timeline == nullptr || current() == nullptr) return 0;
  Work work;
  if ((work.cost = kernel_cost()) == nullptr) return 0;
  return gpu->enqueue(gpu->stream(handle, current()), std::move(work));
}

enum Needs { kNothing, kInit, kContext };

// Every call of the driver: counted, refused on demand, and by the driver's own rules.
class Call {
 public:
  Call(Function& function, const char* symbol, Needs needs = kContext) : guard_(gpu->mutex) {
    if (function.slow.count() != 0) sleep(function.slow);
    ++function.calls;
    if (gpu->log.size() < kMostLogged) gpu->log.emplace_back(symbol);
    answered_ = !function.answers.empty();
    if (answered_) {
      answer_ = function.answers.front();
      function.answers.pop_front();
    }
    if (gpu->gone) {
      refused_ = kDeinitialized;
    } else if (needs != kNothing && !gpu->initialized) {
      refused_ = kNotInitialized;
    } else if (function.failure.times > 0 && function.failure.after-- <= 0 && function.failure.times-- > 0) {
      refused_ = function.failure.code;
    } else if (answer_.code != 0) {
      refused_ = answer_.code;
    } else if (needs == kContext && current() == nullptr) {
      refused_ = kInvalidContext;
      gpu->fault(std::string(symbol) + " without a current context");
    }
  }
  int refused() const { return refused_; }
  // Return the recorded answer to this call; null: there is none.
  const Answer* answer() const { return answered_ ? &answer_ : nullptr; }

 private:
  // Others may call meanwhile.
  void sleep(std::chrono::milliseconds time) {
    guard_.unlock();
    std::this_thread::sleep_for(time);
    guard_.lock();
  }

  std::unique_lock<std::recursive_mutex> guard_;
  int refused_ = 0;
  bool answered_ = false;
  Answer answer_;
};

}  // namespace fake

// The record of the function whose symbol comes first, found once for each place.
#define FIRST(first, ...) first
#define NAMED(...)                                                               \
  []() -> fake::Function& {                                                      \
    static fake::Function& function = fake::gpu->function(FIRST(__VA_ARGS__, )); \
    return function;                                                             \
  }(), __VA_ARGS__

#define CALL(...)                            \
  const fake::Call call(NAMED(__VA_ARGS__)); \
  if (call.refused() != 0) return call.refused()
