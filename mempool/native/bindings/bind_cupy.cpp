#include "bindings/bindings.hpp"
#include "devices/cuda_device.hpp"
#include "adapters/cupy_allocator.hpp"
#include "core/pool.hpp"
#include "core/thread_stream.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

nb::object cupy_allocator(nb::handle memory, nb::handle pointer, nb::handle client, nb::handle shortage, nb::handle device,
                          nb::handle stream) {
  // Arrays may be live when the interpreter ends, and their pool with them.
  nb::set_leak_warnings(false);
  PyObject* const made =
      cupy::make_allocator({memory.ptr(), pointer.ptr(), client.ptr(), shortage.ptr(), device.ptr(), stream.ptr()});
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// Return an id that other clients of the memory, which choose their own graph ids, do not use.
GraphPools::Id id_of(std::uint64_t graph) { return {~std::uint64_t{0}, graph}; }

// Serve requests on streams that are part of this capture from the graph's memory.
void begin_capture(Pool& pool, std::uint64_t graph) {
  Device& device = pool.source().device();
  const Guarded guard(pool.lock);
  pool.begin_graph(id_of(graph), [&device, graph](Stream stream) { return device.capture(stream) == graph; });
}

void end_capture(Pool& pool, std::uint64_t graph) {
  const Guarded guard(pool.lock);
  pool.end_graph(id_of(graph));
}

void release_capture(Pool& pool, std::uint64_t graph) {
  const Guarded guard(pool.lock);
  pool.release_graph(id_of(graph));
}

// Return true while the capture continues. `stream`: where the capture began. The capture of another thread's
// default stream counts as continuing until that thread ends, because only that thread can query the stream,
// and no thread ends the capture afterwards.
bool goes_on(Pool& pool, std::uint64_t graph, Stream stream) {
  if (ThreadStream::elsewhere(stream)) return !ThreadStream::ended(stream);
  Device& device = pool.source().device();
  if (!device.capturing(stream)) return false;
  const std::uint64_t now = device.capture(stream);
  return now == graph || now == 0;
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
  m.def("cupy_hold_devices", [] { CudaDevice::begin_capture(); }, released,
        "Nobody waits for a whole CUDA device from now on, which would break captures of its streams.");
  m.def("cupy_release_devices", [] { CudaDevice::end_capture(); }, released, "Once for each hold.");
  m.def("cupy_capture", [](Pool& pool, Stream stream) { return pool.source().device().capture(stream); }, "pool"_a, "stream"_a, released,
        "The driver's number of the capture that the stream is part of; 0: none.");
  m.def("cupy_goes_on", &goes_on, "pool"_a, "graph"_a, "stream"_a, released, "Whether the capture that began there does.");
  m.def("cupy_begin_capture", &begin_capture, "pool"_a, "graph"_a, released,
        "Until the end of this capture, what is asked for on its streams is kept for its graph.");
  m.def("cupy_end_capture", &end_capture, "pool"_a, "graph"_a, released);
  m.def("cupy_release_capture", &release_capture, "pool"_a, "graph"_a, released, "Its graph is gone.");
}
