/* The hot path with plain symbols, for frameworks that call an allocator without Python.
 * `client` is the value of _core.Client.handle. All functions may be called by any thread. */
#ifndef MEMPOOL_C_API_H
#define MEMPOOL_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Return the address of at least `bytes` bytes, or NULL: out of memory. `stream` will use the memory first. */
__attribute__((visibility("default"))) void* mempool_alloc(void* client, size_t bytes, int device, intptr_t stream);

/* Free a buffer. 1: freed. 0: no live buffer of this client's pool; nothing happened. */
__attribute__((visibility("default"))) int mempool_free(void* client, void* address, size_t bytes, int device, intptr_t stream);

/* Return the bytes available within the budget of the client's pool: see Pool.room. */
__attribute__((visibility("default"))) int64_t mempool_room(void* client);

/* Return the number of the client's requests so far that missed the plan, and one more if one of this thread's next requests, of
 * `bytes` together, will, as far as known. */
__attribute__((visibility("default"))) int64_t mempool_misses(void* client);
__attribute__((visibility("default"))) int64_t mempool_unplanned_bytes(void* client, int64_t bytes);

/* Allocate memory for PyTorch's CPU tensors from the client that serves them now.
 * NULL with *served 1: out of memory; with *served 0: no client serves, use the previously installed allocator. */
__attribute__((visibility("default"))) void* mempool_torch_cpu_alloc(size_t bytes, int* served);

/* 1: a live buffer of a client that serves or has served; 0: foreign. */
__attribute__((visibility("default"))) int mempool_torch_cpu_owns(void* address);

/* Free a buffer. 1: freed. 0: foreign; nothing happened. */
__attribute__((visibility("default"))) int mempool_torch_cpu_free(void* address);

/* Write the state of the pool at this thread's last failed request as zero-terminated text. */
__attribute__((visibility("default"))) void mempool_out_of_memory(char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
