// CuPy's allocator: a Python object that makes a MemoryPointer of a size, on CuPy's current device and
// stream. CuPy holds an owner object for each memory; when the owner is destroyed, the memory is freed on the
// stream of its allocation. No Python code runs then, so that this works in any thread, in the middle of a
// garbage collection, and during the interpreter's shutdown. An owner keeps the client, and thus the pool, in
// existence.
//
// The interpreter's lock is released while waiting for the pool's lock and while using the device: a function
// that the program has queued on a stream may need the interpreter's lock to complete.
#pragma once

#include <Python.h>

namespace mempool::cupy {

// Add the two types to the process, once. False: a Python error is set.
bool prepare() noexcept;

// References for the allocator. CuPy's current device and stream are each read by a capsule of the C
// function, or by a callable.
struct Parts {
  PyObject* memory;    // cupy.cuda.UnownedMemory
  PyObject* pointer;   // cupy.cuda.MemoryPointer
  PyObject* client;    // called once per device with the index; returns the device's _core.Client
  PyObject* shortage;  // called with (index, bytes, tried again): true: retry; otherwise raises
  PyObject* device;    // capsule "int (int __pyx_skip_dispatch)"
  PyObject* stream;    // capsule "intptr_t (void)"
};

// Return true for a capsule of either type.
bool knows(PyObject* object);

// Return a new reference, or null with a Python error. The parts are borrowed.
PyObject* make_allocator(const Parts& parts);

}  // namespace mempool::cupy
