#include "bindings.hpp"

void bind_numpy(nanobind::module_&) {}
