/* The hot path with plain symbols, for frameworks that call an allocator without Python.
 * `client` is what _core.Client.handle gives. All functions may be called by any thread. */
#ifndef MEMPOOL_C_API_H
#define MEMPOOL_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Address of at least `bytes` bytes, or NULL: out of memory. The stream is where the memory will be used first. */
__attribute__((visibility("default"))) void* mempool_alloc(void* client, size_t bytes, int device, intptr_t stream);

/* 1: freed. 0: not an address of this client's pool; nothing happened. */
__attribute__((visibility("default"))) int mempool_free(void* client, void* address, size_t bytes, int device, intptr_t stream);

/* Bytes that can be had within the budget of the client's pool: see Pool.room. */
__attribute__((visibility("default"))) int64_t mempool_room(void* client);

/* PyTorch's CPU tensors, of whichever client serves them now.
 * NULL with *served 1: out of memory; with *served 0: nobody serves, ask the allocator that was there before. */
__attribute__((visibility("default"))) void* mempool_torch_cpu_alloc(size_t bytes, int* served);

/* 1: it is alive in a client that serves or served; 0: foreign. */
__attribute__((visibility("default"))) int mempool_torch_cpu_owns(void* address);

/* 1: freed. 0: foreign; nothing happened. */
__attribute__((visibility("default"))) int mempool_torch_cpu_free(void* address);

/* What this thread's last failed request found, as text with a zero at its end. */
__attribute__((visibility("default"))) void mempool_out_of_memory(char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
