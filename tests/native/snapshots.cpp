// Random memory snapshots through the reader of traces/native: right ones, damaged ones, and opcodes in any order.
//
// Usage: snapshots FIRST_SEED SEEDS [spoil]     one JSON object of counts, or the first failure
//
// A right one must give as many rows as were written, and whatever is read must be a trace. With `spoil`, one row more
// is expected of right ones.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "joined_rows.hpp"
#include "memory_snapshot.hpp"
#include "packing/random.hpp"
#include "pickle.hpp"

namespace {

using packing::Random;
using namespace traces;

std::map<std::string, unsigned long long> counts;
unsigned long long seed_now = 0;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "FAILED: seed %llu: %s\n", seed_now, what);
  std::fflush(stderr);
  std::_Exit(1);
}

// A pickle as it is written, in one of the ways in which that may be done.
class Writer {
 public:
  explicit Writer(Random& random) : random_(random) { code("\x80\x04"); }

  std::string out;

  void code(const char* opcodes) { out += opcodes; }
  template <class Number>
  void raw(Number value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& value) {
    const auto [known, fresh] = texts_.try_emplace(value, puts_);
    if (!fresh && random_.below(4) != 0) return get(known->second);
    if (random_.below(2) == 0)
      code("\x8c"), raw(static_cast<uint8_t>(value.size()));
    else
      code("X"), raw(static_cast<uint32_t>(value.size()));
    out += value;
    if (fresh) put();
  }
  void number(uint64_t value) {
    if (value < 256 && random_.below(2) == 0) return code("K"), raw(static_cast<uint8_t>(value));
    if (value < 65536 && random_.below(2) == 0) return code("M"), raw(static_cast<uint16_t>(value));
    code("\x8a\x08"), raw(value);
  }
  // Its number in the memo.
  uint32_t put() {
    switch (random_.below(3)) {
      case 0: code("\x94"); break;
      case 1: if (puts_ < 256) { code("q"), raw(static_cast<uint8_t>(puts_)); break; } [[fallthrough]];
      default: code("r"), raw(puts_);
    }
    return puts_++;
  }
  void get(uint32_t index) {
    if (index < 256 && random_.below(2) == 0) return code("h"), raw(static_cast<uint8_t>(index));
    code("j"), raw(index);
  }

 private:
  Random& random_;
  uint32_t puts_ = 0;
  std::map<std::string, uint32_t> texts_;
};

struct Written {
  std::string bytes;
  size_t rows = 0;
};

class Snapshots {
 public:
  explicit Snapshots(Random& random) : random_(random), to_(random) {}

  Written any() {
    to_.code("}");
    to_.put();
    to_.code("(");
    field("frames");
    frames();
    field("segments");
    segments();
    field("device_traces");
    to_.code("](");
    for (int32_t devices = random_.below(3); devices > 0; --devices) events();
    to_.code("eu.");
    return {std::move(to_.out), rows_};
  }

 private:
  void field(const char* name) { to_.text(name); }
  void field(const char* name, uint64_t value) { field(name), to_.number(value); }
  bool one_in(int32_t n) { return random_.below(n) == 0; }

  void frames() {
    constexpr const char* names[] = {"main", "at::_ops::mul::call", "at::_ops::add"};
    constexpr const char* files[] = {"??", "a/b.py", "/x/torch/y.py", "c.py"};
    to_.code("](");
    for (int32_t n = 1 + random_.below(4); n > 0; --n) {
      to_.code("}");
      frames_.push_back(to_.put());
      to_.code("(");
      field("name"), to_.text(names[random_.below(3)]);
      field("filename"), to_.text(files[random_.below(4)]);
      field("line", static_cast<uint64_t>(random_.below(1000)));
      to_.code("u");
    }
    to_.code("e");
  }

  void segments() {
    to_.code("](");
    if (one_in(2)) {
      to_.code("}(");
      field("device", 9999);  // of none: read leniently alone
      to_.code("u");
      faulty_ = true;
    }
    to_.code("e");
  }

  void events() {
    living_.clear(), gone_.clear();
    to_.code("](");
    for (int32_t n = random_.below(30); n > 0; --n) {
      event();
      if (one_in(9)) to_.code("e(");
    }
    to_.code("e");
  }

  void event() {
    constexpr const char* actions[] = {"alloc", "free_completed", "free_requested", "segment_alloc", "oom"};
    const int32_t action = random_.below(5);
    const int32_t place = random_.below(12);
    if (action == 0 && living_[place]) return;
    if (action == 1 && gone_[place]) return;
    if (action == 0) living_[place] = true, gone_[place] = false, ++rows_;
    if (action == 1) rows_ += living_[place] ? 1 : 2, living_[place] = false, gone_[place] = true;
    if (action == 3 || action == 4) ++rows_;
    to_.code("}(");
    field("action"), to_.text(actions[action]);
    field("addr", static_cast<uint64_t>(place) * 1024), field("size", static_cast<uint64_t>(random_.below(1000)));
    field("stream", 0), field("time_us", static_cast<uint64_t>(random_.below(100)));
    field("frames"), to_.code("](");
    for (int32_t n = random_.below(4); n > 0; --n) to_.get(frames_[static_cast<size_t>(random_.below(static_cast<int32_t>(frames_.size())))]);
    to_.code("e");
    if (one_in(3)) field("other"), to_.code("G12345678K\x01\x86");
    to_.code("u");
  }

  Random& random_;
  Writer to_;
  std::vector<uint32_t> frames_;
  std::map<int32_t, bool> living_, gone_;
  size_t rows_ = 0;

 public:
  bool faulty_ = false;
};

// Opcodes in any order, the right ones mostly.
std::string soup(Random& random) {
  constexpr char opcodes[] = "\x80\x95(}])\x8fN\x88\x89KMJG\x8a\x8b\x8cX\x8d" "CB\x8e\x96\x85\x86\x87t\x91\x90usea\x94qrhj.";
  std::string body = "\x80\x04}(X\x08" + std::string(3, '\0') + "segments]X\x0d" + std::string(3, '\0') + "device_traces](";
  for (int32_t n = random.below(200); n > 0; --n) {
    const char opcode = opcodes[random.below(sizeof opcodes - 1)];
    body += opcode;
    for (int32_t more = std::strchr("KMJG\x8a\x8b\x8cX\x8d" "CB\x8e\x96qrhj", opcode) ? random.below(9) : 0; more > 0; --more)
      body += static_cast<char>(random.below(2) == 0 ? 0 : random.below(6));
  }
  return body + "eu.";
}

void check(const Columns& columns) {
  std::map<int64_t, bool> alive;
  for (size_t i = 0; i < columns.kind.size(); ++i) {
    const int64_t buffer = columns.buffer[i];
    if (columns.kind[i] == kAlloc && !alive.try_emplace(buffer, true).second) fail("a buffer is born twice");
    if (columns.kind[i] == kFree && !std::exchange(alive[buffer], false)) fail("a buffer is freed that is not alive");
    if (columns.kind[i] >= kReserve && buffer != -1) fail("a segment with a buffer");
    const auto names = static_cast<int32_t>(columns.names.size());
    if (columns.operation[i] >= names || columns.frame[i] >= names || columns.stack[i] >= names)
      fail("a name that is not there");
    if (columns.size[i] < 0 || columns.time_ns[i] < 0 || columns.address[i] < -1) fail("a negative number");
  }
}

// Its rows; -1 where it is refused.
int64_t read(const std::string& file, Random& random, bool lenient) {
  size_t at = 0;
  Budget budget;
  const auto source = [&](char* to, size_t most) {
    const size_t count = std::min({most, file.size() - at, static_cast<size_t>(1 + random.below(64))});
    std::memcpy(to, file.data() + at, count);
    at += count;
    return count;
  };
  try {
    Records records(budget, random.below(2) == 0);
    ByteReader bytes(source);
    Pickle pickle(budget, bytes, records);
    Value root;
    try {
      root = pickle.read();
    } catch (const Refused&) {
      if (!lenient || !pickle.truncated()) throw;
      root = pickle.begun();
      ++counts["begun"];
    }
    if (!records.has_shape(root, Records::kDict)) throw Refused("not a snapshot");
    const Fields fields = records.fields(root);
    pickle.forget();
    MemorySnapshot snapshot(budget, records, file.size(), lenient, [] {});
    snapshot.read(fields, !pickle.truncated());
    records.forget();
    const Columns columns = JoinedRows(snapshot.devices, records.texts, [] {}).join();
    check(columns);
    for (const auto& [kind, count] : snapshot.skipped) counts["skipped"] += static_cast<unsigned long long>(count);
    return static_cast<int64_t>(columns.kind.size());
  } catch (const Refused& refused) {
    const std::string reason = refused.what();
    const auto says = [&](const char* what) { return reason.find(what) != std::string::npos; };
    ++counts[says("truncated") ? "truncated" : says("damaged") ? "damaged" : says("opcode") ? "opcode"
             : says("device ") || says("segment ") ? "impossible" : "no snapshot"];
    return -1;
  }
}

void run(Random& random, bool spoil) {
  Snapshots snapshots(random);
  Written written = snapshots.any();
  const int64_t rows = read(written.bytes, random, true);
  if (rows != static_cast<int64_t>(written.rows) + (spoil ? 1 : 0)) fail("not as many rows as were written");
  if ((read(written.bytes, random, false) == -1) != snapshots.faulty_) fail("a fault was not told, or none was");
  ++counts["right"];
  counts["rows"] += written.rows;
  for (int32_t k = 0; k < 10; ++k) {
    std::string damaged = written.bytes;
    for (int32_t n = 1 + random.below(4); n > 0; --n) {
      const auto at = static_cast<size_t>(random.below(static_cast<int32_t>(damaged.size())));
      damaged[at] = random.below(2) == 0 ? static_cast<char>(random.below(256)) : damaged[at / 2];
    }
    if (random.below(3) == 0) damaged.resize(static_cast<size_t>(random.below(static_cast<int32_t>(damaged.size()))));
    if (read(damaged, random, random.below(2) == 0) >= 0) ++counts["read though damaged"];
    read(soup(random), random, random.below(2) == 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const unsigned long long first = std::strtoull(argv[1], nullptr, 10), seeds = std::strtoull(argv[2], nullptr, 10);
  const bool spoil = argc > 3 && std::strcmp(argv[3], "spoil") == 0;
  for (const char* const event : {"right", "rows", "skipped", "damaged", "truncated", "opcode", "impossible", "no snapshot",
                                  "begun", "read though damaged"}) {
    counts[event] = 0;  // all of them must happen
  }
  for (seed_now = first; seed_now < first + seeds; ++seed_now) {
    Random random(seed_now * 0x9e3779b97f4a7c15ULL);
    run(random, spoil);
  }
  std::printf("{");
  for (const auto& [name, count] : counts) std::printf("\"%s\": %llu, ", name.c_str(), count);
  std::printf("\"seeds\": %llu}\n", seeds);
}
