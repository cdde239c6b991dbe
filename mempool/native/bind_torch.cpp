#include <cstdint>

#include "bindings.hpp"
#include "c_api.h"
#include "torch_cpu.hpp"

namespace nb = nanobind;
using namespace mempool;

namespace {

template <class Function>
std::uintptr_t address_of(Function* function) {
  return reinterpret_cast<std::uintptr_t>(function);
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
}
