// Common parts of the functions of the CUDA runtime, which work on the stand-in's driver.
#pragma once

#include <cstdint>
#include <cstring>

#include "driver/call.hpp"
#include "settings.hpp"

namespace standin {

using fake::Handle;
using fake::gpu;

using fake::kNotSupported;

// The calling thread's last error, which cudaGetLastError returns and clears.
inline int& last_error() {
  thread_local int code = 0;
  return code;
}
inline int noted(int code) {
  if (code != fake::kSuccess && code != fake::kNotReady) last_error() = code;
  return code;
}

// Make a device's primary context the calling thread's current one, as the runtime does at its first call.
void use_device(int device);

// A call of the runtime: locks the model, starts the driver, and has a current context.
class RuntimeCall {
 public:
  RuntimeCall(fake::Function& function, const char* symbol) : call_(function, symbol, fake::kNothing) {
    gpu->initialized = true;
    if (fake::current() == nullptr) use_device(0);
  }
  int refused() const { return call_.refused(); }
  int device() const { return fake::current()->device; }
  fake::Stream* stream(Handle handle) const { return gpu->stream(handle, fake::current()); }

 private:
  const fake::Call call_;
};

}  // namespace standin

// A call that needs no device, and so makes no context.
#define QUERY(symbol)                                             \
  const fake::Call call(NAMED(symbol, fake::kNothing));           \
  if (call.refused() != 0) return standin::noted(call.refused()); \
  standin::gpu->initialized = true

#define RUNTIME(symbol)                           \
  const standin::RuntimeCall call(NAMED(symbol)); \
  if (call.refused() != 0) return standin::noted(call.refused())
