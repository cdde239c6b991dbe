// How the planner hears that there may be something to plan.
//
// It waits outside the interpreter. To come back in, a thread takes turns with the program's, dozens of times where that
// keeps letting go of the interpreter's lock for a moment, as NumPy does; so whatever would only find that there is nothing
// to do is done out here.
#include <time.h>

#include <algorithm>
#include <utility>

#include "client.hpp"
#include "period.hpp"

namespace mempool {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{250};  // between two looks at what rings no bell
constexpr std::chrono::seconds kIdle{1};
constexpr std::size_t kLeastNews = 16;  // events between two rings, and at least a quarter of what is kept

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
  bell_.ring();
}

// The pool's lock is held.
bool Client::hear() noexcept {
  const bool work = std::exchange(work_, false);
  // Whatever comes of it, the bell rings again; who hears it may say when.
  if (work) check_at_ = ring_.seen() + std::max(kLeastNews, ring_.kept() / 4);
  return work;
}

bool Client::heard() noexcept {
  const Guarded guard(pool_->lock);
  return hear();
}

void Client::wake() noexcept {
  {
    const Guarded guard(pool_->lock);
    woken_ = true;
  }
  bell_.ring();
}

void Client::check_again_after(std::uint64_t events) noexcept {
  const Guarded guard(pool_->lock);
  check_at_ = ring_.seen() + events;
}

std::optional<Client::Recurs> Client::look() {
  std::vector<std::uint32_t> sequences;  // of the allocations: a part of what is kept of them
  std::vector<std::uint64_t> sizes;
  const std::size_t kept = events_kept();
  sequences.reserve(kept);  // here, where no request waits for it
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
    if (marks) return Recurs{0, sizes.size()};
  }
  std::int64_t begin = traces::iterations_begin(sequences.data(), sizes.data(), sizes.size(), traces::kIterations);
  if (begin < 0) begin = traces::iterations_begin_but_rare(sequences.data(), sizes.data(), sizes.size());
  if (begin >= 0) return Recurs{static_cast<std::size_t>(begin), sizes.size()};
  return std::nullopt;
}

// Whether there is more to the bell than a look in vain. The pool's lock is not held.
bool Client::is_news(const Wait& wait, double looked, std::uint64_t dropped) noexcept {
  {
    const Guarded guard(pool_->lock);
    if (!ring_.on()) return false;  // an iteration went wrong: is_due() tells when that is enough
    if (looked >= wait.looks || settled() || (replaying_ && misses() == misses_looked_at_)) return true;
  }
  try {
    if (look()) return true;
  } catch (...) {  // whoever hears it finds out
    return true;
  }
  const Guarded guard(pool_->lock);
  return ring_.dropped() != dropped;
}

bool Client::is_due(const Wait& wait) noexcept {
  const Guarded guard(pool_->lock);
  if (std::exchange(refusals_heard_, refusals_) != refusals_) return true;
  if (large_allocations() >= wait.allocations) return true;
  if (wait.others_layouts != ~std::uint64_t{0} && wait.others_layouts != pool_->layouts() - layouts_) return true;
  if (!ring_.on() && (misses() >= wait.misses || (replaying_ && spoilt_ >= wait.spoilt))) return true;
  try {
    return iterations_ >= wait.around && !lasting_blockers().empty();
  } catch (...) {
    return true;
  }
}

Client::Heard Client::wait_for_work(const Wait& wait) noexcept {
  const auto patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait.seconds));
  Clock::time_point now = Clock::now();
  const Clock::time_point deadline = now + patience;
  double looked = 0;
  std::uint64_t dropped = 0;
  for (bool waited = false;; waited = true) {
    const std::uint32_t rings = bell_.rings();
    bool work = false, rest = false;
    {
      const Guarded guard(pool_->lock);
      if (std::exchange(woken_, false)) return {false, looked};
      work = hear();
      if (!waited) dropped = ring_.dropped();
      rest = now - rested_ >= kIdle;
      if (rest) rested_ = now;
      if (now - pool_->idle_returned >= kIdle) {
        pool_->idle_returned = now;
        pool_->return_idle();
      }
    }
    if (rest) rest_unused();
    if (work) {
      const double before = processor_seconds();
      const bool news = is_news(wait, looked, dropped);
      looked += processor_seconds() - before;
      if (news) return {true, looked};
    }
    if (waited && is_due(wait)) return {false, looked};
    now = Clock::now();
    if (now >= deadline) return {false, looked};
    bell_.wait(rings, std::min<Clock::duration>(deadline - now, kTick));
    now = Clock::now();
  }
}

}  // namespace mempool
