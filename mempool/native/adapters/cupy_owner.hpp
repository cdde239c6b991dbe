// The object that CuPy holds while using a buffer; the buffer is freed when the object is destroyed. See
// cupy_allocator.hpp.
#pragma once

#include <Python.h>

#include "core/client.hpp"

namespace mempool::cupy {

struct Owner {
  PyObject_HEAD
  PyObject* keeps;  // the client's Python object
  Client* client;
  Address address;  // 0: no buffer yet, and none is freed
  Stream stream;    // stream of the allocation and of the free
};

bool prepare_owner() noexcept;
// Return an owner without an address: a new reference, or null with a Python error. Triggers no garbage
// collection.
Owner* new_owner(Client& client, PyObject* keeps, Stream stream) noexcept;

}  // namespace mempool::cupy
