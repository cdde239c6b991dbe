#include "devices/cuda_device.hpp"

#include <array>
#include <new>
#include <stdexcept>

#include "core/flight.hpp"
#include "core/threads.hpp"

namespace mempool {
namespace {

// Convert a stream to the driver's handle. The default stream is 0; 1 and 2 are the driver's handles of the
// legacy and the per-thread default stream. A negative number is the calling thread's default stream.
CuStream handle(Stream stream) { return reinterpret_cast<CuStream>(stream < 0 ? ThreadStream::kHandle : stream); }

}  // namespace

// --- state shared by all pools of one device

struct CudaDevice::Shared {
  Lock lock;
  unsigned captures = 0;
  // of destroyed devices that could not wait before releasing memory
  std::vector<std::unique_ptr<Backing>> left;
};

CudaDevice::Shared& CudaDevice::shared(int index) noexcept {
  // never destroyed, because calls may come at the end of the process
  static auto* const all = new std::array<Shared, kShared>;
  return (*all)[static_cast<std::size_t>(index) % all->size()];
}

CudaDevice::Shared& CudaDevice::shared() const noexcept { return shared(index_.load()); }

void CudaDevice::begin_capture(int index) noexcept {
  const Guarded guard(shared(index).lock);  // after a wait in progress has ended
  ++shared(index).captures;
}

void CudaDevice::end_capture(int index) noexcept {
  const Guarded guard(shared(index).lock);
  --shared(index).captures;
}

void CudaDevice::begin_capture() noexcept {
  for (int index = 0; index < kShared; ++index) begin_capture(index);
}

void CudaDevice::end_capture() noexcept {
  for (int index = 0; index < kShared; ++index) end_capture(index);
}

// --- requirements of every call: a current context and a relaxed capture mode

class CudaDevice::Scope {
 public:
  // `elsewhere`: a context to use instead of the device's own.
  explicit Scope(const CudaDevice& device, CuContext elsewhere = nullptr) noexcept : device_(device) {
    const CudaDriver& driver = device.driver_;
    const CudaCalls& calls = device.calls_;
    if (device.absent() || !calls.judge(driver.start(), driver.init.symbol)) return;
    relaxed_ = calls.ok(driver.exchange_capture_mode, &mode_);
    const CuContext wanted = !relaxed_ ? nullptr : elsewhere != nullptr ? elsewhere : device.context();
    CuContext current = nullptr;
    if (wanted == nullptr || !calls.ok(driver.context_current, &current)) return;
    pushed_ = current != wanted && calls.ok(driver.context_push, wanted);
    ready_ = current == wanted || pushed_;
  }
  ~Scope() {
    CuContext popped = nullptr;
    if (pushed_) device_.calls_.ok(device_.driver_.context_pop, &popped);
    if (relaxed_) device_.calls_.ok(device_.driver_.exchange_capture_mode, &mode_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  explicit operator bool() const noexcept { return ready_; }

 private:
  const CudaDevice& device_;
  int mode_ = cu::kModeRelaxed;  // after the first exchange: the thread's own mode
  bool relaxed_ = false, pushed_ = false, ready_ = false;
};

CudaDevice::CudaDevice(int index, const CudaDriver& driver, CudaKind kind, bool else_plain)
    : driver_(driver),
      kind_(kind),
      undecided_(else_plain),
      wanted_(index),
      backing_(std::make_unique<Backing>(driver)),
      calls_(backing_->calls),
      index_(else_plain ? kUnbound : index) {
  driver.require(part_of(kind));
  flight::note(flight::device_made, 0, 0, index, kind, else_plain);
  backing_->memory = CudaMemory::make(kind, calls_);
}

CudaDevice::~CudaDevice() {
  if (const Scope scope(*this); scope) {
    backing_->memory->close();
    for (Marker* marker = markers_; marker != nullptr; marker = marker->next) calls_.ok(driver_.event_destroy, marker->event);
  }
  while (markers_ != nullptr) delete std::exchange(markers_, markers_->next);
  if (backing_->waiting.empty() || synchronize()) return;
  try {
    const Guarded guard(shared().lock);
    shared().left.push_back(std::move(backing_));
  } catch (...) {
    backing_.release();  // never released: wasteful but correct
  }
}

void CudaDevice::check() const {
  const auto must = [this](CuCode code, const CuEntry& asked) {
    if (code != cu::kSuccess) throw std::runtime_error(asked.symbol + (": " + driver_.text(code)));
  };
  must(driver_.start(), driver_.init);
  if (index_.load() == kUnbound) return;
  const std::string name = "CUDA device " + std::to_string(index_.load());
  int count = 0;
  must(driver_.device_count(&count), driver_.device_count);
  if (index_.load() >= count) throw std::runtime_error("no " + name + "; the driver sees " + std::to_string(count));
  CuDevice device = 0;
  must(driver_.device_get(&device, index_.load()), driver_.device_get);
  const CudaKind kind = kind_.load();
  const int attribute = kind == CudaKind::growing ? cu::kHasPages : kind == CudaKind::managed ? cu::kHasManaged : 0;
  int has = 0;
  if (attribute != 0 && (driver_.device_attribute(&has, attribute, device) != cu::kSuccess || has == 0)) {
    throw std::runtime_error(name + " has no " + kCudaKindNames[static_cast<int>(kind)] + " memory");
  }
}

// Use plain memory if this device has no growing memory.
void CudaDevice::choose_kind(int index) noexcept try {
  const Guarded guard(lock_);
  if (!undecided_.load()) return;
  CuDevice device = 0;
  int has_pages = 0;
  const bool known = driver_.start() == cu::kSuccess && driver_.device_get(&device, index) == cu::kSuccess &&
                     driver_.device_attribute(&has_pages, cu::kHasPages, device) == cu::kSuccess;
  if (known && has_pages == 0) {
    backing_->memory = CudaMemory::make(CudaKind::plain, calls_);
    kind_.store(CudaKind::plain);
  }
  undecided_.store(false);
} catch (...) {  // no host memory: the next request decides
}

bool CudaDevice::bind(int index) noexcept {
  if (index < 0 || index >= driver_.count()) return false;
  if (wanted_ != kUnbound && index != wanted_) return false;
  if (undecided_.load()) choose_kind(index);
  int unbound = kUnbound;
  return index_.compare_exchange_strong(unbound, index) || unbound == index;
}

// Return the primary context, retained at first use because a context costs hundreds of MiB, and kept,
// because other libraries use the same context.
CuContext CudaDevice::context() const noexcept {
  if (context_.load() != nullptr) return context_.load();
  const Guarded guard(lock_);
  CuDevice device = 0;
  CuContext made = nullptr;
  if (context_.load() == nullptr && calls_.ok(driver_.device_get, &device, index_.load()) &&
      calls_.ok(driver_.primary_context_retain, &made, device)) {
    context_.store(made);
  }
  return context_.load();
}

// --- memory

DeviceTraits CudaDevice::traits() const noexcept { return backing_->memory->traits(); }

// Refusals of the calling thread's requests for memory.
struct CudaDevice::Refusals {
  std::uint64_t count = 0;
  CudaRefusal last;
};

// Perform a request for memory. Earlier refusals of other calls of this thread do not make the request fail.
template <class Ask>
auto CudaDevice::ask_for_memory(Ask ask) noexcept {
  CudaCalls::mine() = {};
  const auto had = [&] {
    const Scope scope(*this);
    return scope ? ask() : decltype(ask()){};
  }();
  if (!had && CudaCalls::mine().asked != nullptr) {
    Refusals& refusals = per_thread<Refusals>();
    ++refusals.count;
    refusals.last = CudaCalls::mine();
  }
  return had;
}

std::uint64_t CudaDevice::refusals() const noexcept { return per_thread<Refusals>().count; }

std::string CudaDevice::last_refusal_text() const { return calls_.text(per_thread<Refusals>().last); }

Address CudaDevice::reserve(std::size_t bytes, std::size_t alignment) noexcept {
  return ask_for_memory([&] { return backing_->memory->reserve(index_.load(), bytes, alignment); });
}

bool CudaDevice::commit(Address address, std::size_t bytes) noexcept {
  return ask_for_memory([&] { return backing_->memory->commit(address, bytes); });
}

void CudaDevice::decommit(Address address, std::size_t bytes) noexcept {
  if (const Scope scope(*this); scope) backing_->memory->decommit(address, bytes);
}

void CudaDevice::release(Address address, std::size_t bytes) noexcept {
  const Scope scope(*this);
  if (!scope) return;
  if (!unfinished_.load()) {
    backing_->memory->release(address, bytes);
    return;
  }
  try {
    const Guarded guard(lock_);
    backing_->waiting.emplace_back(address, bytes);
  } catch (...) {  // never released: wasteful but correct
  }
}

void CudaDevice::Backing::release_waiting() noexcept {
  for (const auto& [address, bytes] : waiting) memory->release(address, bytes);
  waiting.clear();
}

// Release deferred memory after all queued work has completed. Call with the shared lock held.
void CudaDevice::release_waiting() noexcept {
  {
    const Guarded guard(lock_);
    backing_->release_waiting();
  }
  for (const std::unique_ptr<Backing>& backing : shared().left) backing->release_waiting();
  shared().left.clear();
}

void CudaDevice::prefetch(Address address, std::size_t bytes) noexcept {
  if (const Scope scope(*this); scope && bytes != 0) backing_->memory->prefetch(address, bytes);
}

void CudaDevice::copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept {
  const Scope scope(*this);
  if (scope && bytes != 0) calls_.ok(driver_.copy, to, from, bytes, handle(stream));
}

void CudaDevice::zero(Address address, std::size_t bytes, Stream stream) noexcept {
  const Scope scope(*this);
  if (scope && bytes != 0) calls_.ok(driver_.fill, address, 0, bytes, handle(stream));
}

DeviceMemory CudaDevice::memory() const noexcept {
  // pinned memory is the host's, and of hosted memory the host may have free blocks
  if (kind_.load() == CudaKind::pinned || kind_.load() == CudaKind::hosted) return {0, 0};
  const Scope scope(*this);
  DeviceMemory memory{0, 0};
  if (!scope || !calls_.ok(driver_.mem_info, &memory.free, &memory.total)) return {0, 0};
  return memory;
}

// --- order

CudaDevice::Capture CudaDevice::capture_of(Stream stream) const noexcept {
  int status = 0;
  const CuCode code = driver_.stream_capturing(handle(stream), &status);
  if (code == cu::kCaptureImplicit) return Capture::elsewhere;
  return calls_.judge(code, driver_.stream_capturing.symbol) && status != 0 ? Capture::active : Capture::none;
}

bool CudaDevice::capturing(Stream stream) noexcept {
  const Scope scope(*this);
  // unknown here; the owning thread queries the stream
  if (ThreadStream::elsewhere(stream)) return false;
  return scope && capture_of(stream) != Capture::none;
}

std::uint64_t CudaDevice::capture(Stream stream) noexcept {
  if (stream == 0 || ThreadStream::elsewhere(stream)) return 0;  // the default stream cannot be captured
  const Scope scope(*this);
  int status = 0;
  unsigned long long number = 0;
  return scope && calls_.ok(driver_.capture_info, handle(stream), &status, &number) && status == cu::kCaptureActive ? number : 0;
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
  if (marker == nullptr || calls_.ok(driver_.event_create, &marker->event, cu::kDisableTiming)) return marker;
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
  if (ThreadStream::elsewhere(stream)) return unrecorded;
  const Capture capture = capture_of(stream);
  if (capture == Capture::elsewhere) return unrecorded;  // any use of the stream would break the capture
  Marker* const marker = take_marker();
  if (marker != nullptr) {
    marker->captured = capture == Capture::active;
    if (calls_.ok(driver_.event_record, marker->event, handle(stream))) return reinterpret_cast<Event>(marker);
    put_back(marker);
  }
  if (capture == Capture::active) return unrecorded;
  if (calls_.ok(driver_.stream_synchronize, handle(stream)) || wait_for_all()) return 0;
  return absent() ? 0 : unrecorded;
}

bool CudaDevice::query(Event event) noexcept {
  if (event == 0) return true;
  const Marker& marker = *reinterpret_cast<const Marker*>(event);
  const Scope scope(*this);
  if (!scope || marker.event == nullptr || marker.captured) return absent();  // a query would break a capture
  const CuCode code = driver_.event_query(marker.event);
  if (code == cu::kNotReady) return false;
  return calls_.judge(code, driver_.event_query.symbol) || absent();
}

bool CudaDevice::tells(Event event) const noexcept {
  if (event == 0) return true;
  const Marker& marker = *reinterpret_cast<const Marker*>(event);
  return marker.event != nullptr && !marker.captured;
}

bool CudaDevice::may_record(Stream stream) noexcept {
  const Scope scope(*this);
  return !scope || (!ThreadStream::elsewhere(stream) && capture_of(stream) == Capture::none);
}

bool CudaDevice::wait(Stream stream, Event event) noexcept {
  if (event == 0) return true;
  const Marker& marker = *reinterpret_cast<const Marker*>(event);
  const Scope scope(*this);
  if (!scope) return absent();
  if (marker.event == nullptr) return wait_for_all() || absent();
  if (ThreadStream::elsewhere(stream)) {
    return !marker.captured && (calls_.ok(driver_.event_synchronize, marker.event) || wait_for_all() || absent());
  }
  const Capture capture = capture_of(stream);
  if (marker.captured && capture != Capture::active) {
    calls_.judge(cu::kCapturedEvent, driver_.stream_wait.symbol);
    return false;
  }
  // A capture must not depend on work queued outside the capture, but may come after that work.
  const bool together = marker.captured == (capture == Capture::active) && capture != Capture::elsewhere;
  if (together && calls_.ok(driver_.stream_wait, handle(stream), marker.event, 0)) return true;
  return !marker.captured && (calls_.ok(driver_.event_synchronize, marker.event) || wait_for_all() || absent());
}

void CudaDevice::forget(Event event) noexcept {
  auto* const marker = reinterpret_cast<Marker*>(event);
  if (marker != nullptr && marker != &unrecorded_) put_back(marker);
}

// Wait for the whole context, which breaks every capture in the context. The capture of a stream that the
// legacy default stream waits for can be detected before.
bool CudaDevice::wait_for_all() noexcept {
  const Guarded guard(shared().lock);
  if (shared().captures != 0 && MEMPOOL_GUARDED("hold")) {
    unfinished_.store(true);
    return false;
  }
  const bool refused = capture_of(0) == Capture::elsewhere;
  const bool done = !refused && calls_.ok(driver_.context_synchronize);
  if (refused) calls_.judge(cu::kCaptureImplicit, driver_.context_synchronize.symbol);
  unfinished_.store(!done && !absent());
  if (done) release_waiting();
  return done;
}

CuContext CudaDevice::context_of(Stream stream) const noexcept {
  CuContext named = nullptr;
  if (driver_.context_current(&named) != cu::kSuccess) return nullptr;
  const Scope scope(*this);
  if (!scope) return nullptr;
  const bool has_handle = stream > ThreadStream::kHandle;  // the other handles belong to the current context
  if (has_handle && !calls_.ok(driver_.stream_context, handle(stream), &named)) return nullptr;
  return named == context() ? nullptr : named;
}

bool CudaDevice::wait_elsewhere(CuContext context, Stream stream) noexcept {
  const Scope scope(*this, context);
  if (!scope) return absent();
  if (ThreadStream::elsewhere(stream)) return calls_.ok(driver_.context_synchronize);
  return capture_of(stream) == Capture::none && calls_.ok(driver_.stream_synchronize, handle(stream));
}

bool CudaDevice::synchronize() noexcept {
  // no memory was ever handed out, and a wait would create a context for nothing
  if (context_.load() == nullptr) return true;
  const Scope scope(*this);
  return scope ? wait_for_all() || absent() : absent();
}

}  // namespace mempool
