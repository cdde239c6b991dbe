#include "adapters/cupy_allocator.hpp"

#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "core/client.hpp"
#include "core/threads.hpp"

namespace mempool::cupy {
namespace {

// The object that CuPy holds while using a buffer; the buffer is freed when the object is destroyed.
struct Owner {
  PyObject_HEAD
  PyObject* keeps;  // the client's Python object
  Client* client;
  Address address;  // 0: no buffer yet, and none is freed
  Stream stream;    // stream of the allocation and of the free
};

PyTypeObject* owner_type = nullptr;

void give_back(const Owner& owner) {
  if (owner.client->free_at_once(owner.address, owner.stream)) return;
  PyThreadState* const state = PyEval_SaveThread();
  owner.client->free(owner.address, owner.stream);
  PyEval_RestoreThread(state);
}

// Release the client's Python object. The last buffer of a closed pool ends the pool; the wait for the device
// then happens without the interpreter's lock, so that other threads need not wait.
void let_go(const Owner& owner) {
  if (Py_REFCNT(owner.keeps) == 1) {
    PyThreadState* const state = PyEval_SaveThread();
    if (owner.client->is_alone()) owner.client->give_back(true);
    PyEval_RestoreThread(state);
  }
  Py_DECREF(owner.keeps);
}

// Not noexcept: if the interpreter has ended meanwhile, taking the lock ends this thread by unwinding.
void dealloc_owner(PyObject* self) {
  const Owner& owner = *reinterpret_cast<Owner*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  if (owner.address != 0) give_back(owner);
  let_go(owner);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot owner_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc_owner)}, {0, nullptr}};
PyType_Spec owner_spec = {"mempool._core.CupyOwner", sizeof(Owner), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, owner_slots};

bool prepare_owner() noexcept {
  if (owner_type == nullptr) owner_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&owner_spec));
  return owner_type != nullptr;
}

// Return an owner without an address: a new reference, or null with a Python error. Triggers no garbage
// collection.
Owner* new_owner(Client& client, PyObject* keeps, Stream stream) noexcept {
  Owner* const owner = PyObject_New(Owner, owner_type);
  if (owner == nullptr) return nullptr;
  Py_INCREF(keeps);
  owner->keeps = keeps;
  owner->client = &client;
  owner->address = 0;
  owner->stream = stream;
  return owner;
}

// Signatures in Cython's notation for exported functions; a function of another type is called as a Python
// object.
constexpr const char* kDeviceCapsule = "int (int __pyx_skip_dispatch)";
constexpr const char* kStreamCapsule = "intptr_t (void)";

struct Held {
  Client* client = nullptr;   // null: none yet
  PyObject* owner = nullptr;  // the client's Python object
};

struct Allocator {
  PyObject_HEAD
  vectorcallfunc call;
  Parts parts;                        // all owned
  int (*device)(int);                 // null: parts.device is called instead
  std::intptr_t (*stream)();
  std::vector<Held>* held;            // by device index
};

PyTypeObject* allocator_type = nullptr;

// Convert the result of a call to a number; false: a Python error is set. Steals the reference.
bool number_of(PyObject* answer, std::int64_t& number) {
  if (answer == nullptr) return false;
  number = PyLong_AsLongLong(answer);
  Py_DECREF(answer);
  return number != -1 || PyErr_Occurred() == nullptr;
}

bool current_device(const Allocator& a, std::int64_t& index) {
  if (a.device == nullptr) return number_of(PyObject_CallNoArgs(a.parts.device), index);
  index = a.device(0);
  return PyErr_Occurred() == nullptr;
}

// Return the current stream. The legacy default stream has two handles, and the per-thread one is another
// stream in each thread.
bool current_stream(const Allocator& a, Stream& stream) {
  if (a.stream == nullptr) {
    if (!number_of(PyObject_CallNoArgs(a.parts.stream), stream)) return false;
  } else {
    stream = a.stream();
    if (PyErr_Occurred() != nullptr) return false;
  }
  if (stream == 1) stream = 0;
  if (stream == ThreadStream::kHandle) stream = ThreadStream::mine();
  return true;
}

const Held* ask_for_client(Allocator& a, std::int64_t index) {
  namespace nb = nanobind;
  if (index < 0 || index >= 1024) return PyErr_Format(PyExc_RuntimeError, "there is no CUDA device %lld", index), nullptr;
  PyObject* const number = PyLong_FromLongLong(index);
  if (number == nullptr) return nullptr;
  PyObject* const made = PyObject_CallOneArg(a.parts.client, number);
  Py_DECREF(number);
  Client* client = nullptr;
  if (made == nullptr) return nullptr;
  if (!nb::try_cast(nb::handle(made), client) || client == nullptr) {
    Py_DECREF(made);
    return PyErr_Format(PyExc_TypeError, "no client for device %lld", index), nullptr;
  }
  const auto at = static_cast<std::size_t>(index);
  if (a.held->size() <= at) a.held->resize(at + 1);
  Held& held = (*a.held)[at];
  if (held.client == nullptr) {
    held = {client, made};
  } else {  // another thread stored a client meanwhile
    Py_DECREF(made);
  }
  return &held;
}

const Held* client_of(Allocator& a, std::int64_t index) try {
  const auto at = static_cast<std::size_t>(index);
  if (at < a.held->size() && (*a.held)[at].client != nullptr) return &(*a.held)[at];
  return ask_for_client(a, index);
} catch (const std::exception&) {
  PyErr_NoMemory();
  return nullptr;
}

Address allocate(Client& client, std::size_t bytes, Stream stream) {
  if (const Address address = client.allocate_at_once(bytes, stream)) return address;
  PyThreadState* const state = PyEval_SaveThread();
  const Address address = client.allocate(bytes, stream);
  PyEval_RestoreThread(state);
  return address;
}

// Allocate memory for the owner, with retries. False: a Python error is set.
bool fill(Allocator& a, Owner& owner, std::size_t bytes, std::int64_t index) {
  for (bool again = false;; again = true) {
    {
      std::optional<Client::FirstAttempt> first;
      if (!again) first.emplace();
      owner.address = allocate(*owner.client, bytes, owner.stream);
    }
    if (owner.address != 0) return true;
    PyObject* const answer =
        PyObject_CallFunction(a.parts.shortage, "LnO", static_cast<long long>(index), static_cast<Py_ssize_t>(bytes), again ? Py_True : Py_False);
    const bool go_on = answer != nullptr && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    if (!go_on) {
      if (PyErr_Occurred() == nullptr) PyErr_NoMemory();
      return false;
    }
  }
}

// Return MemoryPointer(UnownedMemory(address, bytes, owner, index), 0).
PyObject* pointer_to(const Allocator& a, Address address, std::size_t bytes, PyObject* owner, std::int64_t index) {
  PyObject* arguments[5] = {nullptr, PyLong_FromSize_t(address), PyLong_FromSize_t(bytes), owner, PyLong_FromLongLong(index)};
  PyObject* memory = nullptr;
  if (arguments[1] != nullptr && arguments[2] != nullptr && arguments[4] != nullptr) {
    memory = PyObject_Vectorcall(a.parts.memory, arguments + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  }
  Py_XDECREF(arguments[1]);
  Py_XDECREF(arguments[2]);
  Py_XDECREF(arguments[4]);
  if (memory == nullptr) return nullptr;
  PyObject* const zero = PyLong_FromLong(0);
  PyObject* place[3] = {nullptr, memory, zero};
  PyObject* const pointer = PyObject_Vectorcall(a.parts.pointer, place + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  Py_DECREF(zero);
  Py_DECREF(memory);
  return pointer;
}

PyObject* call(PyObject* self, PyObject* const* arguments, std::size_t count, PyObject* names) {
  Allocator& a = *reinterpret_cast<Allocator*>(self);
  if (PyVectorcall_NARGS(count) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    return PyErr_Format(PyExc_TypeError, "an allocator takes one argument, a number of bytes"), nullptr;
  }
  const Py_ssize_t bytes = PyNumber_AsSsize_t(arguments[0], PyExc_OverflowError);
  if (bytes == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (bytes < 0) return PyErr_Format(PyExc_ValueError, "size %zd is negative", bytes), nullptr;
  std::int64_t index = 0;
  Stream stream = 0;
  if (!current_device(a, index)) return nullptr;
  if (bytes == 0) return pointer_to(a, 0, 0, Py_None, index);
  if (!current_stream(a, stream)) return nullptr;
  const Held* const held = client_of(a, index);
  if (held == nullptr) return nullptr;
  Owner* const owner = new_owner(*held->client, held->owner, stream);
  if (owner == nullptr) return nullptr;
  PyObject* const as_object = reinterpret_cast<PyObject*>(owner);
  PyObject* const pointer = fill(a, *owner, static_cast<std::size_t>(bytes), index)
                                ? pointer_to(a, owner->address, static_cast<std::size_t>(bytes), as_object, index)
                                : nullptr;
  Py_DECREF(as_object);
  return pointer;
}

PyObject* current(PyObject* self, PyObject*) {
  const Allocator& a = *reinterpret_cast<Allocator*>(self);
  std::int64_t index = 0;
  Stream stream = 0;
  if (!current_device(a, index) || !current_stream(a, stream)) return nullptr;
  return Py_BuildValue("LL", static_cast<long long>(index), static_cast<long long>(stream));
}

PyObject* device(PyObject* self, PyObject*) {
  std::int64_t index = 0;
  if (!current_device(*reinterpret_cast<Allocator*>(self), index)) return nullptr;
  return PyLong_FromLongLong(index);
}

// --- the type

template <class Act>
int each_part(Allocator& a, Act act) {
  for (PyObject** part : {&a.parts.memory, &a.parts.pointer, &a.parts.client, &a.parts.shortage, &a.parts.device, &a.parts.stream}) {
    if (const int stop = act(*part)) return stop;
  }
  for (Held& held : *a.held) {
    if (const int stop = act(held.owner)) return stop;
  }
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each_part(*reinterpret_cast<Allocator*>(self), [&](PyObject* part) {
    Py_VISIT(part);
    return 0;
  });
}

PyObject* refuse(PyObject*, PyObject* const*, std::size_t, PyObject*) {
  return PyErr_Format(PyExc_RuntimeError, "this allocator is gone"), nullptr;
}

int clear(PyObject* self) {
  Allocator& a = *reinterpret_cast<Allocator*>(self);
  a.call = refuse;
  for (Held& held : *a.held) held.client = nullptr;
  return each_part(a, [](PyObject*& part) {
    Py_CLEAR(part);
    return 0;
  });
}

void dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete reinterpret_cast<Allocator*>(self)->held;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Allocator, call), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
PyMethodDef methods[] = {
    {"current", current, METH_NOARGS, "(index of the current device, number of the current stream)."},
    {"device", device, METH_NOARGS, "The index of the current device."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {Py_tp_methods, methods},
                       {Py_tp_doc, const_cast<char*>("CuPy's allocator: takes a number of bytes, gives a MemoryPointer.")},
                       {0, nullptr}};
PyType_Spec spec = {"mempool._core.CupyAllocator", sizeof(Allocator), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

bool prepare() noexcept {
  if (allocator_type == nullptr) allocator_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return allocator_type != nullptr && prepare_owner();
}

bool knows(PyObject* object) {
  return PyCapsule_IsValid(object, kDeviceCapsule) != 0 || PyCapsule_IsValid(object, kStreamCapsule) != 0;
}

PyObject* make_allocator(const Parts& parts) {
  if (!prepare()) return nullptr;
  Allocator* const a = PyObject_GC_New(Allocator, allocator_type);
  if (a == nullptr) return nullptr;
  a->call = call;
  a->parts = parts;
  a->held = new std::vector<Held>;
  each_part(*a, [](PyObject* part) {
    Py_INCREF(part);
    return 0;
  });
  void* const device = PyCapsule_IsValid(parts.device, kDeviceCapsule) != 0 ? PyCapsule_GetPointer(parts.device, kDeviceCapsule) : nullptr;
  void* const stream = PyCapsule_IsValid(parts.stream, kStreamCapsule) != 0 ? PyCapsule_GetPointer(parts.stream, kStreamCapsule) : nullptr;
  a->device = reinterpret_cast<int (*)(int)>(device);
  a->stream = reinterpret_cast<std::intptr_t (*)()>(stream);
  PyObject_GC_Track(reinterpret_cast<PyObject*>(a));
  return reinterpret_cast<PyObject*>(a);
}

}  // namespace mempool::cupy
