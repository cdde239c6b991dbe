#include "core/foreign_uses.hpp"

#include <algorithm>

#include "core/guards.hpp"
#include "core/live.hpp"
#include "core/threads.hpp"

namespace mempool {
namespace {

bool holds(const std::vector<Stream>& streams, Stream stream) noexcept {
  return std::find(streams.begin(), streams.end(), stream) != streams.end();
}

template <class Known>
auto find(Known& known, Stream stream) noexcept {
  return std::find_if(known.begin(), known.end(), [&](const auto& one) { return one.stream == stream; });
}

}  // namespace

ForeignUses::~ForeignUses() {
  for (auto& [address, use] : uses_) {
    for (const By& by : use.by) {
      LiveEvents::forget(device_, by.event);
    }
  }
}

void ForeignUses::add(Address address, Stream stream) {
  busy_.reserve(streams_.size() + 1);
  streams_.reserve(streams_.size() + 1);
  const auto [found, fresh] = uses_.try_emplace(address);
  Use& use = found->second;
  use.address = address;
  const auto same = [&](const By& by) { return by.stream == stream; };
  if (use.freed || std::any_of(use.by.begin(), use.by.end(), same)) return;
  try {
    use.by.push_back({stream, 0});
  } catch (...) {
    if (fresh) uses_.erase(found);
    throw;
  }
  const auto known = find(streams_, stream);
  if (known != streams_.end()) {
    ++known->uses;
  } else {
    streams_.push_back({stream, 1, 0});
  }
}

// Count one freed buffer less for the stream.
void ForeignUses::forget(Stream stream) noexcept {
  const auto known = find(streams_, stream);
  awaited_ -= --known->waiting == 0 ? 1 : 0;
  if (--known->uses != 0) return;
  *known = streams_.back();
  streams_.pop_back();
}

bool ForeignUses::waits(Address address) const noexcept {
  const auto found = uses_.find(address);
  return found != uses_.end() && found->second.freed;
}

void ForeignUses::free(Address address, Stream stream) noexcept {
  Use& use = uses_.find(address)->second;
  use.freed = true;
  ++waiting_;
  use.stream = stream;
  for (const By& by : use.by) awaited_ += find(streams_, by.stream)->waiting++ == 0 ? 1 : 0;
  (last_ == nullptr ? first_ : last_->next) = &use;
  last_ = &use;
  if (paused_ == 0) record(use);
}

void ForeignUses::record(Use& use) noexcept {
  for (By& by : use.by) by.event = LiveEvents::record(device_, by.stream);
  use.recorded = true;
}

// Record the event again if recording failed at the free, or if the event was captured.
bool ForeignUses::record_again(By& by) noexcept {
  // no thread can record on the stream any more: synchronize once for all buffers freed so far
  if (ThreadStream::ended(by.stream)) {
    if (!device_.synchronize()) return false;
    synchronized();
    return true;
  }
  if (!device_.may_record(by.stream)) return false;
  LiveEvents::forget(device_, by.event);
  by.event = LiveEvents::record(device_, by.stream);
  return device_.tells(by.event);
}

bool ForeignUses::through(Use& use) noexcept {
  if (!use.recorded) return false;
  for (By& by : use.by) {
    if (by.event == 0) continue;
    // not marked as busy: an unusable event says nothing about buffers freed later
    if (!device_.tells(by.event) && !record_again(by)) return false;
    // Streams finish in order, so one query of a busy stream suffices for all buffers freed later.
    if (holds(busy_, by.stream)) return false;
    if (!device_.query(by.event)) {
      busy_.push_back(by.stream);
      return false;
    }
    LiveEvents::forget(device_, by.event);
    by.event = 0;
  }
  return true;
}

ForeignUses::Freed ForeignUses::next(bool begin) noexcept {
  if (begin) busy_.clear();
  if (paused_ != 0) return {};
  Use* before = nullptr;
  for (Use* use = first_; use != nullptr; before = use, use = use->next) {
    if (!through(*use) && MEMPOOL_GUARDED("record_stream")) {
      if (busy_.size() == awaited_) break;  // all following buffers are busy too
      continue;
    }
    (before == nullptr ? first_ : before->next) = use->next;
    if (last_ == use) last_ = before;
    const Freed freed{use->address, use->stream};
    for (const By& by : use->by) {
      LiveEvents::forget(device_, by.event);
      forget(by.stream);
    }
    uses_.erase(freed.address);
    --waiting_;
    return freed;
  }
  return {};
}

void ForeignUses::synchronized() noexcept {
  for (Use* use = first_; use != nullptr; use = use->next) {
    for (By& by : use->by) {
      LiveEvents::forget(device_, by.event);
      by.event = 0;
    }
    use->recorded = true;
  }
}

void ForeignUses::resume() noexcept {
  if (--paused_ != 0) return;
  for (Use* use = first_; use != nullptr; use = use->next) {
    if (!use->recorded) record(*use);
  }
}

}  // namespace mempool
