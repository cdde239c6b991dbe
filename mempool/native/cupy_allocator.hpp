// What CuPy is given as its allocator: a Python object that makes a MemoryPointer of a size, on CuPy's current device and
// stream. The memory is held by an owner that CuPy keeps with it, and goes back, on the stream it was made on, when that is
// destroyed: no Python code runs then, whichever thread it is, in the middle of a garbage collection, and while the
// interpreter shuts down. An owner keeps its client, and so the pool, in existence.
//
// The pool's lock is waited for, and the device dealt with, without the interpreter's lock: a function that the program has
// queued on a stream may need that to come to its end.
#pragma once

#include <Python.h>

namespace mempool::cupy {

// Adds the two types to the process, once. False: a Python error is set.
bool prepare() noexcept;

// Where CuPy's current device or stream is read: a capsule of the C function, or a callable.
struct Parts {
  PyObject* memory;    // cupy.cuda.UnownedMemory
  PyObject* pointer;   // cupy.cuda.MemoryPointer
  PyObject* client;    // of a device's index, its _core.Client; called once for each
  PyObject* shortage;  // (index, bytes, tried again): true, and it is tried again; else it raises
  PyObject* device;    // capsule "int (int __pyx_skip_dispatch)"
  PyObject* stream;    // capsule "intptr_t (void)"
};

// Whether it is a capsule of either type.
bool knows(PyObject* object);

// A new reference, or null with a Python error. The parts are borrowed.
PyObject* make_allocator(const Parts& parts);

}  // namespace mempool::cupy
