// NumPy arrays of values made by native code.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>
#include <vector>

template <class T>
using Array = nanobind::ndarray<nanobind::numpy, const T, nanobind::ndim<1>>;

// Return an array that owns the values' memory, read as Ts, without a copy.
template <class T, class Value>
Array<T> viewed_as(std::vector<Value> values) {
  auto kept = std::make_unique<std::vector<Value>>(std::move(values));
  const std::size_t count = kept->size() * sizeof(Value) / sizeof(T);
  const void* data = kept->data();
  const nanobind::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<Value>*>(p); });
  kept.release();
  return Array<T>(data, {count}, owner);
}

template <class T>
Array<T> as_array(std::vector<T> values) {
  return viewed_as<T>(std::move(values));
}
