// Conversion of NumPy columns from and to native vectors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "packing/large_pages.hpp"

template <class T>
using In = nanobind::ndarray<const T, nanobind::numpy, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Into = nanobind::ndarray<int64_t, nanobind::numpy, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Out = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

template <class T>
std::vector<T> vector_of(const In<T>& array) {
  std::vector<T> values;
  packing::reserve(values, array.shape(0));
  values.assign(array.data(), array.data() + array.shape(0));
  return values;
}

template <class T>
Out<T> array_of(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Out<T>(kept->data(), {kept->size()}, owner);
}

inline void need(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}
