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
using CuMemory = unsigned long long;  // a handle of physical memory

struct CuPlace {  // CUmemLocation
  int type = 1;   // a device
  int id = 0;
};
struct CuMemoryKind {  // CUmemAllocationProp
  int type = 1;        // that stays where it is
  int shared_as = 0;   // not with other processes
  CuPlace place;
  void* of_windows = nullptr;
  unsigned char flags[8] = {};  // the second: network adapters may reach it
};
struct CuAccess {  // CUmemAccessDesc
  CuPlace place;
  int flags = 3;   // read and write
};

namespace cu {
constexpr CuCode kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kDeinitialized = 4,
                 kNotReady = 600, kNotSupported = 801, kCaptureImplicit = 906, kCapturedEvent = 907;
constexpr int kModeRelaxed = 2;             // of a thread towards captures of graphs
constexpr int kCaptureActive = 1;           // status of a stream
constexpr unsigned int kDisableTiming = 2;  // of an event: cheaper, and only its order is asked for
constexpr unsigned int kNonBlocking = 1;    // of a stream: the default stream does not wait for it
constexpr unsigned int kGlobal = 1;         // managed memory that any stream may use
constexpr unsigned int kPortable = 1;       // host memory that every context knows
constexpr int kMinimum = 0;                 // granularity
constexpr int kHasManaged = 83, kHasConcurrentManaged = 89, kHasPages = 102,
              kHasDirectPages = 110;  // attributes of a device
constexpr int kSetReadMostly = 1, kUnsetReadMostly = 2, kSetPreferredLocation = 3;  // advice
}  // namespace cu

// Which functions a device needs.
enum class CuPart : unsigned char { always, pages, managed, host };

struct CudaDriver;

// One function of the driver: the name that CUDA's header maps its short name to, and the version that brought it, as the
// driver counts them (10020 is 10.2).
struct CuEntry {
  CuEntry(CudaDriver& driver, CuPart part, const char* symbol, int since);
  const CuPart part;
  const char* const symbol;
  const int since;
  void* address = nullptr;  // null: this driver has none
};

template <class... Arguments>
struct CuFunction : CuEntry {
  using CuEntry::CuEntry;
  CuCode operator()(Arguments... arguments) const {
    return reinterpret_cast<CuCode (*)(Arguments...)>(address)(arguments...);
  }
};

struct CudaDriver {
  // The driver in the library of this name, opened when first asked for and kept for the process: code that is called
  // while a process ends must not be unloaded. Throws std::runtime_error with the library and what it lacks; the next
  // call tries again.
  static const CudaDriver& open(const std::string& library);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Throws std::runtime_error that names what this driver lacks for a part, and which version has it.
  void require(CuPart part) const;

  // Before the first call that needs it: once started, the driver never looks at CUDA_VISIBLE_DEVICES again, and serves no
  // forked child. What it says is not remembered: the next call tries again.
  CuCode start() const noexcept;

  std::string text(CuCode code) const;     // as "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
  int count() const noexcept;              // devices; 0 where the driver cannot tell
  std::vector<std::string> names() const;  // of all devices; makes no context

 private:
  friend struct CuEntry;
  explicit CudaDriver(std::string library);
  const std::string library_;
  std::vector<CuEntry*> entries_;  // before those that put themselves into it
  mutable Atomic<bool> started_{false};

 public:
  template <class... Arguments>
  using F = CuFunction<Arguments...>;
  F<unsigned int> init{*this, CuPart::always, "cuInit", 2000};
  F<int*> version{*this, CuPart::always, "cuDriverGetVersion", 2020};
  F<CuCode, const char**> error_name{*this, CuPart::always, "cuGetErrorName", 6000};
  F<CuCode, const char**> error_string{*this, CuPart::always, "cuGetErrorString", 6000};
  F<int*> device_count{*this, CuPart::always, "cuDeviceGetCount", 2000};
  F<CuDevice*, int> device_get{*this, CuPart::always, "cuDeviceGet", 2000};
  F<char*, int, CuDevice> device_name{*this, CuPart::always, "cuDeviceGetName", 2000};
  F<int*, int, CuDevice> device_attribute{*this, CuPart::always, "cuDeviceGetAttribute", 2000};
  F<CuContext*, CuDevice> primary_context_retain{*this, CuPart::always, "cuDevicePrimaryCtxRetain", 7000};
  F<CuContext*> context_current{*this, CuPart::always, "cuCtxGetCurrent", 4000};
  F<CuContext> context_push{*this, CuPart::always, "cuCtxPushCurrent_v2", 4000};
  F<CuContext*> context_pop{*this, CuPart::always, "cuCtxPopCurrent_v2", 4000};
  F<> context_synchronize{*this, CuPart::always, "cuCtxSynchronize", 2000};
  F<CuAddress*, std::size_t> mem_alloc{*this, CuPart::always, "cuMemAlloc_v2", 3020};
  F<CuAddress> mem_free{*this, CuPart::always, "cuMemFree_v2", 3020};
  F<std::size_t*, std::size_t*> mem_info{*this, CuPart::always, "cuMemGetInfo_v2", 3020};
  F<CuAddress, CuAddress, std::size_t, CuStream> copy{*this, CuPart::always, "cuMemcpyAsync", 4000};
  F<CuAddress, unsigned char, std::size_t, CuStream> fill{*this, CuPart::always, "cuMemsetD8Async", 3020};
  F<CuEvent*, unsigned int> event_create{*this, CuPart::always, "cuEventCreate", 2000};
  F<CuEvent, CuStream> event_record{*this, CuPart::always, "cuEventRecord", 2000};
  F<CuEvent> event_query{*this, CuPart::always, "cuEventQuery", 2000};
  F<CuEvent> event_synchronize{*this, CuPart::always, "cuEventSynchronize", 2000};
  F<CuEvent> event_destroy{*this, CuPart::always, "cuEventDestroy_v2", 4000};
  F<CuStream, CuEvent, unsigned int> stream_wait{*this, CuPart::always, "cuStreamWaitEvent", 3020};
  F<CuStream> stream_synchronize{*this, CuPart::always, "cuStreamSynchronize", 2000};
  F<CuStream, int*> stream_capturing{*this, CuPart::always, "cuStreamIsCapturing", 10000};
  F<CuStream, int*, unsigned long long*> capture_info{*this, CuPart::always, "cuStreamGetCaptureInfo", 10010};
  F<int*> exchange_capture_mode{*this, CuPart::always, "cuThreadExchangeStreamCaptureMode", 10010};

  F<CuAddress*, std::size_t, std::size_t, CuAddress, unsigned long long> address_reserve{*this, CuPart::pages, "cuMemAddressReserve", 10020};
  F<CuAddress, std::size_t> address_free{*this, CuPart::pages, "cuMemAddressFree", 10020};
  F<CuMemory*, std::size_t, const CuMemoryKind*, unsigned long long> mem_create{*this, CuPart::pages, "cuMemCreate", 10020};
  F<CuMemory> mem_release{*this, CuPart::pages, "cuMemRelease", 10020};
  F<CuAddress, std::size_t, std::size_t, CuMemory, unsigned long long> mem_map{*this, CuPart::pages, "cuMemMap", 10020};
  F<CuAddress, std::size_t> mem_unmap{*this, CuPart::pages, "cuMemUnmap", 10020};
  F<CuAddress, std::size_t, const CuAccess*, std::size_t> set_access{*this, CuPart::pages, "cuMemSetAccess", 10020};
  F<std::size_t*, const CuMemoryKind*, int> granularity{*this, CuPart::pages, "cuMemGetAllocationGranularity", 10020};
  F<int*, CuDevice, CuDevice> can_access_peer{*this, CuPart::pages, "cuDeviceCanAccessPeer", 4000};

  F<CuAddress*, std::size_t, unsigned int> managed_alloc{*this, CuPart::managed, "cuMemAllocManaged", 6000};
  F<CuAddress, std::size_t, int, CuDevice> advise{*this, CuPart::managed, "cuMemAdvise", 8000};
  F<CuAddress, std::size_t, CuDevice, CuStream> prefetch{*this, CuPart::managed, "cuMemPrefetchAsync", 8000};
  F<CuStream*, unsigned int> stream_create{*this, CuPart::managed, "cuStreamCreate", 2000};
  F<CuStream> stream_destroy{*this, CuPart::managed, "cuStreamDestroy_v2", 4000};

  F<void**, std::size_t, unsigned int> host_alloc{*this, CuPart::host, "cuMemHostAlloc", 2020};
  F<void*> host_free{*this, CuPart::host, "cuMemFreeHost", 2000};
  F<CuStream, CuContext*> stream_context{*this, CuPart::host, "cuStreamGetCtx", 9020};
};

}  // namespace mempool
