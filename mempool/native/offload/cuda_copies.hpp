// Copies between a GPU and page-locked host memory, ordered by events. All calls go to the driver, without an operation
// of a framework, and return before the work is done.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "devices/cuda_driver.hpp"

namespace mempool {

// Guard in which a context is the thread's current one, which most calls need: the default stream is that of the current context.
class EnteredContext {
 public:
  // A driver that refuses the context refuses the calls within the guard, too.
  EnteredContext(const CudaDriver& driver, CuContext context) noexcept : driver_(driver) {
    CuContext current = nullptr;
    if (driver.context_current(&current) == cu::kSuccess && current == context) return;
    pushed_ = driver.context_push(context) == cu::kSuccess;
  }
  ~EnteredContext() {
    CuContext popped = nullptr;
    if (pushed_) driver_.context_pop(&popped);
  }
  EnteredContext(const EnteredContext&) = delete;
  EnteredContext& operator=(const EnteredContext&) = delete;

 private:
  const CudaDriver& driver_;
  bool pushed_ = false;
};

// A moment of a stream: all work queued there before.
class StreamEvent {
 public:
  // Called in the context.
  StreamEvent(const CudaDriver& driver, CuContext context, CuStream stream) : driver_(driver), context_(context) {
    check(driver, driver.event_create(&event_, cu::kDisableTiming), "cuEventCreate");
    if (const CuCode code = driver.event_record(event_, stream); code != cu::kSuccess) {
      driver.event_destroy(event_);
      check(driver, code, "cuEventRecord");
    }
  }
  ~StreamEvent() {
    const EnteredContext entered(driver_, context_);
    driver_.event_destroy(event_);
  }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  // Return whether the moment has passed.
  bool query() const {
    const EnteredContext entered(driver_, context_);
    const CuCode code = driver_.event_query(event_);
    if (code != cu::kNotReady && code != cu::kDeinitialized) check(driver_, code, "cuEventQuery");
    return code != cu::kNotReady;
  }
  // Let later work of a stream of the context wait for the moment.
  void order_before(CuStream stream) const {
    const EnteredContext entered(driver_, context_);
    check(driver_, driver_.stream_wait(stream, event_, 0), "cuStreamWaitEvent");
  }

  static void check(const CudaDriver& driver, CuCode code, const char* asked) {
    if (code != cu::kSuccess) throw std::runtime_error(std::string(asked) + ": " + driver.text(code));
  }

 private:
  const CudaDriver& driver_;
  const CuContext context_;
  CuEvent event_ = nullptr;
};

// The functions throw std::runtime_error with the driver's refusal. From any thread, they use the context that was
// current when the object was made.
class CudaCopies {
 public:
  explicit CudaCopies(const std::string& library) : driver_(CudaDriver::open(library)) {
    StreamEvent::check(driver_, driver_.context_current(&context_), "cuCtxGetCurrent");
    if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context");
  }

  std::unique_ptr<StreamEvent> record(CuStream stream) const {
    const EnteredContext entered(driver_, context_);
    return std::make_unique<StreamEvent>(driver_, context_, stream);
  }

  // Copy `size` bytes on `stream`, after the work so far of other streams and after events. Return the moment after the copy.
  std::unique_ptr<StreamEvent> copy(CuStream stream, CuAddress target, CuAddress source, std::size_t size,
                                    const std::vector<CuStream>& after, const std::vector<const StreamEvent*>& events) const {
    const EnteredContext entered(driver_, context_);
    for (CuStream other : after) StreamEvent(driver_, context_, other).order_before(stream);
    for (const StreamEvent* event : events) event->order_before(stream);
    StreamEvent::check(driver_, driver_.copy(target, source, size, stream), "cuMemcpyAsync");
    return std::make_unique<StreamEvent>(driver_, context_, stream);
  }

 private:
  const CudaDriver& driver_;
  CuContext context_ = nullptr;
};

// The copies as C functions, for the library that is built against the user's PyTorch (moves.hpp). The caller owns the events.
struct CopyFunctions {
  // Copy `size` bytes on `stream` after the work so far of stream `after`; return the moment after the copy, or null where
  // the driver refused.
  void* (*copy)(const void* copies, void* stream, std::uint64_t target, std::uint64_t source, std::size_t size, void* after);
  int (*has_passed)(const void* event);                    // 1 also after a failure, which the next copy reports
  int (*order_before)(const void* event, void* stream);    // 0 where the driver refused
  void (*release)(void* event);
};

inline const CopyFunctions& copy_functions() {
  static constexpr CopyFunctions functions{
      [](const void* copies, void* stream, std::uint64_t target, std::uint64_t source, std::size_t size, void* after) -> void* {
        try {
          return static_cast<const CudaCopies*>(copies)
              ->copy(static_cast<CuStream>(stream), target, source, size, {static_cast<CuStream>(after)}, {})
              .release();
        } catch (const std::runtime_error&) {
          return nullptr;
        }
      },
      [](const void* event) {
        try {
          return static_cast<const StreamEvent*>(event)->query() ? 1 : 0;
        } catch (const std::runtime_error&) {
          return 1;
        }
      },
      [](const void* event, void* stream) {
        try {
          static_cast<const StreamEvent*>(event)->order_before(static_cast<CuStream>(stream));
          return 1;
        } catch (const std::runtime_error&) {
          return 0;
        }
      },
      [](void* event) { delete static_cast<StreamEvent*>(event); }};
  return functions;
}

}  // namespace mempool
