// Wake-up of the planner when there may be something to plan.
//
// The planner waits outside the interpreter. To enter the interpreter, a thread takes turns with the
// program's threads, dozens of times if the program keeps releasing the interpreter's lock for a moment, as
// NumPy does. Checks that would only find nothing to do therefore run here.
#include <time.h>

#include <algorithm>
#include <utility>

#include "core/client.hpp"
#include "period.hpp"

namespace mempool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{250};  // interval between checks of conditions that ring no bell
constexpr std::chrono::seconds kIdle{1};
// smallest number of events between two rings; at least a quarter of the kept events
constexpr std::size_t kLeastNews = 16;

double processor_seconds() noexcept {
  timespec spent;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
}

}  // namespace

void Client::signal_work() noexcept {
  check_at_ = ~std::uint64_t{0};
  if (work_) return;
  work_ = true;
  wake_signal_.ring();
}

// Call with the pool's lock held.
bool Client::take_signal() noexcept {
  const bool work = std::exchange(work_, false);
  // Schedule the next ring whatever the outcome; the listener may choose another time.
  if (work) check_at_ = ring_.seen() + std::max(kLeastNews, ring_.kept() / 4);
  return work;
}

bool Client::take_work_signal() noexcept {
  const Guarded guard(pool_->lock);
  return take_signal();
}

void Client::wake() noexcept {
  {
    const Guarded guard(pool_->lock);
    woken_ = true;
  }
  wake_signal_.ring();
}

void Client::check_again_after(std::uint64_t events) noexcept {
  const Guarded guard(pool_->lock);
  check_at_ = ring_.seen() + events;
}

std::optional<Client::Recurrence> Client::find_recurrence() {
  std::vector<std::uint32_t> sequences;  // of the allocations, which are part of the kept events
  std::vector<std::uint64_t> sizes;
  const std::size_t kept = events_kept();
  sequences.reserve(kept);  // allocated here, where no request waits
  sizes.reserve(kept);
  {
    const Guarded guard(pool_->lock);
    misses_looked_at_ = misses();
    bool marks = false;
    ring_.each([&](const BriefEvent& event) {
      marks = marks || event.kind >= RecordedEvent::step;
      if (event.kind != RecordedEvent::alloc) return;
      sequences.push_back(event.sequence);
      sizes.push_back(event.size);
    });
    if (marks) return Recurrence{0, sizes.size()};
  }
  std::int64_t begin = traces::iterations_start(sequences.data(), sizes.data(), sizes.size(), traces::kIterations);
  if (begin < 0) begin = traces::iterations_start_without_rare_sizes(sequences.data(), sizes.data(), sizes.size());
  if (begin >= 0) return Recurrence{static_cast<std::size_t>(begin), sizes.size()};
  return std::nullopt;
}

// Return true if the ring deserves more than an unsuccessful look. Call without the pool's lock.
bool Client::is_news(const Wait& wait, double search_seconds, std::uint64_t dropped) noexcept {
  {
    const Guarded guard(pool_->lock);
    if (!ring_.on()) return false;  // after misses, is_due() decides
    if (search_seconds >= wait.search_seconds || settled() || (replaying_ && misses() == misses_looked_at_)) return true;
  }
  try {
    if (find_recurrence()) return true;
  } catch (...) {  // the listener finds the cause
    return true;
  }
  const Guarded guard(pool_->lock);
  return ring_.dropped() != dropped;
}

bool Client::is_due(const Wait& wait) noexcept {
  const Guarded guard(pool_->lock);
  if (std::exchange(refusals_heard_, refusals_) != refusals_) return true;
  if (large_allocations() >= wait.allocations) return true;
  if (wait.other_layouts != ~std::uint64_t{0} && wait.other_layouts != pool_->layouts() - layouts_) return true;
  if (recording_due()) return true;
  try {
    return iterations_ >= wait.replan_at_iteration && !lasting_pinned().empty();
  } catch (...) {
    return true;
  }
}

Client::WaitResult Client::wait_for_work(const Wait& wait) noexcept {
  const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait.seconds));
  Clock::time_point now = Clock::now();
  const Clock::time_point deadline = now + patience;
  double search_seconds = 0;
  std::uint64_t dropped = 0;
  for (bool waited = false;; waited = true) {
    const std::uint32_t rings = wake_signal_.rings();
    bool woken = false, work = false, rest = false;
    {
      const Guarded guard(pool_->lock);
      woken = std::exchange(woken_, false);
      work = take_signal();
      if (!waited) dropped = ring_.dropped();
      rest = now - unused_checked_ >= kIdle;
      if (rest) unused_checked_ = now;
      if (now - pool_->idle_returned >= kIdle) {
        pool_->idle_returned = now;
        flight::note(flight::return_idle, uid_, 0);
        pool_->return_idle();
      }
    }
    if (rest) retire_unused_patterns();
    if (work) {
      const double before = processor_seconds();
      const bool news = is_news(wait, search_seconds, dropped);
      search_seconds += processor_seconds() - before;
      if (news) return {true, search_seconds};
    }
    if (woken || (waited && is_due(wait))) return {false, search_seconds};
    now = Clock::now();
    if (now >= deadline) return {false, search_seconds};
    wake_signal_.wait(rings, std::min<Clock::duration>(deadline - now, kTick));
    now = Clock::now();
  }
}

}  // namespace mempool
