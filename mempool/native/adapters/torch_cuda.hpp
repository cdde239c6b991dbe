// Memory of PyTorch's CUDA tensors: the functions for the CUDAPluggableAllocator, with the signatures that
// PyTorch expects. PyTorch calls them from any thread, with or without the interpreter's lock, also after
// Python has ended; no Python runs here.
//
// One client at a time serves one device: the device of the client's creation, or the first device requested.
// Requests for another device, or without a serving client, go to a plain pool of that device, which plans
// nothing and exists for ever, because PyTorch cannot change the allocator once CUDA is in use.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "devices/cuda_driver.hpp"
#include "adapters/hook.hpp"

struct CUstream_st;  // named as in CUDA's headers: part of the mangled names of functions with this parameter

namespace mempool::torch_cuda {

using StreamHandle = CUstream_st*;
using PoolId = std::pair<unsigned long long, unsigned long long>;

Hook& hook() noexcept;
// Set the driver of the plain pools; call once, before any request.
void prepare(const CudaDriver& driver);
// Set the function that is called with the text of each failed request, to throw the framework's exception;
// null: none.
void set_refusal(void (*raise)(const char* text)) noexcept;
// Return the client that serves this device outside the hook, or null: none was needed.
Client* plain_client(int device) noexcept;

// --- functions for PyTorch

// Throws if out of memory. Null for zero bytes.
void* allocate(std::size_t bytes, int device, StreamHandle stream);
void free(void* address, std::size_t bytes, int device, StreamHandle stream);
void init(int devices);
void empty_cache();
void set_memory_fraction(double fraction, int device);
// Return the base of the reservation that contains the address, and the reservation's bytes.
void* base_of(void* address, std::size_t* bytes);
void record_stream(void* address, StreamHandle stream);
void begin_pool(int device, PoolId id, std::function<bool(StreamHandle)> filter);
void end_pool(int device, PoolId id);
void release_pool(int device, PoolId id);

}  // namespace mempool::torch_cuda
