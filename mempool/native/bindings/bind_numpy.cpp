#include <cstdlib>
#include <string>

#include "bindings/bindings.hpp"
#include "adapters/numpy_hook.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

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
        "Who serves NumPy's arrays, whose default handler has our functions from now on.");
}
