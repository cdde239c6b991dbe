"""Numba's device arrays in a pool, through its External Memory Management plug-in (EMM).

    import mempool.numba

    pool = mempool.numba.install()  # before Numba has used CUDA
    for batch in batches:
        train(batch)
        pool.step()

To install the pool without a line of code, set ``NUMBA_CUDA_MEMORY_MANAGER=mempool.numba``. Pinned, mapped
and managed memory remains Numba's own.

Numba does not report the streams that use a buffer. A dropped buffer is therefore freed after a wait for the
device, as in the driver's own free. ``synchronize=False`` omits the wait, for programs that use the default
stream alone: freed memory is then reused at once.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from numba import cuda
from numba.cuda.cudadrv import driver as numba_driver

from mempool.cuda_callbacks import CallbackPool
from mempool.errors import OutOfMemoryError, UsageError
from mempool.installation import InstallationSlot, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The driver's error code for out of memory.
_OUT_OF_MEMORY = 2


def install(**options: Any) -> NumbaPool:
    """Serve Numba's device arrays from a new pool, until the pool is closed.

    A context keeps its first memory manager, so call this function before Numba uses CUDA.

    Args:
        options: options of `mempool.Pool`; ``index``, the device, by default the first that Numba uses;
            ``share``, a pool whose memory to use; ``synchronize``, see above.

    Returns:
        The pool; leaving the ``with``, ``close`` and `uninstall` end the service. The pool then serves its
        present contexts without plans.

    Raises:
        UsageError: a pool is installed already, Numba has used CUDA, or the options are invalid.
    """
    return _slot.install(lambda: NumbaPool(**options), NumbaPool.serve)


def uninstall() -> None:
    """Close the installed pool: later contexts use Numba's own memory. Warns if no pool is installed."""
    _slot.uninstall()


def installed() -> NumbaPool | None:
    """Return the pool that serves Numba, or None."""
    return _slot.pool


class NumbaPool(CallbackPool):
    """Pool that serves Numba; closing it restores the former memory manager."""

    framework = "numba"

    def __init__(self, index: int | None = None, *, synchronize: bool = True, **options: Any) -> None:
        super().__init__(index, **options)
        self.synchronize = synchronize
        self._before: Any = None

    def serve(self) -> None:
        """Become the memory manager of later contexts."""
        if _has_context():
            raise UsageError("Numba has used CUDA already, and a context keeps its memory manager")
        self._before = numba_driver._memory_manager or numba_driver.NumbaCUDAMemoryManager
        cuda.set_memory_manager(Manager)

    def close(self) -> None:
        """Stop planning, and serve no new contexts; this pool's contexts and arrays stay valid."""
        _slot.leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        if self._before is not None and numba_driver._memory_manager is Manager:
            cuda.set_memory_manager(self._before)


class Manager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Numba's memory manager of one context, with the pool installed at the first allocation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool: NumbaPool | None = None
        self._bound = False
        self._deferred = 0

    def initialize(self) -> None:
        """Assign the installed pool to this context, even if that pool closes before the first buffer."""
        self._pool = self._pool or _slot.pool

    def memalloc(self, size: int) -> Any:
        """Allocate a buffer of ``size`` bytes for first use on any stream.

        Raises:
            CudaAPIError: out of memory, with the numbers.
        """
        pool = self.pool
        try:
            address = pool.allocate(size) if self._deferred else pool.take(size)
        except OutOfMemoryError as error:
            raise numba_driver.CudaAPIError(_OUT_OF_MEMORY, str(error)) from error
        finalizer = self._finalizer(address)
        return cuda.MemoryPointer(self.context, ctypes.c_void_p(address), size, finalizer=finalizer)

    @property
    def pool(self) -> NumbaPool:
        """Pool of this context; made from the environment's settings if no pool is installed.

        Raises:
            UsageError: the pool belongs to another device.
        """
        if not self._bound:
            with _slot.lock:
                pool = self._pool or _slot.pool or _slot.install(NumbaPool, lambda _: None)
            pool.bind(self.context.device.id)
            self._pool, self._bound = pool, True
        assert self._pool is not None
        return self._pool

    def _finalizer(self, address: int) -> Callable[[], None]:
        pool = self.pool

        def free() -> None:
            if not pool.synchronize:
                pool.give(address, 0)
            elif self._deferred:
                pool.give_later(address)
            else:
                pool.give_when_done(address)

        return free

    def get_memory_info(self) -> Any:
        """Return (free, total) bytes of the device; the pool's free segments count as free."""
        free, total = self.pool.device.memory()
        return cuda.MemoryInfo(free + self.pool.core.stats()["segment_free_bytes"], total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Refuse to share a buffer: a handle would expose the memory around it.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("memory of a mempool pool cannot be shared with another process")

    def reset(self) -> None:
        """Free dropped buffers; live arrays keep their memory."""
        super().reset()
        if self._pool is not None:
            self._pool.settle()

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Postpone waits for the device and frees of dropped buffers to the end of this context manager."""
        with super().defer_cleanup():
            self._deferred += 1
            try:
                yield
            finally:
                self._deferred -= 1
        if self._pool is not None and not self._deferred:
            self._pool.settle()

    @property
    def interface_version(self) -> int:
        """Version of the plug-in's interface."""
        return 1


def _has_context() -> bool:
    """Return true if Numba has a context on any device; do not start the driver."""
    devices = vars(numba_driver.driver).get("devices", {}) or {}
    return any(device.primary_context is not None for device in devices.values())


_slot: InstallationSlot[NumbaPool] = slot_of("Numba", "mempool.numba")
#: Class that ``NUMBA_CUDA_MEMORY_MANAGER=mempool.numba`` looks up.
_numba_memory_manager = Manager
