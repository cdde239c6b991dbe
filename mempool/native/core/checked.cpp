#include "core/checked.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>

namespace mempool {
namespace {

constexpr std::size_t kZone = 64;
constexpr unsigned char kRed = 0xFD, kPoison = 0xDD;
constexpr std::size_t kMostFaults = 256;
// bytes; buffers above kLargestQuarantined skip the quarantine
constexpr std::size_t kMostQuarantined = std::size_t{64} << 20;
constexpr std::size_t kLargestQuarantined = std::size_t{16} << 20;
constexpr std::size_t kMostBlocks = 4096;

unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

// Return the bytes of redzone after a buffer.
std::size_t tail(std::size_t bytes) noexcept { return kZone + (kZone - bytes % kZone) % kZone; }

void paint(Address address, std::size_t bytes) noexcept {
  std::memset(bytes_at(address - kZone), kRed, kZone);
  std::memset(bytes_at(address + bytes), kRed, tail(bytes));
}

// Return the offset of the first byte that is not `value`; `bytes` if all are.
std::size_t first_other(Address address, std::size_t bytes, unsigned char value) noexcept {
  const unsigned char* const begin = bytes_at(address);
  return static_cast<std::size_t>(
      std::find_if(begin, begin + bytes, [value](unsigned char byte) { return byte != value; }) - begin);
}

}  // namespace

// Holds the locks across a fork, so that a forked child finds every list intact.
struct CheckedFork {
  Lock lock;
  std::vector<Checked*> all;

  static CheckedFork& instance() {
    static CheckedFork* const instance = [] {
      pthread_atfork(prepare, release, release);
      return new CheckedFork;  // threads may outlive every static object
    }();
    return *instance;
  }
  static void prepare() {
    instance().lock.lock();
    for (Checked* one : instance().all) one->lock_.lock();
  }
  static void release() {
    for (Checked* one : instance().all) one->lock_.unlock();
    instance().lock.unlock();
  }
};

Checked::Checked(Client& client, const FrontEnd& front_end) : client_(client), front_end_(front_end) {
  CheckedFork& fork = CheckedFork::instance();
  const Guarded guard(fork.lock);
  fork.all.push_back(this);
}

Checked::~Checked() {
  flush();
  CheckedFork& fork = CheckedFork::instance();
  const Guarded guard(fork.lock);
  fork.all.erase(std::find(fork.all.begin(), fork.all.end(), this));
}

Address Checked::allocate(std::size_t bytes, Stream stream, bool zeroed) noexcept {
  const std::size_t padded = kZone + bytes + tail(bytes);
  if (padded < bytes) return 0;
  const Site site = here();
  Address base = client_.allocate(padded, stream, zeroed);
  if (base == 0) {
    flush();
    base = client_.allocate(padded, stream, zeroed);
  }
  if (base == 0) return 0;
  paint(base + kZone, bytes);
  try {
    const Guarded guard(lock_);
    records_.insert_or_assign(base + kZone, Record{bytes, stream, site, 0, true});
  } catch (...) {
    client_.free(base, stream);
    return 0;
  }
  return base + kZone;
}

bool Checked::fault(Fault::Kind kind, const Records::value_type& record, std::ptrdiff_t offset, Site noticed) noexcept {
  ++found_;
  const auto& [address, r] = record;
  try {
    if (faults_.size() < kMostFaults) faults_.push_back({kind, address, r.bytes, offset, r.allocated, r.freed, noticed});
  } catch (...) {  // the fault is counted, though not listed
  }
  return true;
}

// Check a buffer. Return true if damaged, and repair the damage, so that each fault is found once.
bool Checked::inspect(const Records::value_type& record, Site noticed) noexcept {
  const Address address = record.first;
  const std::size_t bytes = record.second.bytes;
  bool found = false;
  const std::size_t before = first_other(address - kZone, kZone, kRed);
  if (before != kZone) {
    found = fault(Fault::before_begin, record, static_cast<std::ptrdiff_t>(before) - std::ptrdiff_t{kZone}, noticed);
  }
  const std::size_t past = first_other(address + bytes, tail(bytes), kRed);
  if (past != tail(bytes)) found = fault(Fault::past_end, record, static_cast<std::ptrdiff_t>(bytes + past), noticed);
  if (found) paint(address, bytes);
  if (record.second.live) return found;
  const std::size_t touched = first_other(address, bytes, kPoison);
  if (touched == bytes) return found;
  std::memset(bytes_at(address), kPoison, bytes);
  return fault(Fault::after_free, record, static_cast<std::ptrdiff_t>(touched), noticed);
}

// Return true if the address is the pool's but cannot be freed: freed already, or inside a buffer or redzone.
bool Checked::wrong_free(Address address, Site here) noexcept {
  auto record = records_.upper_bound(address + kZone);
  if (record == records_.begin()) return false;
  --record;
  if (record->first > address) {  // in the front redzone of the next buffer
    return fault(Fault::inside, *record, -static_cast<std::ptrdiff_t>(record->first - address), here);
  }
  const std::size_t offset = address - record->first;
  if (offset == 0) return !record->second.live && fault(Fault::double_free, *record, 0, here);
  if (offset >= record->second.bytes + tail(record->second.bytes)) return false;
  return fault(Fault::inside, *record, static_cast<std::ptrdiff_t>(offset), here);
}

// Put a freed live buffer into the quarantine, or add the buffer to `released` at once.
void Checked::bury(Records::iterator record, Stream stream, Site here, Released& released) {
  inspect(*record, here);
  Record& r = record->second;
  if (r.bytes > kLargestQuarantined) {
    released.add(record->first - kZone, stream);
    records_.erase(record);
    return;
  }
  quarantine_.push_back(record->first);
  quarantined_ += r.bytes;
  r.stream = stream;
  r.live = false;
  r.freed = here;
  std::memset(bytes_at(record->first), kPoison, r.bytes);
}

// End the quarantine of the oldest buffers until there is room again or, if `all`, until the quarantine is
// empty.
void Checked::discharge(bool all, Site here, Released& released) noexcept {
  while (!released.full() && !quarantine_.empty() &&
         (all || quarantined_ > kMostQuarantined || quarantine_.size() > kMostBlocks)) {
    const auto record = records_.find(quarantine_.front());
    quarantine_.pop_front();
    quarantined_ -= record->second.bytes;
    inspect(*record, here);
    released.add(record->first - kZone, record->second.stream);
    records_.erase(record);
  }
}

bool Checked::free(Address address, Stream stream, bool* dead) noexcept try {
  const Site site = here();
  Released released;
  bool ours = false, wrong = false, found = false;
  {
    const Guarded guard(lock_);
    const std::uint64_t before = found_;
    const auto record = records_.find(address);
    ours = record != records_.end() && record->second.live;
    if (ours) {
      bury(record, stream, site, released);
    } else {
      wrong = wrong_free(address, site);
    }
    found = found_ != before;
  }
  if (dead != nullptr) *dead = wrong;
  tell(found);
  give_back(released);
  if (ours) make_room(false, site);
  return ours;
} catch (...) {  // no memory for the quarantine: the buffer stays allocated, which is safe
  if (dead != nullptr) *dead = true;
  return false;
}

void Checked::make_room(bool all, Site here) noexcept {
  for (bool more = true; more;) {
    Released released;
    bool found = false;
    {
      const Guarded guard(lock_);
      const std::uint64_t before = found_;
      discharge(all, here, released);
      found = found_ != before;
    }
    more = released.full();
    give_back(released);
    tell(found);
  }
}

void Checked::flush() noexcept { make_room(true, here()); }

void Checked::give_back(const Released& released) noexcept {
  for (std::size_t i = 0; i < released.count; ++i) client_.free(released.base[i], released.stream[i]);
}

Address Checked::reallocate(Address address, std::size_t bytes, Stream stream, bool* foreign) noexcept {
  bool ours = false;
  const std::size_t old = size_of(address, ours);
  *foreign = !ours;
  if (!ours) return 0;
  const Address moved = allocate(bytes, stream);
  if (moved == 0) return 0;
  std::memcpy(bytes_at(moved), bytes_at(address), std::min(old, bytes));
  free(address, stream);
  return moved;
}

std::size_t Checked::size_of(Address address, bool& ours) noexcept {
  const Guarded guard(lock_);
  const auto record = records_.find(address);
  ours = record != records_.end() && record->second.live;
  return ours ? record->second.bytes : 0;
}

void Checked::verify() noexcept {
  const Site site = here();
  bool found = false;
  {
    const Guarded guard(lock_);
    for (const auto& record : records_) found = inspect(record, site) || found;
  }
  tell(found);
}

std::vector<Fault> Checked::faults() {
  const Guarded guard(lock_);
  return faults_;
}

std::uint64_t Checked::faults_found() {
  const Guarded guard(lock_);
  return found_;
}

}  // namespace mempool
