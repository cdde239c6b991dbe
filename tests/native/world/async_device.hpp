// A simulated asynchronous device: memory that is addresses only, and streams that are queues whose work is done later, in
// any order that events allow.
//
// Two observers watch what the core makes of it, and share nothing with the core. Vector clocks tell at once whether memory
// that somebody gets may still be used by work of its former owners, whichever order the work happens to run in. And each
// byte range has a stamp, of the buffer whose work was the last to write there: work that reads something else than its own
// buffer wrote is caught when it runs.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "devices/device.hpp"
#include "world/clock.hpp"
#include "world/fibers.hpp"

namespace mempool {
class Client;
}

namespace world {

using mempool::Address;
using mempool::Event;
using mempool::Stream;

// One buffer of the program: what the core gave, and what was queued on it.
struct Buffer {
  std::uint64_t number = 0;  // by the order of their beginnings, from 1
  Address address = 0;
  std::size_t bytes = 0;
  Stream stream = 0;         // its own
  std::uint64_t stamp = 0;   // what its first `stamped` bytes hold: the stamp of its last write; 0: zeros
  std::size_t stamped = 0;   // bytes
  Clock uses, writes;        // the last of each, by stream
  std::uint64_t graph = 0;   // whose kernels alone touch it; 0: none's
  const mempool::Client* client = nullptr;  // which made it; any may free it
  Address end() const noexcept { return address + bytes; }
};

struct MemoryOptions {
  std::size_t page = 0, alignment = 512, capacity = std::size_t{1} << 40;  // bytes
  std::size_t shared_segment = std::size_t{1} << 20, large = std::size_t{256} << 10;
  bool fresh_is_zero = false, slow_return = false;
  bool prefetches = false;  // the plan tells what comes next
};

class Device final : public mempool::Device {
 public:
  explicit Device(const MemoryOptions& options) : options_(options) {}
  ~Device() override;

  // --- what the core asks
  mempool::DeviceTraits traits() const noexcept override;
  Address reserve(std::size_t bytes, std::size_t alignment) noexcept override;
  bool commit(Address address, std::size_t bytes) noexcept override;
  void decommit(Address address, std::size_t bytes) noexcept override;
  Address resize(Address address, std::size_t from, std::size_t to) noexcept override;
  void release(Address address, std::size_t bytes) noexcept override;
  void copy(Address to, Address from, std::size_t bytes, Stream stream) noexcept override;
  void zero(Address address, std::size_t bytes, Stream stream) noexcept override;
  std::size_t foresight() const noexcept override { return std::size_t{64} << 10; }
  void prefetch(Address address, std::size_t bytes) noexcept override;
  Event record(Stream stream) noexcept override;
  bool query(Event event) noexcept override;
  bool wait(Stream stream, Event event) noexcept override;
  void forget(Event event) noexcept override;
  bool synchronize() noexcept override;
  bool capturing(Stream stream) noexcept override { return stream == captured_; }

  // --- what the program does
  // It has got a buffer: nothing alive may lie there, the device must have committed it, and its stream's next work must
  // come after all that was ever queued there.
  void begin(Buffer& buffer);
  // It lets go of one. `moving`: to another place, by the core, which may read the old one until it has `arrived`.
  void end(Buffer& buffer, bool moving = false);
  void stays(Buffer& buffer);  // after all: the core could not move it
  void arrived(Address old) noexcept { moving_.erase(old); }
  // Work that writes the whole buffer, or reads what it wrote last.
  void write(Buffer& buffer, Stream stream);
  void read(Buffer& buffer, Stream stream);
  // Does up to so much of what is queued, on streams that `choices` picks.
  void run(Choices& choices, std::size_t works) noexcept;
  void finish() noexcept;  // all of it

  // --- graphs: from begin_capture on, work of this stream is the graph's
  void begin_capture(std::uint64_t graph, Stream stream);
  void end_capture() noexcept { captured_ = -1, capturing_ = 0; }
  void replay(std::uint64_t graph, Stream stream);
  void end_graph(std::uint64_t graph);  // its memory may be had by others, as far as its work is through

  // --- what goes wrong
  void set_capacity(std::size_t bytes) noexcept { options_.capacity = bytes; }
  void fail_after(std::uint64_t calls) noexcept { calls_left_ = calls; }  // refuses every request after this many more
  void fail_waits(std::uint64_t calls) noexcept { waits_failing_ = calls; }  // so many calls of synchronize(),
  void fail_event_waits(std::uint64_t calls) noexcept { event_waits_failing_ = calls; }  // of wait()

  std::size_t committed() const noexcept { return committed_; }
  std::size_t live_reservations() const noexcept { return reservations_.size(); }
  std::size_t live_events() const noexcept { return events_alive_; }
  std::uint64_t refusals() const noexcept { return refusals_; }
  std::uint64_t works() const noexcept { return works_; }  // queued, and done, ever

 private:
  struct Reservation {
    std::size_t bytes;
    std::vector<bool> pages;  // committed
  };
  struct Former {  // an ended buffer's memory, until somebody else has it or it goes back
    Address end;
    std::uint64_t number;
    Stream stream;
    Clock uses;
  };
  struct Stamp {
    Address end;
    std::uint64_t stamp;
  };
  struct Work {
    enum Kind : std::uint8_t { read, write, copy, mark, wait, graph } kind;
    Address begin = 0, end = 0;
    std::uint64_t stamp = 0;   // of a graph: its number; of a wait: how many of the other stream's works must be done
    std::uint64_t number = 0;  // the buffer's; of a wait: the other stream's
    Address from = 0;
  };
  struct Queue {
    std::deque<Work> works;
    std::uint64_t queued = 0, done = 0;  // works ever
  };
  struct Mark {  // an event
    Clock clock;
    std::size_t stream = 0;
    std::uint64_t position = 0;  // in its stream: over when so many works are done
    bool alive = false;
  };
  struct Graph {
    std::vector<Work> works;
    std::map<Address, Address> memory;  // that it uses
    Clock uses;
    bool ended = false;
  };

  static std::size_t index(Stream stream) noexcept { return static_cast<std::size_t>(stream); }
  bool refuse(std::size_t bytes) noexcept;
  Address place(std::size_t bytes, std::size_t step) const;
  std::map<Address, Reservation>::iterator find(Address address, std::size_t bytes, const char* what);
  void set_pages(Address address, std::size_t bytes, bool on, const char* wrong);
  bool is_committed(Address address, std::size_t bytes) const;
  void goes_back(Address address, std::size_t bytes, const char* how);
  void spoils_capture(const char* how) const;
  void check_formers(Address begin, Address end, Stream stream, std::uint64_t number, bool take);
  Mark& mark(Event event, const char* what);
  std::uint64_t queue(Stream stream, Work work);
  bool step(Queue& queue);
  void execute(const Work& work);
  void put_stamp(Address begin, Address end, std::uint64_t stamp);
  void drop_stamps(Address begin, Address end);
  void check_stamp(const Work& work) const;
  void move_stamps(Address to, Address from, std::size_t bytes);

  MemoryOptions options_;
  std::map<Address, Reservation> reservations_;
  std::size_t committed_ = 0;
  static constexpr Address kBase = Address{1} << 44;
  std::uint64_t calls_left_ = ~std::uint64_t{0}, waits_failing_ = 0, event_waits_failing_ = 0, refusals_ = 0, works_ = 0;

  std::map<Address, Buffer*> live_;
  std::map<Address, Former> formers_;
  std::map<Address, Stamp> stamps_;
  std::map<Address, Buffer*> moving_;  // by where they were
  std::uint64_t begun_ = 0, stamp_ = 0;

  std::array<Queue, kStreams> queues_;
  std::array<Clock, kStreams> known_;  // what a stream's next work comes after
  std::array<std::uint64_t, kStreams> ticks_{};
  Clock host_;                         // what the host knows to be over
  std::vector<Mark> events_;
  std::vector<std::size_t> free_events_;
  std::size_t events_alive_ = 0;
  std::map<std::uint64_t, Graph> graphs_;
  Stream captured_ = -1;
  std::uint64_t capturing_ = 0;
};

}  // namespace world
