// The functions of the pluggable allocator as PyTorch calls them: it is given addresses, which it casts to function types
// of its own and keeps in std::functions. Declared here as in its CUDAPluggableAllocator.h, and not taken from the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "adapters/torch_cuda.hpp"

typedef struct CUstream_st* cudaStream_t;

namespace stress {

using MempoolId = std::pair<unsigned long long, unsigned long long>;

template <class FuncType, class Function>
std::function<FuncType> given(Function* function) {
  const auto address = reinterpret_cast<std::uintptr_t>(function);
  return reinterpret_cast<FuncType*>(address);
}

struct TorchCalls {
  std::function<void*(std::size_t, int, cudaStream_t)> alloc =
      given<void*(std::size_t, int, cudaStream_t)>(&mempool::torch_cuda::allocate);
  std::function<void(void*, std::size_t, int, cudaStream_t)> free =
      given<void(void*, std::size_t, int, cudaStream_t)>(&mempool::torch_cuda::free);
  std::function<void(int)> init = given<void(int)>(&mempool::torch_cuda::init);
  std::function<void()> reset = given<void()>(&mempool::torch_cuda::empty_cache);
  std::function<void(double, int)> memory_fraction = given<void(double, int)>(&mempool::torch_cuda::set_memory_fraction);
  std::function<void*(void*, std::size_t*)> base_alloc = given<void*(void*, std::size_t*)>(&mempool::torch_cuda::base_of);
  std::function<void(void*, cudaStream_t)> record_stream =
      given<void(void*, cudaStream_t)>(&mempool::torch_cuda::record_stream);
  std::function<void(int, MempoolId, std::function<bool(cudaStream_t)>)> begin_allocate_to_pool =
      given<void(int, MempoolId, std::function<bool(cudaStream_t)>)>(&mempool::torch_cuda::begin_pool);
  std::function<void(int, MempoolId)> end_allocate_to_pool = given<void(int, MempoolId)>(&mempool::torch_cuda::end_pool);
  std::function<void(int, MempoolId)> release_pool = given<void(int, MempoolId)>(&mempool::torch_cuda::release_pool);
};

}  // namespace stress
