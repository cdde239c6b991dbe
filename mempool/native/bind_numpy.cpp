#include <string>

#include "bindings.hpp"
#include "numpy_hook.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mempool;

namespace {

// NumPy's C interface is a table of addresses (numpy/__multiarray_api.h); its indices never change.
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

void release_reclaimed() {
  for (void* owner : numpy_hook::reclaim()) Py_DECREF(static_cast<PyObject*>(owner));
}

void serve(Client& client, Checked* checked) {
  numpy_hook::Handler& handler = default_handler();
  if (!numpy_hook::attach(handler)) {
    const std::string name(handler.name, strnlen(handler.name, sizeof handler.name));
    throw nb::import_error(("mempool: NumPy's default data handler is '" + name + "', version " +
                            std::to_string(handler.version) + "; we know 'default_allocator', version 1")
                               .c_str());
  }
  release_reclaimed();
  // Arrays may be alive when the interpreter ends, and then their client is too.
  nb::set_leak_warnings(false);
  nb::tuple owner = nb::make_tuple(nb::find(client), checked == nullptr ? nb::none() : nb::find(*checked));
  const numpy_hook::Served served = numpy_hook::serve(client, checked, owner.ptr());
  if (served == numpy_hook::Served::no) throw std::runtime_error("another client serves NumPy");
  if (served == numpy_hook::Served::anew) owner.release();
}

}  // namespace

void bind_numpy(nb::module_& m) {
  m.def("numpy_serve", &serve, "client"_a, "checked"_a.none() = nb::none(),
        "This client serves NumPy's arrays of all threads from now on, through `checked` if that is given.");
  m.def("numpy_stop", [] { numpy_hook::stop(); release_reclaimed(); },
        "NumPy allocates as without us; arrays of the client that served go back to it when they are freed.");
  m.def("numpy_serving", [] { return numpy_hook::serving() != nullptr; });
  m.def("numpy_held", [] { release_reclaimed(); return numpy_hook::held(); },
        "How many clients serve or have arrays alive.");
}
