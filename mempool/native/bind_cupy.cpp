#include "bindings.hpp"
#include "cuda_device.hpp"
#include "cupy_allocator.hpp"
#include "pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

nb::object cupy_allocator(nb::handle memory, nb::handle pointer, nb::handle client, nb::handle shortage, nb::handle device,
                          nb::handle stream) {
  // Arrays may be alive when the interpreter ends, and then their pool is too.
  nb::set_leak_warnings(false);
  PyObject* const made =
      cupy::make_allocator({memory.ptr(), pointer.ptr(), client.ptr(), shortage.ptr(), device.ptr(), stream.ptr()});
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// What is asked for on streams that are being captured is the graph's. `index`: of the CUDA device, or none.
void begin_capture(Pool& pool, std::uint64_t number, int index) {
  Device& device = pool.source().device();
  {
    const Guarded guard(pool.lock);
    pool.begin_graph({0, number}, [&device](Stream stream) { return stream != 0 && device.capturing(stream); });
  }
  if (index >= 0) CudaDevice::begin_capture(index);
}

void end_capture(Pool& pool, std::uint64_t number, int index) {
  if (index >= 0) CudaDevice::end_capture(index);
  const Guarded guard(pool.lock);
  pool.end_graph({0, number});
}

void release_capture(Pool& pool, std::uint64_t number) {
  const Guarded guard(pool.lock);
  pool.release_graph({0, number});
}

}  // namespace

void bind_cupy(nb::module_& m) {
  m.def("cupy_allocator", &cupy_allocator, "memory"_a, "pointer"_a, "client"_a, "shortage"_a, "device"_a, "stream"_a,
        "What cupy.cuda.set_allocator takes; see cupy_allocator.hpp for the parts.",
        nb::sig("def cupy_allocator(memory: typing.Any, pointer: typing.Any, client: typing.Any, shortage: typing.Any, device: "
                "typing.Any, stream: typing.Any) -> typing.Any"));
  m.def("cupy_knows", [](nb::handle object) { return cupy::knows(object.ptr()); }, "object"_a,
        "Whether it is a capsule of a C function that the allocator can call.",
        nb::sig("def cupy_knows(object: typing.Any) -> bool"));
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  m.def("cupy_begin_capture", &begin_capture, "pool"_a, "number"_a, "index"_a, released,
        "Until the end of this capture, what is asked for on streams that are captured is kept for its graph.");
  m.def("cupy_end_capture", &end_capture, "pool"_a, "number"_a, "index"_a, released);
  m.def("cupy_release_capture", &release_capture, "pool"_a, "number"_a, released, "Its graph is gone.");
}
