// CuPy's current device and stream as its modules export them, of each thread, set by the tests.
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
thread_local int device = 0;
thread_local std::intptr_t stream = 0;
}  // namespace

EXPORT int current_device(int) { return device; }
EXPORT std::intptr_t current_stream() { return stream; }
EXPORT void set_current(int index, std::intptr_t handle) {
  device = index;
  stream = handle;
}
