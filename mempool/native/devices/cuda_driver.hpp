// The CUDA driver's library, opened at run time: the build needs no CUDA headers, and a machine without a GPU
// reports an error only when a GPU is requested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/flight.hpp"
#include "core/sync.hpp"

namespace mempool {

// Types of the driver's ABI; handles are opaque.
using CuCode = int;
using CuDevice = int;
using CuAddress = unsigned long long;  // in bytes
using CuContext = struct CuContextHandle*;
using CuStream = struct CuStreamHandle*;
using CuEvent = struct CuEventHandle*;
using CuMemory = unsigned long long;  // a handle of physical memory

struct CuPlace {  // CUmemLocation
  int type = 1;   // a device
  int id = 0;
};
struct CuMemoryKind {  // CUmemAllocationProp
  int type = 1;        // pinned: the memory never moves
  int shared_as = 0;   // not shared with other processes
  CuPlace place;
  void* of_windows = nullptr;
  unsigned char flags[8] = {};  // the second: access by network adapters
};
struct CuAccess {  // CUmemAccessDesc
  CuPlace place;
  int flags = 3;   // read and write
};

namespace cu {
constexpr CuCode kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kDeinitialized = 4,
                 kNotReady = 600, kNotSupported = 801, kCaptureImplicit = 906, kCapturedEvent = 907;
constexpr int kModeRelaxed = 2;             // a thread's mode towards graph captures
constexpr int kCaptureActive = 1;           // status of a stream
// flag of an event: cheaper, and only the order of events is needed
constexpr unsigned int kDisableTiming = 2;
constexpr unsigned int kNonBlocking = 1;  // flag of a stream: the default stream does not wait for the stream
constexpr unsigned int kGlobal = 1;         // flag of managed memory that any stream may use
constexpr unsigned int kPortable = 1;       // flag of host memory that is usable in every context
constexpr int kMinimum = 0;                 // granularity
constexpr int kHasManaged = 83, kHasConcurrentManaged = 89, kHasPages = 102,
              kHasDirectPages = 110;  // attributes of a device
constexpr int kSetPreferredLocation = 3;  // advice
}  // namespace cu

// Groups of driver functions, by the kind of memory that needs them.
enum class CuPart : unsigned char { always, pages, managed, host };

struct CudaDriver;

// A function of the driver: the symbol to which CUDA's header maps the short name, and the version that
// introduced the function, in the driver's numbering (10020 is 10.2).
struct CuEntry {
  CuEntry(CudaDriver& driver, CuPart part, const char* symbol, int since);
  const CuPart part;
  const char* const symbol;
  const int since;
  const std::uint16_t number;  // of the function in a flight recorder
  void* address = nullptr;     // null: this driver lacks the function
};

template <class... Arguments>
struct CuFunction : CuEntry {
  using CuEntry::CuEntry;
  CuCode operator()(Arguments... arguments) const {
    const auto function = reinterpret_cast<CuCode (*)(Arguments...)>(address);
    if (!flight::on()) return function(arguments...);
    const std::uint64_t begin = flight::now();
    const CuCode code = function(arguments...);
    const std::uint64_t values[] = {flight::number(arguments, code == 0)..., 0, 0, 0, 0};
    flight::add(number, 0, code, {values[0], values[1], values[2], values[3]}, begin);
    return code;
  }
};

struct CudaDriver {
  // Return the driver in the library of this name, opened at the first call and kept for the process, because
  // code that is called at the end of a process must not be unloaded. Throws std::runtime_error with the
  // library and the missing part; the next call tries again.
  static const CudaDriver& open(const std::string& library);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  // Throws std::runtime_error naming the function this driver lacks for a part, and the version that has it.
  void require(CuPart part) const;

  // Start the driver before the first call that needs it: once started, the driver ignores changes of
  // CUDA_VISIBLE_DEVICES and serves no forked child. Errors are not cached: the next call tries again.
  CuCode start() const noexcept;

  std::string text(CuCode code) const;     // formatted as "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
  int count() const noexcept;              // devices; 0 if the driver cannot tell
  std::vector<std::string> names() const;  // of all devices; creates no context

 private:
  friend struct CuEntry;
  explicit CudaDriver(std::string library);
  const std::string library_;
  std::vector<CuEntry*> entries_;  // declared before the entries, which register themselves here
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

// The driver's results for one device: refused calls are counted and described by name and request.
// A refused call.
struct CudaRefusal {
  CuCode code = cu::kSuccess;
  const char* asked = nullptr;
  std::size_t bytes = 0;  // bytes requested; 0: none
};

class CudaCalls {
 public:
  explicit CudaCalls(const CudaDriver& driver) : driver(driver) {}

  const CudaDriver& driver;

  // Call a driver function; false: refused.
  template <class... Wanted, class... Given>
  bool ok(const CuFunction<Wanted...>& function, Given... given) const noexcept {
    return judge(function(given...), function.symbol);
  }
  // Evaluate a result code. `bytes`: bytes requested, 0: none.
  bool judge(CuCode code, const char* asked, std::size_t bytes = 0) const noexcept {
    if (code == cu::kSuccess) return true;
    if (code == cu::kDeinitialized || code == cu::kNotInitialized) {
      gone_.store(true);
      return false;
    }
    last_.store(code);
    asked_.store(asked);
    bytes_.store(bytes);
    errors_.fetch_add(1);
    mine() = {code, asked, bytes};
    return false;
  }
  // The same for a request for memory, where lack of memory is no error.
  bool had(CuCode code, const char* asked, std::size_t bytes) const noexcept {
    return code != cu::kOutOfMemory && judge(code, asked, bytes);
  }

  bool gone() const noexcept { return gone_.load(); }  // the driver has shut down for this process
  std::uint64_t errors() const noexcept { return errors_.load(); }
  CuCode last() const noexcept { return last_.load(); }
  // Return a text like "cuMemCreate (2097152 bytes): CUDA_ERROR_NOT_SUPPORTED (801): operation not
  // supported".
  std::string last_text() const { return text({last(), asked_.load(), bytes_.load()}); }
  std::string text(const CudaRefusal& refusal) const {
    std::string text = refusal.asked != nullptr ? refusal.asked : "";
    if (refusal.bytes != 0) text += " (" + std::to_string(refusal.bytes) + " bytes)";
    return (text.empty() ? text : text + ": ") + driver.text(refusal.code);
  }
  // The calling thread's last refusal on any device, until cleared.
  static CudaRefusal& mine() noexcept { return per_thread<CudaRefusal>(); }

 private:
  mutable Atomic<bool> gone_{false};
  mutable Atomic<std::uint64_t> errors_{0};
  mutable Atomic<CuCode> last_{cu::kSuccess};
  mutable Atomic<const char*> asked_{nullptr};
  mutable Atomic<std::size_t> bytes_{0};
};

}  // namespace mempool
