// What CuPy's allocator takes of nanobind, which need not be there: a client's Python object is a capsule here.
#pragma once

#include <Python.h>

namespace nanobind {

struct handle {
  PyObject* object;
  explicit handle(PyObject* of) : object(of) {}
};

template <class Class>
bool try_cast(handle of, Class*& found) {
  found = static_cast<Class*>(PyCapsule_GetPointer(of.object, "client"));
  PyErr_Clear();
  return found != nullptr;
}

}  // namespace nanobind
