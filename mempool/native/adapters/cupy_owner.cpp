#include "adapters/cupy_owner.hpp"

namespace mempool::cupy {
namespace {

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
void dealloc(PyObject* self) {
  const Owner& owner = *reinterpret_cast<Owner*>(self);
  PyTypeObject* const type = Py_TYPE(self);
  if (owner.address != 0) give_back(owner);
  let_go(owner);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {0, nullptr}};
PyType_Spec spec = {"mempool._core.CupyOwner", sizeof(Owner), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

bool prepare_owner() noexcept {
  if (owner_type == nullptr) owner_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return owner_type != nullptr;
}

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

}  // namespace mempool::cupy
