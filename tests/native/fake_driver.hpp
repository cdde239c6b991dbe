// The fake CUDA driver of mempool/rehearsal/native/driver/, opened as a program opens the real one: what a program of PyTorch's does beside
// its allocator, and what the test does to the device.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

#include "observer.hpp"

namespace stress {

using Handle = std::uintptr_t;   // a stream's
using Context = std::uintptr_t;  // a device's primary one
using Address = mempool::Address;

class FakeDriver {
 public:
  explicit FakeDriver(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) fail(dlerror(), 0, 0);
    find(reset, "fake_reset");
    find(set_capacity, "fake_set_capacity");
    find(primary, "fake_primary");
    find(set_current, "fake_set_current");
    find(stream, "fake_stream");
    find(finish, "fake_finish");
    find(begin_capture, "fake_begin_capture");
    find(capture_status, "fake_capture_status");
    find(end_capture, "fake_end_capture");
    find(launch, "fake_launch");
    find(destroy_graph, "fake_destroy_graph");
    find(live_allocations, "fake_live_allocations");
    find(live_events, "fake_live_events");
    find(faults_, "fake_faults");
    find(fault_, "fake_fault");
    find(write_, "fake_write");
    find(expect_, "fake_expect");
    find(event_create_, "cuEventCreate");
    find(event_record_, "cuEventRecord");
    find(event_destroy_, "cuEventDestroy_v2");
    find(stream_wait_, "cuStreamWaitEvent");
  }

  void (*reset)(int devices);
  void (*set_capacity)(int device, std::size_t bytes);
  Context (*primary)(int device);
  void (*set_current)(Context context);
  Handle (*stream)(Context context, int blocking);
  void (*finish)(Handle stream, Context context);
  int (*begin_capture)(Handle stream, Context context, int mode);
  int (*capture_status)(Handle stream, Context context);
  int (*end_capture)(Handle stream, Context context);
  int (*launch)(int graph, Handle stream, Context context);
  void (*destroy_graph)(int graph);
  std::size_t (*live_allocations)();
  std::size_t (*live_events)();

  // Kernels: of what is large, both ends are enough.
  void write(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value) const {
    at_ends(bytes, [&](std::size_t offset, std::size_t count) {
      check(write_(stream, context, address + offset, count, value), "a kernel that writes");
    });
  }
  void expect(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value) const {
    at_ends(bytes, [&](std::size_t offset, std::size_t count) {
      check(expect_(stream, context, address + offset, count, value), "a kernel that reads");
    });
  }
  // What is queued on `then` from now on comes after what is queued on `first` now.
  void order(Context context, Handle first, Handle then) const {
    set_current(context);
    Handle event = 0;
    check(event_create_(&event, 2), "cuEventCreate");
    check(event_record_(event, first), "cuEventRecord");
    check(stream_wait_(then, event, 0), "cuStreamWaitEvent");
    check(event_destroy_(event), "cuEventDestroy");
  }

  // The device has seen nothing that no correct program does.
  void check_faults() const {
    if (faults_() == 0) return;
    static char text[200];
    fault_(0, text, sizeof text);
    fail(text, 0, 0);
  }
  static void check(int code, const char* what) {
    if (code != 0) fail(what, 0, static_cast<std::size_t>(code));
  }

 private:
  template <class Function>
  void find(Function& function, const char* symbol) {
    void* const found = dlsym(library_, symbol);
    if (found == nullptr) fail(symbol, 0, 0);
    function = reinterpret_cast<Function>(found);
  }
  template <class Act>
  static void at_ends(std::size_t bytes, Act act) {
    constexpr std::size_t kEnd = 4096;
    act(0, bytes < kEnd ? bytes : kEnd);
    if (bytes > kEnd) act(bytes - kEnd, kEnd);
  }

  void* library_;
  std::size_t (*faults_)();
  void (*fault_)(std::size_t index, char* text, std::size_t bytes);
  int (*write_)(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value);
  int (*expect_)(Handle stream, Context context, Address address, std::size_t bytes, unsigned char value);
  int (*event_create_)(Handle* event, unsigned int flags);
  int (*event_record_)(Handle event, Handle stream);
  int (*event_destroy_)(Handle event);
  int (*stream_wait_)(Handle stream, Handle event, unsigned int flags);
};

}  // namespace stress
