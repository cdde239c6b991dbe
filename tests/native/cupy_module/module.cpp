// CuPy's allocator with the core below it as a module of Python's, for cupy_calls.py: built with sanitizers, which do not
// know of what the packages' own module does.
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "core/client.hpp"
#include "devices/cuda_device.hpp"
#include "adapters/cupy_allocator.hpp"
#include "core/pattern.hpp"

using namespace mempool;

namespace {

constexpr const char* kClient = "client";

// --- what is current, as CuPy's modules export it

thread_local int current_device = 0;
thread_local std::intptr_t current_stream = 0;

int device_of_thread(int) { return current_device; }
std::intptr_t stream_of_thread() { return current_stream; }

PyObject* set_current(PyObject*, PyObject* arguments) {
  long long stream = 0;
  if (PyArg_ParseTuple(arguments, "iL", &current_device, &stream) == 0) return nullptr;
  current_stream = static_cast<std::intptr_t>(stream);
  Py_RETURN_NONE;
}

// --- clients, each with a pool of its own

CudaKind kind_of(const char* name) {
  unsigned kind = 0;
  for (const char* const known : kCudaKindNames) {
    if (std::strcmp(known, name) == 0) return static_cast<CudaKind>(kind);
    ++kind;
  }
  throw std::invalid_argument(name);
}

Client* client_in(PyObject* capsule) { return static_cast<Client*>(PyCapsule_GetPointer(capsule, kClient)); }

PyObject* make_client(PyObject*, PyObject* arguments) {
  const char* driver = nullptr;
  const char* kind = nullptr;
  int index = 0;
  if (PyArg_ParseTuple(arguments, "sis", &driver, &index, &kind) == 0) return nullptr;
  try {
    auto device = std::make_unique<CudaDevice>(index, CudaDriver::open(driver), kind_of(kind));
    auto pool = std::make_shared<Pool>(std::move(device), PoolOptions{});
    return PyCapsule_New(new Client(std::move(pool), "cupy"), kClient, [](PyObject* capsule) { delete client_in(capsule); });
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what()), nullptr;
  }
}

PyObject* mark(PyObject*, PyObject* capsule) {
  Client* const client = client_in(capsule);
  if (client == nullptr) return nullptr;
  client->mark(Mark::step);
  Py_RETURN_NONE;
}

// (client, ((bytes, offset), ...)): one iteration on the default stream of the first thread, between two marks.
PyObject* load(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  PyObject* buffers = nullptr;
  if (PyArg_ParseTuple(arguments, "OO!", &capsule, &PyTuple_Type, &buffers) == 0) return nullptr;
  Client* const client = client_in(capsule);
  if (client == nullptr) return nullptr;
  auto pattern = std::make_unique<Pattern>();
  Table& table = pattern->tables.emplace_back();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(buffers); ++i) {
    unsigned long long bytes = 0, offset = 0;
    if (PyArg_ParseTuple(PyTuple_GET_ITEM(buffers, i), "KK", &bytes, &offset) == 0) return nullptr;
    table.sizes.push_back(bytes);
    table.slots.emplace_back().offset = offset;
    pattern->arena_bytes = std::max<std::size_t>(pattern->arena_bytes, offset + bytes);
  }
  client->load(nullptr, std::move(pattern));
  Py_RETURN_NONE;
}

// (planned addresses handed out, buffers alive, frees of what is not alive)
PyObject* counts(PyObject*, PyObject* capsule) {
  Client* const client = client_in(capsule);
  if (client == nullptr) return nullptr;
  const ClientStats stats = client->stats();
  return Py_BuildValue("KnK", static_cast<unsigned long long>(stats.outcomes[0]), static_cast<Py_ssize_t>(stats.blocks.current),
                       static_cast<unsigned long long>(stats.double_frees + stats.foreign_frees));
}

PyObject* give_back(PyObject*, PyObject* capsule) {
  Client* const client = client_in(capsule);
  if (client == nullptr) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  client->give_back(false);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* live_clients(PyObject*, PyObject*) { return PyLong_FromLongLong(Client::count()); }

// (memory, pointer, client, shortage): as cupy_allocator.hpp has them.
PyObject* allocator(PyObject*, PyObject* arguments) {
  cupy::Parts parts{};
  if (PyArg_ParseTuple(arguments, "OOOO", &parts.memory, &parts.pointer, &parts.client, &parts.shortage) == 0) return nullptr;
  parts.device = PyCapsule_New(reinterpret_cast<void*>(&device_of_thread), "int (int __pyx_skip_dispatch)", nullptr);
  parts.stream = PyCapsule_New(reinterpret_cast<void*>(&stream_of_thread), "intptr_t (void)", nullptr);
  PyObject* const made = cupy::make_allocator(parts);
  Py_DECREF(parts.device);
  Py_DECREF(parts.stream);
  return made;
}

PyMethodDef methods[] = {{"set_current", set_current, METH_VARARGS, nullptr},
                         {"client", make_client, METH_VARARGS, nullptr},
                         {"mark", mark, METH_O, nullptr},
                         {"load", load, METH_VARARGS, nullptr},
                         {"counts", counts, METH_O, nullptr},
                         {"give_back", give_back, METH_O, nullptr},
                         {"live_clients", live_clients, METH_NOARGS, nullptr},
                         {"allocator", allocator, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "cupy_module", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cupy_module() { return PyModule_Create(&module); }
