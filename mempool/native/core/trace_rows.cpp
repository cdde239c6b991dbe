#include "core/trace_rows.hpp"

#include <cstring>
#include <type_traits>
#include <utility>

#include "event_types.hpp"

namespace mempool {

namespace {

using Kind = RecordedEvent::Kind;

template <class Event>
Event nth(const void* packed, std::size_t i) {
  Event event;
  std::memcpy(&event, static_cast<const char*>(packed) + i * sizeof event, sizeof event);
  return event;
}

template <class Event>
void reserve(TraceRows& rows, std::size_t count) {
  rows.kind.reserve(count), rows.thread.reserve(count), rows.operation.reserve(count);
  for (auto* column : {&rows.buffer, &rows.size, &rows.stream}) column->reserve(count);
  if constexpr (std::is_same_v<Event, RecordedEvent>) rows.time_ns.reserve(count), rows.address.reserve(count);
}

template <class Event>
void add(TraceRows& rows, const RecordedEvent& event, std::int64_t buffer) {
  std::uint8_t kind = traces::kMark;
  std::int32_t mark = -1;
  switch (event.kind) {
    case Kind::alloc: kind = traces::kAlloc; break;
    case Kind::free:
    case Kind::handover: kind = traces::kFree; break;
    case Kind::use: kind = traces::kRead; break;
    case Kind::refused: kind = traces::kRefused; break;
    case Kind::found: mark = TraceRows::kFound; break;
    default: mark = static_cast<std::int32_t>(event.kind - Kind::step);
  }
  const bool alloc = kind == traces::kAlloc, refused = kind == traces::kRefused;
  if (kind != traces::kMark && !refused && buffer < 0) return;
  rows.kind.push_back(kind);
  rows.buffer.push_back(buffer);
  rows.size.push_back(alloc || refused ? static_cast<std::int64_t>(event.size) : 0);
  rows.stream.push_back(event.stream);
  if constexpr (std::is_same_v<Event, RecordedEvent>) {
    rows.time_ns.push_back(static_cast<std::int64_t>(event.time_ns));
    rows.address.push_back(alloc ? static_cast<std::int64_t>(event.address) : -1);
  }
  rows.thread.push_back(static_cast<std::int32_t>(event.sequence));
  rows.operation.push_back(mark);
}

}  // namespace

TraceRows TraceNames::rows(const void* packed, std::size_t count) {
  return all<RecordedEvent>(count, [&](std::size_t i) { return nth<RecordedEvent>(packed, i); });
}

TraceRows TraceNames::rows(const void* packed, std::size_t count, const std::vector<Stream>& streams) {
  return all<BriefEvent>(count, [&](std::size_t i) {
    const auto [address, size, sequence, kind] = nth<BriefEvent>(packed, i);
    const Stream stream = kind < Kind::use ? streams.at(sequence) : kind == Kind::use ? static_cast<Stream>(size) : 0;
    return RecordedEvent{i, address, size, 0, stream, sequence, kind};
  });
}

template <class Event, class Get>
TraceRows TraceNames::all(std::size_t count, Get get) {
  TraceRows result;
  reserve<Event>(result, count);
  for (std::size_t i = 0; i < count; ++i) {
    RecordedEvent event = get(i);
    const std::int64_t buffer = id_of(event);
    if (event.kind == Kind::handover && i + 1 < count) {
      if (RecordedEvent next = get(i + 1); next.kind == Kind::alloc) {
        std::swap(event.time_ns, next.time_ns);
        add<Event>(result, next, id_of(next));
        ++i;
      }
    }
    add<Event>(result, event, buffer);
  }
  return result;
}

std::int64_t TraceNames::id_of(const RecordedEvent& event) {
  if (event.kind == Kind::alloc) return alive_[event.address] = next_++;
  if (event.kind > Kind::use) return -1;
  const auto found = alive_.find(event.address);
  if (found == alive_.end()) return -1;
  const std::int64_t buffer = found->second;
  if (event.kind != Kind::use) alive_.erase(found);
  return buffer;
}

}  // namespace mempool
