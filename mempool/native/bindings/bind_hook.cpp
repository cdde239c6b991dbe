#include "bindings/bindings.hpp"
#include "adapters/hook.hpp"

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
  nb::class_<Hook>(m, "Hook", "A framework's allocator, which one client at a time serves.")
      .def("serve", &serve, "client"_a, "checked"_a.none() = nb::none(), "instead"_a = false,
           "This client serves all threads from now on, through `checked` if that is given; `instead` of another one.")
      .def("stop", [](Hook& hook) { hook.stop(); release_reclaimed(hook); },
           "The framework allocates as without us; buffers of the client that served go back to it when they are freed.")
      .def("serving", [](Hook& hook) { return hook.serving() != nullptr; })
      .def("held", [](Hook& hook) { release_reclaimed(hook); return hook.held(); },
           "How many clients serve or have buffers alive.");
}
