// The parts of the native module of traces.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

void bind_snapshots(nanobind::module_& m);

// Returns an array of NumPy that owns the values.
template <class Number>
nanobind::ndarray<nanobind::numpy, Number, nanobind::ndim<1>> array_of(std::vector<Number>&& values) {
  auto* kept = new std::vector<Number>(std::move(values));
  nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Number>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}
