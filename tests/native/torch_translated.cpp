// The pluggable allocator's function called as PyTorch calls it, with what it throws translated as PyTorch translates it.
// Built against the installed torch; loaded with ctypes.PyDLL.
#include <torch/csrc/Exceptions.h>

#include <functional>

typedef struct CUstream_st* cudaStream_t;

extern "C" __attribute__((visibility("default"))) PyObject* allocate(void* address, size_t bytes, int device,
                                                                     cudaStream_t stream) {
  HANDLE_TH_ERRORS
  using FuncType = void*(size_t, int, cudaStream_t);
  const std::function<FuncType> function = reinterpret_cast<FuncType*>(address);
  return PyLong_FromVoidPtr(function(bytes, device, stream));
  END_HANDLE_TH_ERRORS
}
