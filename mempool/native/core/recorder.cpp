#include "core/recorder.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace mempool {
namespace {

constexpr std::size_t kEvent = sizeof(RecordedEvent);

// Call `some(done)` until all bytes are transferred; false: an error, or the file's end.
template <class Some>
bool all_of(std::size_t bytes, Some some) noexcept {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = some(done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

void TraceBuffer::set_on(bool on, const std::string& folder, std::size_t piece) {
  if (on && !on_) folder_ = folder, piece_ = std::max<std::size_t>(1, piece);
  on_ = on;
  if (!on && taken_ == written_ && !reading_) close_file();
}

void TraceBuffer::leave() noexcept {
  on_ = false;
  events_.clear();
  forget_file();
}

void TraceBuffer::close_file() noexcept {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
  written_ = taken_ = 0;
}

void TraceBuffer::forget_file() noexcept {
  close_file();
  folder_.clear();
}

bool TraceBuffer::open() noexcept {
  if (file_ >= 0) return true;
#ifdef O_TMPFILE
  file_ = ::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
#endif
  if (file_ < 0) {  // for file systems without unnamed files
    try {
      std::string name = folder_ + "/.mempool-XXXXXX";
      file_ = ::mkostemp(name.data(), O_CLOEXEC);
      if (file_ >= 0) ::unlink(name.c_str());
    } catch (...) {
    }
  }
  return file_ >= 0;
}

void TraceBuffer::spill() noexcept {
  if (!open()) {
    folder_.clear();  // keep events in memory from now on
    return;
  }
  if (taken_ == written_ && !reading_) taken_ = written_ = 0;  // start again at the beginning of the file
  const std::vector<RecordedEvent> events = events_.take();
  const char* const bytes = reinterpret_cast<const char*>(events.data());
  const std::size_t at = written_ * kEvent;
  const bool kept = all_of(events.size() * kEvent, [&](std::size_t done) {
    return ::pwrite(file_, bytes + done, events.size() * kEvent - done, static_cast<off_t>(at + done));
  });
  if (kept) {
    written_ += events.size();
  } else {
    lost_ += events.size();
  }
}

TraceBuffer::Taken TraceBuffer::take() noexcept {
  Taken taken;
  if (taken_ == written_) {
    taken.events = events_.take();
    return taken;
  }
  taken.at = taken_ * kEvent;
  taken.in_file = std::min(piece_, written_ - taken_);
  taken_ += taken.in_file;
  reading_ = true;
  return taken;
}

void TraceBuffer::read(Taken& taken) {
  taken.events.resize(taken.in_file);  // if this throws, the events are lost
  char* const bytes = reinterpret_cast<char*>(taken.events.data());
  const bool read = all_of(taken.in_file * kEvent, [&](std::size_t done) {
    return ::pread(file_, bytes + done, taken.in_file * kEvent - done, static_cast<off_t>(taken.at + done));
  });
  if (!read) taken.events.clear();
}

// Count unread events as lost, and return the disk space of a fully read file.
void TraceBuffer::has_read(const Taken& taken) noexcept {
  reading_ = false;
  lost_ += taken.in_file - taken.events.size();
  if (taken_ != written_) return;
  if (!on_) return close_file();
  if (::ftruncate(file_, 0) == 0) written_ = taken_ = 0;
}

}  // namespace mempool
