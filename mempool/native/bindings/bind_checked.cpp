#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/checked.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

// Numbers of places in Python files. Never destroyed, because buffers are freed until the very end.
struct Places {
  Lock lock;
  std::unordered_map<std::string, Site> numbers;
  std::deque<std::string> names{"an unknown place"};
  std::vector<std::string> libraries;  // path prefixes; reports name the callers of these libraries instead
  PyObject* listener = nullptr;

  Site number(std::string name) {
    const Guarded guard(lock);
    const auto [entry, fresh] = numbers.try_emplace(std::move(name), static_cast<Site>(names.size()));
    if (fresh) names.push_back(entry->first);
    return entry->second;
  }
  std::string name(Site site) {
    const Guarded guard(lock);
    return names[site];
  }
  bool in_library(const std::string& file) {
    const Guarded guard(lock);
    for (const std::string& library : libraries) {
      if (file.compare(0, library.size(), library) == 0) return true;
    }
    return false;
  }
};
Places& places() {
  static Places* const places = new Places;
  return *places;
}

// Scope that saves a pending exception and disables garbage collection: an allocator may be called while an
// exception propagates, and must not start a collection.
class Undisturbed {
 public:
  Undisturbed() : collecting_(PyGC_Disable()) { PyErr_Fetch(&type_, &value_, &trace_); }
  ~Undisturbed() {
    PyErr_Restore(type_, value_, trace_);
    if (collecting_) PyGC_Enable();
  }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
  int collecting_;
};

// Return "file:line" of a frame; `library` is set if a caller further out should be named instead.
std::string planned_offset_of(PyFrameObject* frame, bool& library) {
  PyCodeObject* const code = PyFrame_GetCode(frame);
  const char* const file = PyUnicode_AsUTF8(code->co_filename);
  std::string place = file == nullptr ? "?" : file;
  library = places().in_library(place);
  Py_DECREF(code);
  return place + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

// Return the current place in this thread's Python program; 0 if the thread runs no Python code now or does
// not hold the interpreter's lock.
Site here() noexcept try {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr || !PyGILState_Check()) return 0;
  const Undisturbed undisturbed;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string innermost;
  for (int depth = 0; frame != nullptr; ++depth) {
    bool library = false;
    std::string place = planned_offset_of(frame, library);
    PyFrameObject* const back = library && depth < 50 ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
    if (!library) return places().number(std::move(place));
    if (innermost.empty()) innermost = std::move(place);
  }
  return innermost.empty() ? 0 : places().number(std::move(innermost));
} catch (...) {
  return 0;
}

int call_listener(void*) {
  PyObject* const listener = places().listener;
  if (listener == nullptr) return 0;
  PyObject* const result = PyObject_CallNoArgs(listener);
  if (result == nullptr) PyErr_WriteUnraisable(listener);
  Py_XDECREF(result);
  return 0;
}

// Let the main thread call the listener soon, because the thread that found the fault may be unable to run
// Python.
void found() { Py_AddPendingCall(call_listener, nullptr); }

nb::object place(Site site) {
  if (site == 0) return nb::none();
  const std::string name = places().name(site);
  return nb::str(name.data(), name.size());
}

nb::list faults(Checked& checked) {
  constexpr const char* kKinds[] = {"past_end", "before_begin", "after_free", "double_free", "inside"};
  nb::list list;
  for (const Fault& f : checked.faults()) {
    list.append(nb::make_tuple(kKinds[f.kind], f.address, f.bytes, f.offset, place(f.allocated), place(f.freed),
                               place(f.noticed)));
  }
  return list;
}

}  // namespace

void bind_checked(nb::module_& m) {
  nb::class_<Checked>(m, "Checked", "A client with redzones around every buffer and poison in freed buffers; "
                                    "host only.")
      .def("__init__", [](Checked* self, Client& client) { new (self) Checked(client, {here, found}); }, "client"_a,
           nb::keep_alive<1, 2>())
      .def("allocate", &Checked::allocate, "bytes"_a, "stream"_a = 0, "zeroed"_a = false,
            "Return an address; 0: out of memory.")
      .def("free", [](Checked& c, Address address, Stream stream) { return c.free(address, stream); }, "address"_a,
           "stream"_a = 0, "Free a buffer. False: the address is no live buffer, which may be a fault.")
      .def("verify", &Checked::verify, "Check every redzone and all poison now.")
      .def("flush", &Checked::flush, "Return all freed buffers to the client.")
      .def("faults", &faults, "Return (kind, address, bytes, offset, allocated at, freed at, noticed at) of the "
                              "first few hundred faults.")
      .def("faults_found", &Checked::faults_found, "Return the total number of faults.");

  m.def("set_fault_listener",
        [](nb::object listener) { Py_XDECREF(std::exchange(places().listener, listener.release().ptr())); },
        "listener"_a, "Set a function that the main thread calls without arguments soon after a fault.");
  m.def("set_fault_libraries",
        [](std::vector<std::string> folders) {
          const Guarded guard(places().lock);
          places().libraries = std::move(folders);
        },
        "folders"_a, "Set folders whose code is skipped when a fault names its caller.");
}
