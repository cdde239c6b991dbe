// What CuPy holds for as long as it uses a buffer: its end is the buffer's. See cupy_allocator.hpp.
#pragma once

#include <Python.h>

#include "client.hpp"

namespace mempool::cupy {

struct Owner {
  PyObject_HEAD
  PyObject* keeps;  // the client's Python object
  Client* client;
  Address address;  // 0: none yet, and nothing is given back
  Stream stream;    // where it was made, and where it goes back
};

bool prepare_owner() noexcept;
// Without an address. A new reference, or null with a Python error. Collects no garbage.
Owner* new_owner(Client& client, PyObject* keeps, Stream stream) noexcept;

}  // namespace mempool::cupy
