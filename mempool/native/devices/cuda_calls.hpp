// The driver's results for one device: refused calls are counted and described by name and request.
#pragma once

#include <cstdint>
#include <string>

#include "devices/cuda_driver.hpp"

namespace mempool {

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
