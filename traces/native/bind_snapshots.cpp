// Binding of the reader of memory snapshots.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "joined_rows.hpp"
#include "memory_snapshot.hpp"
#include "pickle.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace traces;

namespace {

// A file by its descriptor; reports progress now and then, and lets Ctrl-C interrupt.
class Input {
 public:
  Input(int descriptor, uint64_t total, nb::object progress)
      : descriptor_(descriptor), total_(total), progress_(std::move(progress)) {}

  size_t read(char* to, size_t most, Budget& budget) {
    ssize_t found;
    while ((found = ::read(descriptor_, to, most)) < 0) {
      if (errno != EINTR) fail();
      tick();
    }
    done_ += static_cast<uint64_t>(found);
    budget.read(done_);
    if (done_ >= next_tick_ || static_cast<size_t>(found) < most) {  // the next read may have to wait
      next_tick_ = done_ + kTick;
      tick();
    }
    return static_cast<size_t>(found);
  }
  void tick() const {
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!progress_.is_none()) progress_(done_, total_);
  }
  uint64_t done() const { return done_; }

 private:
  static constexpr uint64_t kTick = uint64_t{4} << 20;

  [[noreturn]] static void fail() {
    const int error = errno;
    const nb::gil_scoped_acquire locked;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }

  int descriptor_;
  uint64_t total_, done_ = 0, next_tick_ = kTick;
  nb::object progress_;
};

nb::str text_of(std::string_view text) {
  return nb::steal<nb::str>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// Converts settings to Python values; deeper nested or larger values become None.
nb::object plain(const Records& records, const Pickle& pickle, Value value, int depth) {
  constexpr size_t most = 256;
  switch (value.kind()) {
    case Value::kBool: return nb::bool_(value.payload() != 0);
    case Value::kNumber: return nb::int_(value.payload());
    case Value::kFloat: return nb::float_(pickle.real(value));
    case Value::kText: return text_of(records.texts[static_cast<size_t>(value.payload())]);
    default: break;
  }
  if (depth == 0 || !records.has_shape(value, Records::kDict)) return nb::none();
  const auto items = records.items(value);
  if (items.count > 2 * most) return nb::none();
  nb::dict result;
  for (size_t i = 0; i < items.count; i += 2)
    result[plain(records, pickle, items.first[i], 0)] = plain(records, pickle, items.first[i + 1], depth - 1);
  return result;
}

struct Read {
  nb::dict columns;
  nb::list names;
  nb::object settings;
  std::map<std::string, int64_t> actions, skipped;
  nb::list known, device_free;
  int64_t alive_before = 0;
  bool expandable = false;
};

void take(Read& to, Columns columns) {
  to.columns["kind"] = array_of(std::move(columns.kind));
  to.columns["buffer"] = array_of(std::move(columns.buffer));
  to.columns["size"] = array_of(std::move(columns.size));
  to.columns["stream"] = array_of(std::move(columns.stream));
  to.columns["device"] = array_of(std::move(columns.device));
  to.columns["time_ns"] = array_of(std::move(columns.time_ns));
  to.columns["operation"] = array_of(std::move(columns.operation));
  to.columns["frame"] = array_of(std::move(columns.frame));
  to.columns["address"] = array_of(std::move(columns.address));
  to.columns["module"] = array_of(std::move(columns.module));
  to.columns["category"] = array_of(std::move(columns.category));
  to.columns["stack"] = array_of(std::move(columns.stack));
  to.columns["pool"] = array_of(std::move(columns.pool));
  for (const auto& one : columns.known) to.known.append(nb::make_tuple(one.events, one.live_before, one.reserved_before));
  for (const int64_t free : columns.device_free) to.device_free.append(free);
  for (const std::string& name : columns.names) to.names.append(text_of(name));
}

// True for the list that `torch.cuda.memory_snapshot` returns.
bool is_segments(const Records& records, Value root) {
  if (!records.has_shape(root, Records::kList) || records.items(root).count == 0) return false;
  const Value first = *records.items(root).begin();
  return records.has_shape(first, Records::kDict) && !records.fields(first)[kTotalSize].is(Value::kMissing);
}

// Returns the fields of the whole snapshot; in lenient mode, of the part before the end of a truncated file,
// if that contains events.
Fields fields_of(const Records& records, Pickle& pickle, bool lenient) {
  Value root;
  try {
    root = pickle.read();
  } catch (const Refused&) {
    if (!lenient || !pickle.truncated()) throw;
    root = pickle.begun();
    if (!records.has_shape(root, Records::kDict) || records.fields(root)[kDeviceTraces].is(Value::kMissing)) throw;
  }
  if (is_segments(records, root)) {
    Fields fields;
    fields[kSegments] = root;
    return fields;
  }
  const Fields fields = records.has_shape(root, Records::kDict) ? records.fields(root) : Fields{};
  if (fields[kSegments].is(Value::kMissing) || fields[kDeviceTraces].is(Value::kMissing))
    throw Refused("a pickle, but not a memory snapshot of PyTorch");
  return fields;
}

Read read_snapshot(int descriptor, uint64_t total, bool lenient, bool paths, nb::object progress) {
  Read result;
  Columns columns;
  {
    Input input(descriptor, total, std::move(progress));
    Budget budget;
    Records records(budget, paths);
    ByteReader bytes([&](char* to, size_t most) { return input.read(to, most, budget); });
    Pickle pickle(budget, bytes, records);
    const nb::gil_scoped_release unlocked;
    const Fields fields = fields_of(records, pickle, lenient);
    input.tick();
    {
      const nb::gil_scoped_acquire locked;
      result.settings = plain(records, pickle, fields[kSettings], 2);
    }
    pickle.forget();
    MemorySnapshot snapshot(budget, records, input.done(), lenient, [&] { input.tick(); });
    snapshot.read(fields, !pickle.truncated());
    records.forget();
    columns = JoinedRows(snapshot.devices, records.texts, [&] { input.tick(); }).join();
    result.actions = std::move(snapshot.actions);
    result.skipped = std::move(snapshot.skipped);
    if (pickle.truncated()) ++result.skipped["truncated"];
    result.alive_before = columns.alive_before;
    result.expandable = snapshot.expandable;
  }
  take(result, std::move(columns));
  return result;
}

// Converts counts by file text to counts by Python text; two file texts may become the same.
nb::dict counts_of(const std::map<std::string, int64_t>& counts) {
  nb::dict result;
  for (const auto& [name, count] : counts) result[text_of(name)] = count;
  return result;
}

}  // namespace

void bind_snapshots(nb::module_& m) {
  nb::exception<Refused>(m, "Refused", PyExc_ValueError);
  nb::class_<Read>(m, "Snapshot", "The events of a memory snapshot.")
      .def_prop_ro("columns", [](const Read& self) { return self.columns; }, nb::sig("def columns(self) -> dict[str, numpy.typing.NDArray[typing.Any]]"))
      .def_prop_ro("names", [](const Read& self) { return self.names; }, nb::sig("def names(self) -> list[str]"))
      .def_prop_ro("settings", [](const Read& self) { return self.settings; }, nb::sig("def settings(self) -> object"))
      .def_prop_ro("actions", [](const Read& self) { return counts_of(self.actions); },
                   nb::sig("def actions(self) -> dict[str, int]"))
      .def_prop_ro("skipped", [](const Read& self) { return counts_of(self.skipped); },
                   nb::sig("def skipped(self) -> dict[str, int]"))
      .def_prop_ro("known", [](const Read& self) { return self.known; },
                   nb::sig("def known(self) -> list[tuple[int, int, int]]"),
                   "Number of events, and bytes live and reserved before the first event, of each device.")
      .def_prop_ro("device_free", [](const Read& self) { return self.device_free; },
                   nb::sig("def device_free(self) -> list[int]"),
                   "Bytes free on the device at each refused request, -1 where unknown.")
      .def_ro("alive_before", &Read::alive_before)
      .def_ro("expandable", &Read::expandable);
  m.def("is_library_file", [](const std::string& path) { return is_library_file(path); }, "path"_a,
        "Return true if the path of a source file belongs to an installed library or to Python itself.");
  m.def("read_snapshot", &read_snapshot, "descriptor"_a, "total"_a, "lenient"_a, "paths"_a, "progress"_a.none(),
        nb::sig("def read_snapshot(descriptor: int, total: int, lenient: bool, paths: bool, "
                "progress: collections.abc.Callable[[int, int], object] | None) -> Snapshot"),
        "Read a snapshot from an open file of `total` bytes (0: unknown) and report progress; raise `Refused` with the reason.");
}
