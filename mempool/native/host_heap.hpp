// The C library's heap, which planning uses as everybody does.
#pragma once

namespace mempool {

// Returns to the system what the calling thread freed in it: all pages of free memory, those at the end of the thread's own arena
// included, which `malloc_trim` leaves. Elsewhere than with glibc it does nothing.
void give_back_host_heap() noexcept;

}  // namespace mempool
