#include "world/async_device.hpp"

#include <iterator>
#include <utility>

#include "world/host_memory.hpp"
#include "world/report.hpp"

namespace world {

Device::~Device() {
  if (!reservations_.empty()) fail("memory is left", "%zu reservations outlive the pool", reservations_.size());
  if (events_alive_ != 0) fail("events are left", "%zu events outlive the pool", events_alive_);
}

mempool::DeviceTraits Device::traits() const noexcept {
  return {options_.alignment, options_.page,         options_.shared_segment, options_.large,
          options_.fresh_is_zero, options_.slow_return,  0,                       options_.prefetches};
}

// --- memory

bool Device::refuse(std::size_t bytes) noexcept {
  const bool failing = calls_left_ == 0;
  if (calls_left_ != 0 && calls_left_ != ~std::uint64_t{0}) --calls_left_;
  if (!failing && bytes <= options_.capacity && committed_ <= options_.capacity - bytes) return false;
  ++refusals_;
  return true;
}

// The lowest with room: addresses that were given back are used again, as devices do.
Address Device::place(std::size_t bytes, std::size_t step) const {
  Address address = kBase;
  for (const auto& [begin, reservation] : reservations_) {
    if (begin >= address && begin - address >= bytes) break;
    address = std::max(address, (begin + reservation.bytes + step - 1) / step * step);
  }
  return address;
}

Address Device::reserve(std::size_t bytes, std::size_t alignment) noexcept {
  const Where where(false);
  point();
  if (options_.page == 0 && refuse(bytes)) return 0;
  const Address address = place(bytes, std::max({alignment, options_.alignment, options_.page, std::size_t{4096}}));
  reservations_[address] = {bytes, std::vector<bool>(options_.page == 0 ? 0 : (bytes + options_.page - 1) / options_.page)};
  if (options_.page == 0) {
    committed_ += bytes;
    if (options_.fresh_is_zero) put_stamp(address, address + bytes, 0);
  }
  return address;
}

std::map<Address, Device::Reservation>::iterator Device::find(Address address, std::size_t bytes, const char* what) {
  auto found = reservations_.upper_bound(address);
  if (found != reservations_.begin()) {
    --found;
    if (address + bytes <= found->first + found->second.bytes) return found;
  }
  fail("the pool asks the device for something wrong", "%s of %zu bytes at %#zx, which is in no reservation", what, bytes, address);
}

void Device::set_pages(Address address, std::size_t bytes, bool on, const char* wrong) {
  const auto found = find(address, bytes, wrong);
  const std::size_t page = options_.page;
  if ((address - found->first) % page != 0 || bytes % page != 0) {
    fail("the pool asks the device for something wrong", "%s: a part of a page, %zu bytes at %#zx", wrong, bytes, address);
  }
  for (std::size_t i = (address - found->first) / page; i < (address - found->first + bytes) / page; ++i) {
    if (found->second.pages[i] == on) {
      fail("the pool asks the device for something wrong", "%s: page %zu at %#zx is so already", wrong, i, found->first);
    }
    found->second.pages[i] = on;
  }
  committed_ = on ? committed_ + bytes : committed_ - bytes;
}

bool Device::commit(Address address, std::size_t bytes) noexcept {
  const Where where(false);
  point();
  if (refuse(bytes)) return false;
  set_pages(address, bytes, true, "commit");
  if (options_.fresh_is_zero) put_stamp(address, address + bytes, 0);
  return true;
}

void Device::decommit(Address address, std::size_t bytes) noexcept {
  const Where where(false);
  point();
  goes_back(address, bytes, "pages go back");
  set_pages(address, bytes, false, "decommit");
}

void Device::release(Address address, std::size_t bytes) noexcept {
  const Where where(false);
  point();
  const auto found = find(address, bytes, "release");
  if (found->first != address || found->second.bytes != bytes) {
    fail("the pool asks the device for something wrong", "release of a part of a reservation, %zu bytes at %#zx", bytes, address);
  }
  std::size_t committed = options_.page == 0 ? bytes : 0;
  for (const bool on : found->second.pages) committed += on ? options_.page : 0;
  if (committed != 0) goes_back(address, bytes, "a reservation goes back");  // else it is mere address space
  committed_ -= committed;
  reservations_.erase(found);
}

Address Device::resize(Address address, std::size_t from, std::size_t to) noexcept {
  const Where where(false);
  point();
  if (options_.page == 0 || (to > from && refuse(to - from))) return 0;
  const auto found = find(address, from, "resize");
  if (found->first != address || found->second.bytes != from || !is_committed(address, from)) {
    fail("the pool asks the device for something wrong", "resize of what is no whole reservation, %zu bytes at %#zx", from, address);
  }
  spoils_capture("resize");
  for (auto former = formers_.lower_bound(address); former != formers_.end() && former->first < address + from; ++former) {
    const std::size_t stream = former->second.uses.beyond(host_, host_);
    if (stream != kStreams) fail("memory in use goes back", "a reservation is mapped anew, of which buffer #%zu's work on stream %zu may use a part", former->second.number, stream);
  }
  const Address moved = to > from ? place(to, std::max(options_.alignment, options_.page)) : address;
  reservations_.erase(found);
  reservations_[moved] = {to, std::vector<bool>(to / options_.page, true)};
  committed_ = committed_ - from + to;
  move_stamps(moved, address, std::min(from, to));
  drop_stamps(address + (moved == address ? to : 0), address + from);
  if (options_.fresh_is_zero && to > from) put_stamp(moved + from, moved + to, 0);
  formers_.erase(formers_.lower_bound(address), formers_.lower_bound(address + from));
  return moved;
}

bool Device::is_committed(Address address, std::size_t bytes) const {
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin()) return false;
  --found;
  if (address + bytes > found->first + found->second.bytes) return false;
  if (options_.page == 0) return true;
  for (std::size_t i = (address - found->first) / options_.page; i * options_.page < address - found->first + bytes; ++i) {
    if (!found->second.pages[i]) return false;
  }
  return true;
}

void Device::spoils_capture(const char* how) const {
  if (capturing_ != 0) fail("a capture is broken", "%s while graph %zu is captured", how, capturing_);
}

// The device may give these bytes to anybody, so nothing queued may touch them, nor anything alive lie there.
void Device::goes_back(Address address, std::size_t bytes, const char* how) {
  const Address end = address + bytes;
  spoils_capture(how);
  auto live = live_.lower_bound(address);
  if (live != live_.begin() && std::prev(live)->second->end() > address) --live;
  if (live != live_.end() && live->first < end) {
    fail("a live buffer's memory goes back", "%s under buffer #%zu", how, live->second->number);
  }
  auto former = formers_.lower_bound(address);
  if (former != formers_.begin() && std::prev(former)->second.end > address) --former;
  for (; former != formers_.end() && former->first < end; ++former) {
    const std::size_t stream = former->second.uses.beyond(host_, host_);
    if (stream != kStreams) {
      fail("memory in use goes back", "%s of which buffer #%zu's work on stream %zu may use a part", how, former->second.number, stream);
    }
  }
  for (const auto& [number, graph] : graphs_) {
    if (graph.ended) continue;
    auto used = graph.memory.lower_bound(address);
    if (used != graph.memory.begin() && std::prev(used)->second > address) --used;
    if (used != graph.memory.end() && used->first < end) fail("a graph's memory goes back", "%s, which graph %zu uses at its replays", how, number);
  }
  // What has gone back has no past: a later owner of the addresses is told by the reservation that is new.
  for (former = formers_.lower_bound(address); former != formers_.end() && former->second.end <= end;) former = formers_.erase(former);
  drop_stamps(address, end);
}

// --- streams

std::uint64_t Device::queue(Stream stream, Work work) {
  Queue& queue = queues_[index(stream)];
  queue.works.push_back(work);
  ++works_;
  return ++queue.queued;
}

void Device::copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept {
  const Where where(false);
  point();
  if (bytes == 0) return;
  const auto moving = moving_.find(from);
  if (moving == moving_.end() || bytes > moving->second->bytes) {
    fail("the pool asks the device for something wrong", "a copy of %zu bytes from %#zx, where nothing is being moved", bytes, from);
  }
  check_formers(to, to + bytes, stream, 0, false);
  const std::uint64_t tick = ++ticks_[index(stream)];
  known_[index(stream)].at[index(stream)] = tick;
  formers_[from].uses.at[index(stream)] = tick;
  queue(stream, {Work::copy, to, to + bytes, 0, moving->second->number, from});
  WORLD_TELL("    the pool copies %zu bytes from %#zx to %#zx on stream %zu", bytes, from, to, index(stream));
}

void Device::zero(Address address, std::size_t bytes, Stream stream) noexcept {
  const Where where(false);
  point();
  check_formers(address, address + bytes, stream, 0, false);
  const std::uint64_t tick = ++ticks_[index(stream)];
  known_[index(stream)].at[index(stream)] = tick;
  queue(stream, {Work::write, address, address + bytes, 0, 0, 0});
}

Event Device::record(Stream stream) noexcept {
  const Where where(false);
  point();
  if (stream == captured_) fail("a capture is broken", "an event is recorded on stream %zu, which is captured", index(stream));
  if (free_events_.empty()) {
    free_events_.push_back(events_.size());
    events_.emplace_back();
  }
  const std::size_t slot = free_events_.back();
  free_events_.pop_back();
  Clock clock = known_[index(stream)];
  clock.join(host_);
  clock.at[index(stream)] = ticks_[index(stream)];
  events_[slot] = {clock, index(stream), queue(stream, {Work::mark}), true};
  ++events_alive_;
  WORLD_TELL("    event %zu is recorded on stream %zu", slot + 1, index(stream));
  return slot + 1;
}

Device::Mark& Device::mark(Event event, const char* what) {
  if (event == 0 || event > events_.size() || !events_[event - 1].alive) {
    fail("the pool asks the device for something wrong", "%s of event %zu, which does not exist", what, static_cast<std::size_t>(event));
  }
  return events_[event - 1];
}

// Of memory that is there: the driver refuses anything else.
void Device::prefetch(Address address, std::size_t bytes) noexcept {
  const Where where(false);
  point();
  find(address, bytes, "prefetch");
  if (!is_committed(address, bytes)) {
    fail("the pool asks the device for something wrong", "prefetch of %zu bytes at %#zx, which are not there", bytes, address);
  }
}

bool Device::query(Event event) noexcept {
  const Where where(false);
  point();
  const Mark& asked = mark(event, "query");
  spoils_capture("an event is asked for");
  if (queues_[asked.stream].done < asked.position) return false;
  host_.join(asked.clock);
  return true;
}

bool Device::wait(Stream stream, Event event) noexcept {
  const bool fails = event_waits_failing_ != 0 && host_memory.inside[current];
  const Where where(false);
  point();
  const Mark& first = mark(event, "wait");
  if (fails) {
    --event_waits_failing_;
    WORLD_TELL("    stream %zu cannot wait for event %zu", index(stream), static_cast<std::size_t>(event));
    return false;
  }
  if (stream == captured_) fail("a capture is broken", "stream %zu, which is captured, is made to wait", index(stream));
  known_[index(stream)].join(first.clock);
  queue(stream, {Work::wait, 0, 0, first.position, first.stream, 0});
  WORLD_TELL("    stream %zu waits for event %zu, of stream %zu", index(stream), static_cast<std::size_t>(event), first.stream);
  return true;
}

void Device::forget(Event event) noexcept {
  const Where where(false);
  mark(event, "forget").alive = false;
  free_events_.push_back(event - 1);
  --events_alive_;
}

bool Device::synchronize() noexcept {
  const Where where(false);
  point();
  spoils_capture("the device is waited for");
  if (waits_failing_ != 0) {
    --waits_failing_;
    return false;
  }
  finish();
  WORLD_TELL("    the device is waited for");
  return true;
}

void Device::finish() noexcept {
  for (bool again = true; again;) {
    again = false;
    for (Queue& queue : queues_) {
      while (step(queue)) again = true;
    }
  }
  for (std::size_t i = 0; i < kStreams; ++i) {
    if (!queues_[i].works.empty()) fail("the world is wrong", "stream %zu never comes to its end", i);
    host_.at[i] = ticks_[i];
  }
}

void Device::run(Choices& choices, std::size_t works) noexcept {
  std::size_t stream = choices.below(kStreams);
  for (std::size_t i = 0, failures = 0; i < works && failures < kStreams; ++i) {
    if (step(queues_[stream])) {
      failures = 0;
    } else {
      ++failures;
      stream = (stream + 1) % kStreams;
    }
  }
}

bool Device::step(Queue& queue) {
  if (queue.works.empty()) return false;
  const Work work = queue.works.front();
  if (work.kind == Work::wait && queues_[work.number].done < work.stamp) return false;
  queue.works.pop_front();
  execute(work);
  ++queue.done;
  ++works_;
  return true;
}

// --- stamps

void Device::execute(const Work& work) {
  switch (work.kind) {
    case Work::mark: case Work::wait: return;
    case Work::write: return put_stamp(work.begin, work.end, work.stamp);
    case Work::copy: return move_stamps(work.begin, work.from, work.end - work.begin);
    case Work::read: return check_stamp(work);
    case Work::graph:
      for (const Work& one : graphs_.at(work.stamp).works) execute(one);
  }
}

void Device::drop_stamps(Address begin, Address end) {
  if (begin >= end) return;
  auto at = stamps_.lower_bound(begin);
  if (at != stamps_.begin() && std::prev(at)->second.end > begin) {
    const Stamp cut = std::prev(at)->second;
    std::prev(at)->second.end = begin;
    if (cut.end > end) stamps_.emplace(end, cut);
  }
  while (at != stamps_.end() && at->first < end) {
    const Stamp cut = at->second;
    at = stamps_.erase(at);
    if (cut.end > end) at = stamps_.emplace(end, cut).first;
  }
}

void Device::put_stamp(Address begin, Address end, std::uint64_t stamp) {
  const auto same = stamps_.find(begin);
  if (same != stamps_.end() && same->second.end == end) {
    same->second.stamp = stamp;
    return;
  }
  drop_stamps(begin, end);
  if (begin < end) stamps_[begin] = {end, stamp};
}

void Device::move_stamps(Address to, Address from, std::size_t bytes) {
  if (to == from) return;
  std::vector<std::pair<Address, Stamp>> moved;
  auto at = stamps_.upper_bound(from);
  if (at != stamps_.begin()) --at;
  for (; at != stamps_.end() && at->first < from + bytes; ++at) {
    const Address begin = std::max(at->first, from), end = std::min(at->second.end, from + bytes);
    if (begin < end) moved.push_back({begin, {end, at->second.stamp}});
  }
  drop_stamps(to, to + bytes);
  for (const auto& [begin, stamp] : moved) stamps_[begin - from + to] = {stamp.end - from + to, stamp.stamp};
}

void Device::check_stamp(const Work& work) const {
  auto at = stamps_.upper_bound(work.begin);
  if (at != stamps_.begin()) --at;
  Address reached = work.begin;
  for (; at != stamps_.end() && at->first <= reached && reached < work.end; ++at) {
    if (at->second.end <= reached) continue;
    if (at->second.stamp != work.stamp) {
      fail("work reads what another buffer's work wrote", "buffer #%zu at %#zx has stamp %zu at %#zx, and not its own, %zu",
           work.number, work.begin, at->second.stamp, reached, work.stamp);
    }
    reached = at->second.end;
  }
  if (reached < work.end) {
    fail("work reads what nobody wrote", "buffer #%zu at %#zx, of stamp %zu, has lost its contents at %#zx", work.number, work.begin, work.stamp, reached);
  }
}

// --- the program's side

void Device::check_formers(Address begin, Address end, Stream stream, std::uint64_t number, bool take) {
  const Clock& known = known_[index(stream)];
  auto former = formers_.lower_bound(begin);
  if (former != formers_.begin() && std::prev(former)->second.end > begin) --former;
  while (former != formers_.end() && former->first < end) {
    const Former one = former->second;
    const std::size_t busy = one.uses.beyond(known, host_);
    if (busy != kStreams && busy != index(stream)) {
      fail("memory that another stream may still use",
           "buffer #%zu on stream %zu is given memory at %#zx that buffer #%zu, of stream %zu, was in; its work on stream %zu is "
           "not over when stream %zu goes on: no event of stream %zu was waited for",
           number, index(stream), std::max(begin, former->first), one.number, index(one.stream), busy, index(stream), busy);
    }
    if (!take) {
      ++former;
      continue;
    }
    const Address from = former->first;
    former = formers_.erase(former);
    if (from < begin) formers_.emplace(from, Former{begin, one.number, one.stream, one.uses});
    if (one.end > end) former = formers_.emplace(end, one).first;
  }
}

void Device::begin(Buffer& buffer) {
  buffer.number = ++begun_;
  if (buffer.address % options_.alignment != 0) fail("misaligned", "buffer #%zu is at %#zx", buffer.number, buffer.address);
  const auto after = live_.lower_bound(buffer.address);
  const Buffer* other = after != live_.end() && after->first < buffer.end() ? after->second : nullptr;
  if (after != live_.begin() && std::prev(after)->second->end() > buffer.address) other = std::prev(after)->second;
  if (other != nullptr) {
    fail("two live buffers overlap", "#%zu, %zu bytes at %#zx, and #%zu, %zu bytes at %#zx", buffer.number, buffer.bytes,
         buffer.address, other->number, other->bytes, other->address);
  }
  if (!is_committed(buffer.address, buffer.bytes)) {
    fail("memory that the device has not committed", "buffer #%zu, %zu bytes at %#zx", buffer.number, buffer.bytes, buffer.address);
  }
  for (auto& [number, graph] : graphs_) {
    if (graph.ended || number == buffer.graph) continue;
    auto used = graph.memory.lower_bound(buffer.address);
    if (used != graph.memory.begin() && std::prev(used)->second > buffer.address) --used;
    if (used != graph.memory.end() && used->first < buffer.end()) {
      fail("a graph's memory is given to somebody else", "buffer #%zu gets %#zx, which graph %zu uses at its replays", buffer.number, buffer.address, number);
    }
  }
  check_formers(buffer.address, buffer.end(), buffer.stream, buffer.number, true);
  live_[buffer.address] = &buffer;
  if (buffer.stamped != 0) {  // by the pool, on its own stream
    const std::size_t s = index(buffer.stream);
    buffer.uses.at[s] = buffer.writes.at[s] = ticks_[s];
  }
  if (buffer.graph == 0) return;
  std::map<Address, Address>& memory = graphs_[buffer.graph].memory;
  Address begin = buffer.address, end = buffer.end();
  auto at = memory.upper_bound(begin);
  if (at != memory.begin() && std::prev(at)->second >= begin) --at;
  while (at != memory.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = memory.erase(at);
  }
  memory[begin] = end;
}

void Device::end(Buffer& buffer, bool moving) {
  live_.erase(buffer.address);
  if (moving) moving_[buffer.address] = &buffer;
  formers_[buffer.address] = {buffer.end(), buffer.number, buffer.stream, buffer.uses};
}

void Device::stays(Buffer& buffer) {
  moving_.erase(buffer.address);
  formers_.erase(buffer.address);
  live_[buffer.address] = &buffer;
}

void Device::write(Buffer& buffer, Stream stream) {
  const std::size_t s = index(stream);
  buffer.stamp = ++stamp_;
  buffer.stamped = buffer.bytes;
  const Work work{Work::write, buffer.address, buffer.end(), buffer.stamp, buffer.number, 0};
  if (stream == captured_) {
    graphs_[capturing_].works.push_back(work);
    return;
  }
  if (buffer.uses.beyond(known_[s], host_) != kStreams && buffer.uses.beyond(known_[s], host_) != s) {
    fail("the world is wrong", "its program writes buffer #%zu without having waited", buffer.number);
  }
  buffer.uses.at[s] = buffer.writes.at[s] = known_[s].at[s] = ++ticks_[s];
  queue(stream, work);
}

void Device::read(Buffer& buffer, Stream stream) {
  const std::size_t s = index(stream);
  if (buffer.stamped == 0) return;
  const Work work{Work::read, buffer.address, buffer.address + buffer.stamped, buffer.stamp, buffer.number, 0};
  if (stream == captured_) {
    graphs_[capturing_].works.push_back(work);
    return;
  }
  const std::size_t unknown = buffer.writes.beyond(known_[s], host_);
  if (unknown != kStreams && unknown != s) {
    fail("the world is wrong", "its program reads buffer #%zu without having waited", buffer.number);
  }
  buffer.uses.at[s] = known_[s].at[s] = ++ticks_[s];
  queue(stream, work);
}

// --- graphs

void Device::begin_capture(std::uint64_t graph, Stream stream) {
  captured_ = stream;
  capturing_ = graph;
  graphs_[graph];
}

void Device::replay(std::uint64_t graph, Stream stream) {
  const std::size_t s = index(stream);
  Graph& one = graphs_.at(graph);
  one.uses.at[s] = known_[s].at[s] = ++ticks_[s];
  queue(stream, {Work::graph, 0, 0, graph, 0, 0});
}

void Device::end_graph(std::uint64_t graph) {
  Graph& one = graphs_.at(graph);
  one.ended = true;
  for (const auto& [begin, end] : one.memory) {
    for (auto at = formers_.lower_bound(begin); at != formers_.end() && at->first < end; ++at) at->second.uses.join(one.uses);
    for (auto at = live_.lower_bound(begin); at != live_.end() && at->first < end; ++at) at->second->uses.join(one.uses);
  }
}

}  // namespace world
