// Binding of the table of living buffers.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings.hpp"
#include "living.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace traces;

namespace {

// Reports the kind of fault only: the caller knows the address.
template <class Work>
auto refusing(const Work& work) {
  try {
    return work();
  } catch (const Fault& fault) {
    throw Refused(fault.kind);
  }
}

}  // namespace

void bind_living(nb::module_& m) {
  nb::class_<Living>(m, "Living", "Which buffer lives at which address of a device; what cannot be is Refused.")
      .def(nb::init<>())
      .def(
          "alloc",
          [](Living& self, int64_t address, int64_t size, int64_t buffer) {
            refusing([&] { self.alloc(address, size, buffer); });
          },
          "address"_a, "size"_a, "buffer"_a, "A buffer, by its number, is born.")
      .def(
          "free",
          [](Living& self, int64_t address, int64_t size, int64_t unknown) {
            return refusing([&] { return self.free(address, size, unknown); });
          },
          "address"_a, "size"_a, "unknown"_a,
          "The buffer that is freed; `unknown`, of so many bytes, where none was ever seen there.");
}
