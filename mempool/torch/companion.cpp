// Forwards PyTorch's CPU allocator to the pool. Built on the user's machine against libc10 of the user's torch
// (compiled_library.py); reaches the pool's core through the four functions of c_api.h that install() receives.
//
// Storages keep their allocator permanently, so ours is never destroyed; without a serving pool, it forwards to the
// former allocator.
// Memory is identified by its address: foreign memory is freed by the former allocator.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace {

struct Pool {
  void* (*alloc)(size_t bytes, int* served) = nullptr;
  int (*owns)(void* address) = nullptr;
  int (*free)(void* address) = nullptr;
  void (*out_of_memory)(char* text, size_t size) = nullptr;
};
Pool pool;
c10::Allocator* former = nullptr;

void release(void* address) {
  if (address == nullptr) return;
  // Report before the free, after which another thread may get the address.
  if (c10::memoryProfilingEnabled() && pool.owns(address) != 0) c10::profiledCPUMemoryReporter().Delete(address);
  if (pool.free(address) == 0) former->raw_deallocate(address);
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    int served = 0;
    void* address = pool.alloc(bytes, &served);
    if (served == 0) {
      address = former->raw_allocate(bytes);
    } else if (address == nullptr) {
      refuse(bytes);
    } else {
      c10::profiledCPUMemoryReporter().New(address, bytes);
    }
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  [[noreturn]] static void refuse(size_t bytes) {
    c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    char text[256] = "";
    pool.out_of_memory(text, sizeof text);
    C10_THROW_ERROR(OutOfMemoryError, c10::str("DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                                               " bytes; ", text));
  }
};

PoolAllocator* ours() {
  static auto* const allocator = new PoolAllocator;
  return allocator;
}

bool current() { return c10::GetAllocator(c10::DeviceType::CPU) == ours(); }

// Set an allocator with the lowest sufficient priority, so that other libraries may still replace it.
bool set(c10::Allocator* allocator) {
  for (int priority = 0; priority <= 255; ++priority) {
    c10::SetAllocator(c10::DeviceType::CPU, allocator, static_cast<uint8_t>(priority));
    if (c10::GetAllocator(c10::DeviceType::CPU) == allocator) return true;
  }
  return false;
}

}  // namespace

// Return 1 if ours is PyTorch's allocator now, 0 if not; 2 if the former allocator cannot free its own memory; 3 if the
// present allocator may forward to ours, which would be a cycle.
extern "C" __attribute__((visibility("default"))) int mempool_companion_install(
    void* (*alloc)(size_t, int*), int (*owns)(void*), int (*free)(void*), void (*out_of_memory)(char*, size_t)) {
  if (current()) return 1;
  c10::Allocator* const before = c10::GetAllocator(c10::DeviceType::CPU);
  if (before->raw_deleter() == nullptr) return 2;
  if (former != nullptr && former != before) return 3;
  if (former == nullptr) {  // once: memory of the former one may be freed through ours at any time
    pool = {alloc, owns, free, out_of_memory};
    former = before;
  }
  return set(ours()) ? 1 : 0;
}

// Return 1 if the former allocator is PyTorch's again, 0 if another library has replaced ours, which then stays.
extern "C" __attribute__((visibility("default"))) int mempool_companion_uninstall() {
  if (!current()) return 0;
  return set(former) ? 1 : 0;
}

// Throw PyTorch's own error for a CUDA device without memory.
extern "C" __attribute__((visibility("default"))) void mempool_companion_refuse(const char* text) {
  C10_THROW_ERROR(OutOfMemoryError, text);
}
