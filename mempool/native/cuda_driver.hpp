// The CUDA driver's library, opened while the program runs: built without CUDA's headers, and a machine without a GPU
// only sees an error where it asks for one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "sync.hpp"

namespace mempool {

// What the driver's ABI has; handles are opaque.
using CuCode = int;
using CuDevice = int;
using CuAddress = unsigned long long;  // bytes
using CuContext = struct CuContextHandle*;
using CuStream = struct CuStreamHandle*;
using CuEvent = struct CuEventHandle*;

namespace cu {
constexpr CuCode kSuccess = 0, kOutOfMemory = 2, kNotInitialized = 3, kDeinitialized = 4, kNotReady = 600,
                 kCaptureImplicit = 906, kCapturedEvent = 907;
constexpr int kModeRelaxed = 2;             // of a thread towards captures of graphs
constexpr unsigned int kDisableTiming = 2;  // of an event: cheaper, and only its order is asked for
}  // namespace cu

// The functions that the device needs, by the names that the header of CUDA maps their short names to.
struct CudaDriver {
  // The driver in the library of this name, opened when first asked for and kept for the process: code that is called
  // while a process ends must not be unloaded. Throws std::runtime_error with the library and what it lacks; the next
  // call tries again.
  static const CudaDriver& open(const std::string& library);

  // Before the first call that needs it: once started, the driver never looks at CUDA_VISIBLE_DEVICES again, and serves no
  // forked child. What it says is not remembered: the next call tries again.
  CuCode start() const noexcept;

  std::string text(CuCode code) const;     // as "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
  int count() const noexcept;              // devices; 0 where the driver cannot tell
  std::vector<std::string> names() const;  // of all devices; makes no context

  CuCode (*init)(unsigned int flags);
  CuCode (*error_name)(CuCode code, const char** name);
  CuCode (*error_string)(CuCode code, const char** text);
  CuCode (*device_count)(int* count);
  CuCode (*device_get)(CuDevice* device, int index);
  CuCode (*device_name)(char* name, int length, CuDevice device);
  CuCode (*primary_context_retain)(CuContext* context, CuDevice device);
  CuCode (*context_current)(CuContext* context);
  CuCode (*context_push)(CuContext context);
  CuCode (*context_pop)(CuContext* context);
  CuCode (*context_synchronize)();
  CuCode (*mem_alloc)(CuAddress* address, std::size_t bytes);
  CuCode (*mem_free)(CuAddress address);
  CuCode (*mem_info)(std::size_t* free, std::size_t* total);
  CuCode (*copy)(CuAddress to, CuAddress from, std::size_t bytes, CuStream stream);
  CuCode (*fill)(CuAddress address, unsigned char value, std::size_t bytes, CuStream stream);
  CuCode (*event_create)(CuEvent* event, unsigned int flags);
  CuCode (*event_record)(CuEvent event, CuStream stream);
  CuCode (*event_query)(CuEvent event);
  CuCode (*event_synchronize)(CuEvent event);
  CuCode (*event_destroy)(CuEvent event);
  CuCode (*stream_wait)(CuStream stream, CuEvent event, unsigned int flags);
  CuCode (*stream_synchronize)(CuStream stream);
  CuCode (*stream_capturing)(CuStream stream, int* status);
  CuCode (*exchange_capture_mode)(int* mode);

 private:
  explicit CudaDriver(const std::string& library);
  mutable Atomic<bool> started_{false};
};

}  // namespace mempool
