// Recording of the events of a client's buffers.
#include <algorithm>
#include <utility>

#include "core/client.hpp"
#include "core/pool_state.hpp"

namespace mempool {
namespace {

// a growing recording may take 1/kShareOfMemory of the pool's peak reserved memory
constexpr std::size_t kShareOfMemory = 16;
// and at most this many events, because host memory may be separate from the pool's memory
constexpr std::size_t kMostEvents = std::size_t{1} << 20;

}  // namespace

// Log the decision, and switch the ring to the state machine's state. The lock is held.
void Client::apply(RecordingEvent event) noexcept {
  flight::note(flight::recording, uid_, 0, event);
  if (!recording_.apply(event, counts(), replays())) return;
  const bool on = recording_.state() == RecordingState::recording;
  if (on) decide(Decision::recording);
  else decide(event == RecordingEvent::end ? Decision::stopped : Decision::paused, 0, static_cast<std::uint64_t>(event));
  if (on) {
    interrupted_ = interrupted_ || large_allocations() != 0;
    check_at_ = ring_.seen() + 64;
  }
  ring_.clear();
  ring_.set_on(on);
}

void Client::advance_recording(RecordingEvent event) noexcept {
  const Guarded guard(pool_->lock);
  apply(event);
}

bool Client::resume_recording() noexcept {
  const Guarded guard(pool_->lock);
  if (!recording_due()) return false;
  apply(RecordingEvent::resume);
  return true;
}

bool Client::grow_recording() {
  std::size_t capacity = 0;
  {
    const Guarded guard(pool_->lock);
    capacity = 2 * ring_.capacity();
    // live bytes, if most memory is another allocator's
    const std::size_t held = std::max(pool_->source().reserved().peak, stats_.live.peak);
    const std::size_t most = held / kShareOfMemory / sizeof(BriefEvent);
    if (capacity > std::min(most, kMostEvents) || ring_.kept() < ring_.capacity()) return false;
  }
  std::vector<BriefEvent> room;
  room.reserve(capacity);  // allocated here, where no request waits
  const Guarded guard(pool_->lock);
  if (!ring_.on() || ring_.capacity() >= capacity) return false;
  ring_.grow_into(room);
  return true;
}

void Client::set_tracing(bool on, const std::string& folder, std::size_t piece) {
  const Guarded guard(pool_->lock);
  flight::note(flight::tracing, uid_, 0, on);
  trace_.set_on(on, folder, piece);
  note_small_recorded();
}

Client::Recording Client::recording(std::size_t allocations) {
  Recording recording;
  recording.events.resize(events_kept());  // allocates and touches the pages here, where no request waits
  const Guarded guard(pool_->lock);
  std::size_t first = ring_.kept();
  for (std::size_t left = allocations; first != 0 && left != 0; --first) {
    if (ring_[first - 1].kind == RecordedEvent::alloc) --left;
  }
  if (allocations == ~std::size_t{0}) first = 0;
  ring_.copy_from(first, recording.events);
  recording.whole = first == 0 && ring_.dropped() == 0 && !interrupted_;
  for (const Sequence& sequence : sequences_) {
    recording.streams.push_back(sequence.follower.stream());
    recording.counts.push_back(sequence.follower.count());
  }
  return recording;
}

std::size_t Client::events_kept() noexcept {
  const Guarded guard(pool_->lock);
  return ring_.kept();
}

std::vector<RecordedEvent> Client::take_trace() {
  TraceBuffer::Taken taken;
  {
    const Guarded guard(pool_->lock);
    taken = trace_.take();
  }
  if (taken.in_file == 0) return std::move(taken.events);
  const auto done = [&] {
    const Guarded guard(pool_->lock);
    trace_.has_read(taken);
  };
  try {
    trace_.read(taken);
  } catch (...) {
    done();
    throw;
  }
  done();
  return std::move(taken.events);
}

void Client::set_history(std::size_t events) {
  const Guarded guard(pool_->lock);
  DeviceLog& device = pool_->source().log();
  if (events != 0) {
    // device calls of a pool with several clients go into the last client's history
    device.begin(history_, runs_held(*pool_));
  } else if (device.history() == &history_) {
    device.end();
  }
  if (events != history_.capacity()) history_ = Recorder<RecordedEvent>(events);
  history_.set_on(events != 0);
  note_small_recorded();
}

}  // namespace mempool
