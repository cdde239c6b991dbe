// Random events through the simulated allocators of solvers/native/simulators; what comes out is looked at block by block.
//
// With `spoil`, the last buffer of each seed is told to be where the one before it is.
#include <functional>
#include <map>
#include <memory>

#include "simulators/coalescing.hpp"
#include "simulators/textbook.hpp"
#include "simulators/cnmem.hpp"
#include "simulators/pytorch_expandable.hpp"
#include "simulators/rmm_arena.hpp"
#include "simulators/rmm_pool.hpp"
#include "seeded.hpp"

namespace {

using namespace simulators;
using packing::Random;
using seeded::counts;

constexpr int64_t kMib = 1 << 20;

const char* name_now = "";

[[noreturn]] void fail(const char* what) { seeded::fail(name_now, what); }

// Sizes around what allocators decide by, of any magnitude, and more than any device has.
int64_t any_size(Random& random) {
  static const int64_t marks[] = {0, 1, 512, 4096, kMib, 2 * kMib, 10 * kMib, 20 * kMib, 64 * kMib};
  switch (random.below(8)) {
    case 0: return marks[random.below(9)] + random.below(3);
    case 1: return random.below(20) == 0 ? int64_t{1} << (40 + random.below(22)) : 1;
    default: return (int64_t{1} << random.below(26)) + random.below(1000);
  }
}

struct History {
  std::vector<uint8_t> kind;
  std::vector<int64_t> birth, size, stream, address;

  void add(uint8_t what, int64_t born, int64_t bytes, int64_t on, int64_t at = -1) {
    kind.push_back(what), birth.push_back(born), size.push_back(bytes), stream.push_back(on), address.push_back(at);
  }
  int64_t count() const { return static_cast<int64_t>(kind.size()); }
  Events view() const { return {kind.data(), birth.data(), size.data(), stream.data(), address.data(), count()}; }
};

void add_random(History& events, std::vector<int64_t> alive, Random& random) {
  const int32_t steps = 20 + random.below(300), growth = 50 + random.below(30);
  for (int32_t k = 0; k < steps; ++k) {
    const int64_t stream = random.below(3);
    if (alive.empty() || random.below(100) < growth) {
      alive.push_back(events.count());
      events.add(0, events.count(), any_size(random), stream);
    } else if (random.below(20) == 0) {
      events.add(4, -1, 0, 0);
    } else {
      const auto at = static_cast<size_t>(random.below(static_cast<int32_t>(alive.size())));
      events.add(1, alive[at], 0, stream);
      alive[at] = alive.back();
      alive.pop_back();
    }
  }
}

PyTorchRules any_rules(Random& random) {
  PyTorchRules rules;
  if (random.below(2) == 0) rules.max_split = (20 + random.below(50)) * kMib;
  if (random.below(2) == 0) rules.max_non_split_rounding = (20 + random.below(30)) * kMib;
  if (random.below(2) == 0) rules.large_segment = (11 + random.below(20)) * kMib;
  if (random.below(2) == 0) rules.gc_threshold = random.unit();
  for (int64_t& parts : rules.divisions)
    if (random.below(3) == 0) parts = int64_t{1} << random.below(5);
  return rules;
}

// At times none.
int64_t any_bytes(Random& random, int64_t most) {
  return random.below(3) == 0 ? 0 : random.below(static_cast<int32_t>(most));
}

int64_t any_maximum(Random& random, int64_t least) {
  return random.below(2) == 0 ? -1 : (least + any_bytes(random, 300 * kMib)) & -RmmPool::unit;
}

struct Maker {
  const char* name;
  std::function<std::unique_ptr<Allocator>(Device&, Random&)> make;
};

const Maker makers[] = {
    {"fit",
     [](Device& device, Random& random) {
       const int64_t alignment = int64_t{1} << random.below(13), growth = int64_t{1} << random.below(24);
       return std::make_unique<Fit>(device, random.below(2) == 0, alignment, growth);
     }},
    {"pytorch", [](Device& device, Random& random) { return std::make_unique<PyTorch>(device, any_rules(random)); }},
    {"pytorch expandable",
     [](Device& device, Random& random) { return std::make_unique<PyTorchExpandable>(device, any_rules(random)); }},
    {"cupy", [](Device& device, Random&) { return std::make_unique<Cupy>(device); }},
    {"cnmem",
     [](Device& device, Random& random) {
       return std::make_unique<Cnmem>(device, any_bytes(random, 100 * kMib), random.below(4) > 0);
     }},
    {"bfc",
     [](Device& device, Random& random) {
       const int64_t slack = 1 + any_bytes(random, 200 * kMib), region = std::max<int64_t>(device.limit(), 1);
       const bool grows = region == Device::most_bytes || random.below(4) > 0;
       return std::make_unique<Bfc>(device, grows ? 1 + any_bytes(random, 8 * kMib) : region, slack, random.below(2) == 0);
     }},
    {"buddy",
     [](Device& device, Random& random) {
       const int64_t least = int64_t{1} << random.below(13);
       return std::make_unique<Buddy>(device, least, int64_t{1} << random.below(27));
     }},
    {"rmm pool",
     [](Device& device, Random& random) {
       const int64_t initial = any_bytes(random, 50 * kMib) & -RmmPool::unit;
       return std::make_unique<RmmPool>(device, initial, any_maximum(random, initial));
     }},
    {"rmm binning",
     [](Device& device, Random& random) {
       const int64_t initial = any_bytes(random, 50 * kMib) & -RmmPool::unit;
       const int least = 8 + random.below(10), most = least + random.below(6);
       return std::make_unique<RmmBinning>(device, least, most, 1 + random.below(20), initial, any_maximum(random, initial));
     }},
    {"rmm arena",
     [](Device& device, Random& random) {
       const int64_t bytes = random.below(4) == 0 ? device.limit() : random.below(400) * kMib;
       return std::make_unique<RmmArena>(device, bytes & -RmmArena::unit);
     }},
};

// What is held and what lives in it, kept up event by event.
class Judge {
 public:
  Judge(const History& events, const Course& course, const Device& device) : events_(events), course_(course) {
    for (const Segment& segment : device.segments()) {
      if (segment.start == segment.end) continue;
      from_[segment.start].push_back(segment);
      if (segment.end >= 0) until_[segment.end].push_back(segment), ++counts["given back"];
    }
  }

  void look(int64_t first, int64_t limit) {
    int64_t live = 0, reserved = 0;
    for (int64_t i = 0; i < events_.count(); ++i) {
      for (const Segment& gone : until_[i]) reserved -= gone.size, held_.erase(gone.address);
      for (const Segment& taken : from_[i]) reserved += taken.size, hold(taken);
      if (events_.kind[i] == 0) live += begin(i, i < first ? -1 : course_.live[i] - (i > 0 ? course_.live[i - 1] : 0));
      else if (events_.kind[i] == 1) live -= end(events_.birth[i]);
      if (i < first) {
        if (i + 1 == first) live = course_.live[i];
        continue;
      }
      if (course_.live[i] != live) fail("live bytes that are not those of the blocks");
      if (course_.reserved[i] != reserved) fail("reserved bytes that are not those of the segments");
      if (live > reserved || reserved > limit) fail("more bytes than there can be");
      for (const auto& [address, size] : blocks_) within(address, size);
    }
  }

 private:
  void hold(const Segment& taken) {
    const auto above = held_.lower_bound(taken.address);
    if (above != held_.end() && above->first < taken.address + taken.size) fail("two segments overlap");
    if (above != held_.begin()) {
      const Segment& below = std::prev(above)->second;
      if (below.address + below.size > taken.address) fail("two segments overlap");
    }
    held_.emplace(taken.address, taken);
  }

  // Bytes of the block of an alloc. Those of what was adopted are known by their sizes only.
  int64_t begin(int64_t row, int64_t size) {
    const int64_t at = course_.address[row];
    if (at < 0) return 0;
    if (size < 0) size = events_.size[row];
    if (size < events_.size[row]) fail("a block that is too small");
    const auto above = blocks_.lower_bound(at);
    if (above != blocks_.end() && above->first < at + size) fail("two blocks overlap");
    if (above != blocks_.begin() && std::prev(above)->first + std::prev(above)->second > at) fail("two blocks overlap");
    blocks_.emplace(at, size);
    return size;
  }

  int64_t end(int64_t birth) {
    const auto found = blocks_.find(course_.address[birth]);
    if (course_.address[birth] < 0 || found == blocks_.end()) return 0;
    const int64_t size = found->second;
    blocks_.erase(found);
    return size;
  }

  void within(int64_t address, int64_t size) const {
    auto at = held_.upper_bound(address);
    if (at == held_.begin()) fail("a block outside of all segments");
    const int64_t region = (--at)->second.region;
    for (int64_t reached = address; reached < address + size; ++at) {
      if (at == held_.end() || at->first > reached || at->second.region != region) fail("a block outside of its region");
      reached = at->first + at->second.size;
      if (reached <= address) fail("a block outside of all segments");
    }
  }

  const History& events_;
  const Course& course_;
  std::map<int64_t, std::vector<Segment>> from_, until_;  // by event
  std::map<int64_t, Segment> held_;
  std::map<int64_t, int64_t> blocks_;  // sizes by address
};

void spoil_last(const History& events, Course& course) {
  int64_t before = -1;
  for (int64_t i = events.count() - 1; i >= 0; --i) {
    if (events.kind[i] != 0 || course.address[i] < 0) continue;
    if (before >= 0) {
      course.address[before] = course.address[i];
      return;
    }
    before = i;
  }
}

void judge(const History& events, Course course, const Device& device, int64_t first, bool spoil) {
  if (spoil) spoil_last(events, course);
  for (int64_t i = 0; i < events.count(); ++i) {
    if (events.kind[i] == 0) ++counts[course.address[i] < 0 && events.size[i] > 0 ? "failed" : "allocs"];
    if (events.kind[i] == 1) ++counts["frees"];
  }
  std::map<int64_t, int64_t> parts;
  for (const Segment& segment : device.segments()) counts["in parts"] += ++parts[segment.region] == 2;
  Judge(events, course, device).look(first, device.limit());
}

int64_t any_limit(Random& random) {
  return random.below(3) == 0 ? Device::most_bytes : random.below(4) == 0 ? random.below(1000) : random.below(600) * kMib;
}

void through(const Maker& maker, Random& random, bool spoil) {
  name_now = maker.name;
  Device device(any_limit(random));
  const auto allocator = maker.make(device, random);
  History events;
  add_random(events, {}, random);
  judge(events, run(*allocator, events.view(), {}), device, 0, spoil);
}

// PyTorch's from a state that was there before, with answers of the device that may be impossible, giving back at times.
void adopted(Random& random, bool spoil) {
  name_now = "adopted";
  std::vector<int64_t> sizes;
  int64_t held = 0;
  for (int32_t k = random.below(5); k > 0; --k) {
    sizes.push_back(random.below(2) == 0 ? 2 * kMib : (3 + random.below(100)) * kMib);
    held += sizes.back();
  }
  const int64_t floor = 600 * kMib;
  const PyTorchRules rules = any_rules(random);
  Device device(held + random.below(100) * kMib, floor), other(device.limit(), floor);
  PyTorch allocator(device, rules), learner(other, rules);
  History events;
  std::vector<int64_t> handles, alive, addresses;
  int64_t top = kMib;
  for (const int64_t size : sizes) {
    top += random.below(3) * 512;
    const int32_t apart = random.below(3) == 0 ? 1 << 26 : 4096;
    std::vector<Block> blocks;
    for (int64_t at = top + random.below(3) * 512; at < top + size; at += 512 * random.below(apart / 512)) {
      const int64_t bytes = std::min<int64_t>(512 * (1 + random.below(4000)), top + size - at);
      if (random.below(3) > 0) blocks.push_back({at, bytes, 1});
      at += bytes;
    }
    events.add(5, -1, size, 1, top);
    handles.push_back(-1);
    const auto made = allocator.adopt({top, size, 1, 0, 0, -1}, blocks);
    for (size_t b = 0; b < blocks.size(); ++b) {
      const int64_t end = blocks[b].address + blocks[b].size;
      const int64_t room = (b + 1 < blocks.size() ? blocks[b + 1].address : top + size) - end;
      blocks[b].slack = std::max<int64_t>(std::min(room - 512, random.below(3) * kMib), 0);
    }
    if (learner.adopt({top, size, 1, 0, 0, -1}, blocks) != made) fail("other handles");
    for (size_t b = 0; b < made.size(); ++b) {
      alive.push_back(events.count());
      handles.push_back(made[b]);
      addresses.push_back(blocks[b].address);
      events.add(0, events.count(), blocks[b].size, 1, blocks[b].address);
      ++counts["adopted"];
    }
    top += size;
  }
  for (int32_t k = random.below(20); k > 0; --k, ++counts["answered"])
    device.answer((1 + random.below(12)) * 2 * kMib, random.below(340) * kMib + random.below(2) * 512);
  const int64_t first = events.count();
  add_random(events, alive, random);
  for (int64_t i = first; i < events.count(); ++i) {
    if (events.kind[i] != 4 || first == 0) continue;
    const auto like = static_cast<size_t>(random.below(static_cast<int32_t>(first)));
    events.kind[i] = 6, events.stream[i] = 1, events.size[i] = events.size[like], events.address[i] = events.address[like];
  }
  run(learner, events.view(), handles);
  for (const auto& [handle, end] : learner.learned())
    if (++counts["learned"], handle < 0 || end > floor) fail("learned what cannot be");
  Course course = run(allocator, events.view(), handles);
  for (size_t k = 0; k < alive.size(); ++k) course.address[alive[k]] = addresses[k];
  judge(events, course, device, first, spoil);
}

void run_all(Random& random, bool spoil) {
  for (const Maker& maker : makers) through(maker, random, spoil);
  adopted(random, spoil);
}

}  // namespace

int main(int argc, char** argv) {
  return seeded::main_of(argc, argv, run_all,
                         {"allocs", "frees", "failed", "given back", "in parts", "adopted", "answered", "learned"});
}
