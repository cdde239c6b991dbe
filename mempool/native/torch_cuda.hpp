// PyTorch's CUDA tensors: the functions of its CUDAPluggableAllocator, with its signatures. It calls them from any thread, with
// or without the interpreter's lock, also after Python has ended; no Python runs here.
//
// One client at a time serves one device, the one it was made for or the first that asks. What belongs to another device,
// or comes while nobody serves, has a plain pool of that device, which plans nothing and stays for ever: PyTorch cannot
// change its allocator once CUDA is in use.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "cuda_driver.hpp"
#include "hook.hpp"

struct CUstream_st;  // as CUDA's headers name it: part of the names of functions that take it

namespace mempool::torch_cuda {

using StreamHandle = CUstream_st*;
using PoolId = std::pair<unsigned long long, unsigned long long>;

Hook& hook() noexcept;
// The driver of the plain pools; before anything is served, and once.
void prepare(const CudaDriver& driver);
// Called with the text of each request that cannot be served, to throw what the framework throws; null: none.
void set_refusal(void (*raise)(const char* text)) noexcept;
// Who serves this device outside the hook, or null: nobody has had to.
Client* plain_client(int device) noexcept;

// --- what PyTorch is given

// Throws: out of memory. Null for no bytes.
void* allocate(std::size_t bytes, int device, StreamHandle stream);
void free(void* address, std::size_t bytes, int device, StreamHandle stream);
void init(int devices);
void empty_cache();
void set_memory_fraction(double fraction, int device);
// The reservation that it lies in, and its bytes.
void* base_of(void* address, std::size_t* bytes);
void record_stream(void* address, StreamHandle stream);
void begin_pool(int device, PoolId id, std::function<bool(StreamHandle)> filter);
void end_pool(int device, PoolId id);
void release_pool(int device, PoolId id);

}  // namespace mempool::torch_cuda
