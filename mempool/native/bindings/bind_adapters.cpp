// Bindings of the adapters, by which frameworks allocate from a client.
#include <cstdint>
#include <cstdlib>
#include <string>

#include <nanobind/stl/string.h>

#include "adapters/c_api.h"
#include "adapters/cupy_allocator.hpp"
#include "adapters/hook.hpp"
#include "adapters/numpy_hook.hpp"
#include "adapters/torch_cuda.hpp"
#include "adapters/torch_guest.hpp"
#include "bindings/bindings.hpp"
#include "core/pool.hpp"
#include "core/threads.hpp"
#include "devices/cuda_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

void release_reclaimed(Hook& hook) {
  for (void* owner : hook.reclaim()) Py_DECREF(static_cast<PyObject*>(owner));
}

void serve(Hook& hook, Client& client, Checked* checked, bool instead) {
  release_reclaimed(hook);
  // Buffers may be live when the interpreter ends, and their client with them.
  nb::set_leak_warnings(false);
  nb::tuple owner = nb::make_tuple(nb::find(client), checked == nullptr ? nb::none() : nb::find(*checked));
  const Hook::Served served = hook.serve(client, checked, owner.ptr(), instead);
  if (served == Hook::Served::no) throw std::runtime_error("another client serves this framework");
  if (served == Hook::Served::anew) owner.release();
}

}  // namespace

void bind_hook(nb::module_& m) {
  nb::class_<Hook>(m, "Hook", "Allocator of a framework, served by one client at a time.")
      .def("serve", &serve, "client"_a, "checked"_a.none() = nb::none(), "instead"_a = false,
           "Let the client serve all threads from now on, through `checked` if given. `instead`: replace another "
           "client.")
      .def("stop", [](Hook& hook) { hook.stop(); release_reclaimed(hook); },
           "Return to the framework's own allocator. Buffers of the former client return to that client when freed.")
      .def("serving", [](Hook& hook) { return hook.serving() != nullptr; })
      .def("held", [](Hook& hook) { release_reclaimed(hook); return hook.held(); },
           "Number of clients that serve or have live buffers.");
}

namespace {

// NumPy's C interface is a table of addresses (numpy/__multiarray_api.h) with fixed indices.
constexpr std::size_t kAbiVersion = 0, kFeatureVersion = 211, kDefaultHandler = 306;
constexpr unsigned kFirstWithHandlers = 0xf;  // NumPy 1.22

void** numpy_api() {
  nb::object umath;
  try {
    umath = nb::module_::import_("numpy._core._multiarray_umath");
  } catch (nb::python_error&) {
    umath = nb::module_::import_("numpy.core._multiarray_umath");
  }
  const nb::object capsule = nb::getattr(umath, "_ARRAY_API");
  auto** const api = static_cast<void**>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (api == nullptr) throw nb::python_error();
  const unsigned abi = reinterpret_cast<unsigned (*)()>(api[kAbiVersion])();
  const unsigned feature = reinterpret_cast<unsigned (*)()>(api[kFeatureVersion])();
  if ((abi != 0x01000009 && abi != 0x02000000) || feature < kFirstWithHandlers) {
    throw nb::import_error("mempool: this NumPy has no data allocator that we know; 1.26 and later do");
  }
  return api;
}

numpy_hook::Handler& default_handler() {
  PyObject* const capsule = *static_cast<PyObject**>(numpy_api()[kDefaultHandler]);
  auto* const handler = static_cast<numpy_hook::Handler*>(PyCapsule_GetPointer(capsule, "mem_handler"));
  if (handler == nullptr) throw nb::python_error();
  return *handler;
}

Hook& attached() {
  numpy_hook::Handler& handler = default_handler();
  if (!numpy_hook::attach(handler)) {
    const std::string name(handler.name, strnlen(handler.name, sizeof handler.name));
    throw nb::import_error(("mempool: NumPy's default data handler is '" + name + "', version " +
                            std::to_string(handler.version) + "; we know 'default_allocator', version 1")
                               .c_str());
  }
  return numpy_hook::hook();
}

}  // namespace

void bind_numpy(nb::module_& m) {
  m.def("numpy_hook", &attached, nb::rv_policy::reference,
        "Return the hook of NumPy's arrays; NumPy's default handler calls the pool's functions from now on.");
}

namespace {

template <class Function>
std::uintptr_t address_of(Function* function) {
  return reinterpret_cast<std::uintptr_t>(function);
}

// Return the functions' addresses, named like the setters of torch._C._CUDAPluggableAllocator, plus "alloc"
// and "free".
nb::typed<nb::dict, nb::str, int> torch_cuda_functions() {
  nb::typed<nb::dict, nb::str, int> functions;
  functions["alloc"] = address_of(&torch_cuda::allocate);
  functions["free"] = address_of(&torch_cuda::free);
  functions["set_init_fn"] = address_of(&torch_cuda::init);
  functions["set_reset_fn"] = address_of(&torch_cuda::empty_cache);
  functions["set_memory_fraction_fn"] = address_of(&torch_cuda::set_memory_fraction);
  functions["set_base_alloc_fn"] = address_of(&torch_cuda::base_of);
  functions["set_record_stream_fn"] = address_of(&torch_cuda::record_stream);
  functions["set_begin_allocate_to_pool"] = address_of(&torch_cuda::begin_pool);
  functions["set_end_allocate_to_pool_fn"] = address_of(&torch_cuda::end_pool);
  functions["set_release_pool"] = address_of(&torch_cuda::release_pool);
  return functions;
}

}  // namespace

void bind_torch(nb::module_& m) {
  m.def("torch_cpu_hook",
        []() -> Hook& {
          torch_cpu::hook().prepare();
          return torch_cpu::hook();
        },
        nb::rv_policy::reference, "Return the hook of PyTorch's CPU tensors, called through the companion.");
  m.def("torch_cpu_functions",
        [] {
          return nb::make_tuple(address_of(&mempool_torch_cpu_alloc), address_of(&mempool_torch_cpu_owns),
                                address_of(&mempool_torch_cpu_free), address_of(&mempool_out_of_memory));
        },
        "Return the addresses of the companion's functions: alloc, owns, free, out_of_memory (see c_api.h).");
  m.def("torch_room_function", [] { return address_of(&mempool_room); },
        "Return the address of the bypass's function: room (see c_api.h).");

  m.def("torch_misses_function", [] { return address_of(&mempool_misses); },
        "Return the address of the function that counts a client's misses (see c_api.h).");

  m.def("torch_unplanned_function", [] { return address_of(&mempool_unplanned_bytes); },
        "Return the address of the function that looks at a client's next requests (see c_api.h).");

  m.def("torch_guest_hook",
        []() -> Hook& {
          torch_guest::hook().prepare();
          return torch_guest::hook();
        },
        nb::rv_policy::reference, "Return the hook of the guest in front of PyTorch's own CUDA allocator.");
  m.def("torch_guest_functions", [] { return address_of(&torch_guest::functions()); },
        "Return the address of the table of the guest's functions (see torch_guest.hpp).");
  m.def("torch_guest_stop",
        [] {
          torch_guest::stop();
          release_reclaimed(torch_guest::hook());
        },
        "Let PyTorch's own allocator serve everything from now on; planned tensors stay valid.");
  m.def("torch_cuda_hook",
        [](const std::string& driver) -> Hook& {
          torch_cuda::prepare(CudaDriver::open(driver));
          return torch_cuda::hook();
        },
        nb::arg("driver") = "libcuda.so.1", nb::rv_policy::reference,
        "Return the hook of PyTorch's CUDA tensors. The first driver named also serves requests that no client "
        "serves.");
  m.def("torch_cuda_functions", &torch_cuda_functions,
        "Return the addresses of the functions for PyTorch, by the names of PyTorch's setters, and \"alloc\" and "
        "\"free\".");
  m.def("torch_cuda_refuse_by",
        [](std::uintptr_t function) { torch_cuda::set_refusal(reinterpret_cast<void (*)(const char*)>(function)); },
        nb::arg("function"), "Set the address of the function that throws when memory runs out; 0: a "
                             "RuntimeError is thrown.");
  m.def("torch_cuda_plain", [](int device) { return torch_cuda::plain_client(device); }, nb::arg("device"),
        nb::rv_policy::reference, "Return the client of requests that no pool serves on this device; None: no "
                                  "such request occurred.");
}

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
        "Return an allocator for cupy.cuda.set_allocator; see cupy_allocator.hpp for the parts.",
        nb::sig("def cupy_allocator(memory: typing.Any, pointer: typing.Any, client: typing.Any, shortage: typing.Any, device: "
                "typing.Any, stream: typing.Any) -> typing.Any"));
  m.def("cupy_knows", [](nb::handle object) { return cupy::knows(object.ptr()); }, "object"_a,
        "Return true for a capsule of a C function that the allocator can call.",
        nb::sig("def cupy_knows(object: typing.Any) -> bool"));
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  m.def("cupy_hold_devices", [] { CudaDevice::begin_capture(); }, released,
        "Let no call wait for a whole CUDA device from now on, which would break captures of its streams.");
  m.def("cupy_release_devices", [] { CudaDevice::end_capture(); }, released, "End one hold.");
  m.def("cupy_capture", [](Pool& pool, Stream stream) { return pool.source().device().capture(stream); }, "pool"_a, "stream"_a, released,
        "Return the driver's number of the stream's capture; 0: none.");
  m.def("cupy_goes_on", &goes_on, "pool"_a, "graph"_a, "stream"_a, released,
        "Return true if the capture that began there continues.");
  m.def("cupy_begin_capture", &begin_capture, "pool"_a, "graph"_a, released,
        "Keep memory requested on the capture's streams for the graph, until the capture ends.");
  m.def("cupy_end_capture", &end_capture, "pool"_a, "graph"_a, released);
  m.def("cupy_release_capture", &release_capture, "pool"_a, "graph"_a, released,
        "Release the memory of a destroyed graph.");
}
