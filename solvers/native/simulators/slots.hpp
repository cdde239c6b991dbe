// Container of values with small, reused indices: the handles of allocators.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace simulators {

template <class T>
class Slots {
 public:
  int64_t add(T value) {
    if (unused_.empty()) {
      values_.push_back(std::move(value));
      return static_cast<int64_t>(values_.size()) - 1;
    }
    const int64_t at = unused_.back();
    unused_.pop_back();
    values_[at] = std::move(value);
    return at;
  }

  void remove(int64_t at) { unused_.push_back(at); }

  // The reference is valid until the next add().
  T& operator[](int64_t at) { return values_[at]; }
  const T& operator[](int64_t at) const { return values_[at]; }

 private:
  std::vector<T> values_;
  std::vector<int64_t> unused_;
};

}  // namespace simulators
