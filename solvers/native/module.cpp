// Binding of solvers' native code.
#include <nanobind/nanobind.h>

NB_MODULE(_core, m) {
  m.doc() = "Native part of solvers.";
}
