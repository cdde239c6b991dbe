#include "cuda_device.hpp"

#include <array>
#include <new>

namespace mempool {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// The default stream is 0, and the handles of the legacy and the per-thread one (1 and 2) are the driver's own.
CuStream handle(Stream stream) { return reinterpret_cast<CuStream>(stream); }

}  // namespace

// --- what all pools of one device have in common

struct CudaDevice::Shared {
  Lock lock;
  unsigned captures = 0;
  std::vector<Address> left;  // given back by pools that are gone, when nobody could wait
};

// Indices beyond share an entry: wasteful and right.
CudaDevice::Shared& CudaDevice::shared(int index) noexcept {
  static auto* const all = new std::array<Shared, 64>;  // never destroyed, like whoever calls when a process ends
  return (*all)[static_cast<std::size_t>(index) % all->size()];
}

CudaDevice::Shared& CudaDevice::shared() const noexcept { return shared(index_.load()); }

void CudaDevice::begin_capture(int index) noexcept {
  const Guarded guard(shared(index).lock);  // after who waits at the moment
  ++shared(index).captures;
}

void CudaDevice::end_capture(int index) noexcept {
  const Guarded guard(shared(index).lock);
  --shared(index).captures;
}

// --- what every call needs: a context that is current, and captures that do not mind

class CudaDevice::Scope {
 public:
  explicit Scope(const CudaDevice& device) noexcept : device_(device) {
    if (device.absent() || !device.ok(device.driver_.start())) return;
    relaxed_ = device.ok(device.driver_.exchange_capture_mode(&mode_));
    const CuContext wanted = relaxed_ ? device.context() : nullptr;
    CuContext current = nullptr;
    if (wanted == nullptr || !device.ok(device.driver_.context_current(&current))) return;
    pushed_ = current != wanted && device.ok(device.driver_.context_push(wanted));
    ready_ = current == wanted || pushed_;
  }
  ~Scope() {
    CuContext popped = nullptr;
    if (pushed_) device_.ok(device_.driver_.context_pop(&popped));
    if (relaxed_) device_.ok(device_.driver_.exchange_capture_mode(&mode_));
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  explicit operator bool() const noexcept { return ready_; }

 private:
  const CudaDevice& device_;
  int mode_ = cu::kModeRelaxed;  // after the first exchange: the thread's own
  bool relaxed_ = false, pushed_ = false, ready_ = false;
};

CudaDevice::CudaDevice(int index, const CudaDriver& driver) : driver_(driver), index_(index) {}

CudaDevice::~CudaDevice() {
  if (!waiting_.empty() && !synchronize()) {
    try {
      const Guarded guard(shared().lock);
      shared().left.insert(shared().left.end(), waiting_.begin(), waiting_.end());
    } catch (...) {  // never given back: wasteful and right
    }
  }
  for (Marker* marker = markers_; marker != nullptr;) {
    Marker* const next = marker->next;
    if (const Scope scope(*this); scope) ok(driver_.event_destroy(marker->event));
    delete marker;
    marker = next;
  }
}

bool CudaDevice::bind(int index) noexcept {
  if (index < 0 || index >= driver_.count()) return false;
  int unbound = kUnbound;
  return index_.compare_exchange_strong(unbound, index) || unbound == index;
}

bool CudaDevice::ok(CuCode code) const noexcept {
  if (code == cu::kSuccess) return true;
  if (code == cu::kDeinitialized || code == cu::kNotInitialized) {
    gone_.store(true);
  } else {
    last_error_.store(code);
    errors_.fetch_add(1);
  }
  return false;
}

// Retained when first needed, since a context costs hundreds of MiB, and kept: other libraries use the same one.
CuContext CudaDevice::context() const noexcept {
  if (context_.load() != nullptr) return context_.load();
  const Guarded guard(lock_);
  CuDevice device = 0;
  CuContext made = nullptr;
  if (context_.load() == nullptr && ok(driver_.device_get(&device, index_.load())) &&
      ok(driver_.primary_context_retain(&made, device))) {
    context_.store(made);
  }
  return context_.load();
}

// --- memory

// The driver gives memory in pieces of 2 MiB, so a segment of its own wastes 1 MiB on average, and giving one back waits
// for the device. Both are little for 10 MiB and more; what is smaller shares segments of 20 MiB.
DeviceTraits CudaDevice::traits() const noexcept { return {512, 0, 20 * kMiB, 10 * kMiB, false, true, 2 * kMiB}; }

Address CudaDevice::allocate(std::size_t bytes) noexcept {
  CuAddress address = 0;
  const CuCode code = driver_.mem_alloc(&address, bytes);
  if (code == cu::kOutOfMemory) return 0;
  return ok(code) ? static_cast<Address>(address) : 0;
}

void CudaDevice::free(Address base) noexcept { ok(driver_.mem_free(base)); }

Address CudaDevice::reserve(std::size_t bytes, std::size_t alignment) noexcept {
  const Scope scope(*this);
  if (!scope || bytes == 0) return 0;
  Address base = allocate(bytes);
  if (base == 0 || base % alignment == 0) return base;
  // The driver promises 256 bytes only. What is added makes room to move up.
  free(base);
  base = allocate(bytes + alignment);
  if (base == 0) return 0;
  const Address address = (base + alignment - 1) / alignment * alignment;
  try {
    const Guarded guard(lock_);
    if (address != base) bases_[address] = base;
  } catch (...) {
    free(base);
    return 0;
  }
  return address;
}

Address CudaDevice::take_base(Address address) noexcept {
  const Guarded guard(lock_);
  const auto found = bases_.find(address);
  if (found == bases_.end()) return address;
  const Address base = found->second;
  bases_.erase(found);
  return base;
}

void CudaDevice::release(Address address, std::size_t) noexcept {
  const Address base = take_base(address);
  const Scope scope(*this);
  if (!scope) return;
  if (!unfinished_.load()) {
    free(base);
    return;
  }
  try {
    const Guarded guard(lock_);
    waiting_.push_back(base);
  } catch (...) {  // never given back: wasteful and right
  }
}

void CudaDevice::free_waiting() noexcept {
  std::vector<Address> waiting;
  {
    const Guarded guard(lock_);
    waiting.swap(waiting_);
  }
  for (const Address base : shared().left) free(base);
  shared().left.clear();
  for (const Address base : waiting) free(base);
}

void CudaDevice::copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept {
  const Scope scope(*this);
  if (scope && bytes != 0) ok(driver_.copy(to, from, bytes, handle(stream)));
}

void CudaDevice::zero(Address address, std::size_t bytes, Stream stream) noexcept {
  const Scope scope(*this);
  if (scope && bytes != 0) ok(driver_.fill(address, 0, bytes, handle(stream)));
}

DeviceMemory CudaDevice::memory() const noexcept {
  const Scope scope(*this);
  DeviceMemory memory{0, 0};
  if (!scope || !ok(driver_.mem_info(&memory.free, &memory.total))) return {0, 0};
  return memory;
}

// --- order

CudaDevice::Capture CudaDevice::capture_of(Stream stream) const noexcept {
  int status = 0;
  const CuCode code = driver_.stream_capturing(handle(stream), &status);
  if (code == cu::kCaptureImplicit) return Capture::elsewhere;
  return ok(code) && status != 0 ? Capture::active : Capture::none;
}

bool CudaDevice::capturing(Stream stream) noexcept {
  const Scope scope(*this);
  return scope && capture_of(stream) != Capture::none;
}

CudaDevice::Marker* CudaDevice::take_marker() noexcept {
  {
    const Guarded guard(lock_);
    if (Marker* const marker = markers_; marker != nullptr) {
      markers_ = marker->next;
      return marker;
    }
  }
  auto* const marker = new (std::nothrow) Marker;
  if (marker == nullptr || ok(driver_.event_create(&marker->event, cu::kDisableTiming))) return marker;
  delete marker;
  return nullptr;
}

void CudaDevice::put_back(Marker* marker) noexcept {
  const Guarded guard(lock_);
  marker->next = markers_;
  markers_ = marker;
}

Event CudaDevice::record(Stream stream) noexcept {
  const Event unrecorded = reinterpret_cast<Event>(&unrecorded_);
  const Scope scope(*this);
  if (!scope) return absent() ? 0 : unrecorded;
  const Capture capture = capture_of(stream);
  if (capture == Capture::elsewhere) return unrecorded;  // to use the stream at all would break the capture
  Marker* const marker = take_marker();
  if (marker != nullptr) {
    marker->captured = capture == Capture::active;
    if (ok(driver_.event_record(marker->event, handle(stream)))) return reinterpret_cast<Event>(marker);
    put_back(marker);
  }
  if (capture == Capture::active) return unrecorded;
  if (ok(driver_.stream_synchronize(handle(stream))) || wait_for_all()) return 0;
  return absent() ? 0 : unrecorded;
}

bool CudaDevice::query(Event event) noexcept {
  if (event == 0) return true;
  const Marker& marker = *reinterpret_cast<const Marker*>(event);
  const Scope scope(*this);
  if (!scope || marker.event == nullptr || marker.captured) return absent();  // to ask would break a capture
  const CuCode code = driver_.event_query(marker.event);
  if (code == cu::kNotReady) return false;
  return ok(code) || absent();
}

void CudaDevice::wait(Stream stream, Event event) noexcept {
  if (event == 0) return;
  const Marker& marker = *reinterpret_cast<const Marker*>(event);
  const Scope scope(*this);
  if (!scope) return;
  if (marker.event == nullptr) {
    wait_for_all();
    return;
  }
  const Capture capture = capture_of(stream);
  if (marker.captured && capture != Capture::active) {
    ok(cu::kCapturedEvent);
    return;
  }
  // A capture must not depend on what is queued outside it, but may come after it.
  const bool together = marker.captured == (capture == Capture::active) && capture != Capture::elsewhere;
  if (together && ok(driver_.stream_wait(handle(stream), marker.event, 0))) return;
  if (!marker.captured && !ok(driver_.event_synchronize(marker.event))) wait_for_all();
}

void CudaDevice::forget(Event event) noexcept {
  auto* const marker = reinterpret_cast<Marker*>(event);
  if (marker != nullptr && marker != &unrecorded_) put_back(marker);
}

// To wait for the whole context breaks every capture in it. One of a stream that the legacy default stream waits for can
// be seen before.
bool CudaDevice::wait_for_all() noexcept {
  const Guarded guard(shared().lock);
  if (shared().captures != 0 && MEMPOOL_GUARDED("hold")) {
    unfinished_.store(true);
    return false;
  }
  const bool refused = capture_of(0) == Capture::elsewhere;
  const bool done = !refused && ok(driver_.context_synchronize());
  if (refused) ok(cu::kCaptureImplicit);
  unfinished_.store(!done && !absent());
  if (done) free_waiting();
  return done;
}

bool CudaDevice::synchronize() noexcept {
  if (context_.load() == nullptr) return true;  // nothing was ever handed out, and a context would be made for nothing
  const Scope scope(*this);
  return scope ? wait_for_all() || absent() : absent();
}

}  // namespace mempool
