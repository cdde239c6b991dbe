#include <cstdint>
#include <string>

#include <nanobind/stl/string.h>

#include "bindings/bindings.hpp"
#include "adapters/c_api.h"
#include "adapters/torch_cpu.hpp"
#include "adapters/torch_cuda.hpp"

namespace nb = nanobind;
using namespace mempool;

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
        nb::rv_policy::reference, "Who serves PyTorch's tensors on the CPU, through the companion.");
  m.def("torch_cpu_functions",
        [] {
          return nb::make_tuple(address_of(&mempool_torch_cpu_alloc), address_of(&mempool_torch_cpu_owns),
                                address_of(&mempool_torch_cpu_free), address_of(&mempool_out_of_memory));
        },
        "Addresses of what the companion calls: alloc, owns, free, out_of_memory (see c_api.h).");
  m.def("torch_room_function", [] { return address_of(&mempool_room); }, "Address of what the bypass asks: room (see c_api.h).");

  m.def("torch_cuda_hook",
        [](const std::string& driver) -> Hook& {
          torch_cuda::prepare(CudaDriver::open(driver));
          return torch_cuda::hook();
        },
        nb::arg("driver") = "libcuda.so.1", nb::rv_policy::reference,
        "Who serves PyTorch's tensors on CUDA devices. The first driver named is the one of what nobody serves.");
  m.def("torch_cuda_functions", &torch_cuda_functions,
        "Addresses of what PyTorch calls, by the names of its setters, and \"alloc\" and \"free\".");
  m.def("torch_cuda_refuse_by",
        [](std::uintptr_t function) { torch_cuda::set_refusal(reinterpret_cast<void (*)(const char*)>(function)); },
        nb::arg("function"), "The address of what throws when memory runs out; 0: nothing, and it is a RuntimeError.");
  m.def("torch_cuda_plain", [](int device) { return torch_cuda::plain_client(device); }, nb::arg("device"),
        nb::rv_policy::reference, "Who serves what no pool of ours does on this device; None: nobody has had to.");
}
