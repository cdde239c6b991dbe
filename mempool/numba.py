"""Numba's device arrays in a pool, through its External Memory Management plug-in (EMM).

    import mempool.numba

    pool = mempool.numba.install()  # before Numba has used CUDA
    for batch in batches:
        train(batch)
        pool.step()

or, without a line of code, ``NUMBA_CUDA_MEMORY_MANAGER=mempool.numba``. Pinned, mapped and managed memory is
Numba's own.

Numba says of no buffer on which stream it is used. So one that is over is free when the device has been
waited for, as the driver does when it frees memory. ``synchronize=False`` leaves that out, for programs that
use the default stream alone: what is freed is then the next one's at once.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from numba import cuda
from numba.cuda.cudadrv import driver as numba_driver

from mempool.callbacks import CallbackPool
from mempool.errors import OutOfMemoryError, UsageError
from mempool.place import Place, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What the driver calls running out of memory.
_OUT_OF_MEMORY = 2


def install(**options: Any) -> NumbaPool:
    """Serve Numba's device arrays from a new pool, until it is closed.

    A context keeps the memory manager that it began with, so this comes before Numba has used CUDA.

    Args:
        options: as for `mempool.Pool`; ``index``, the device, by default the first that Numba uses;
            ``share``, a pool whose memory to use; ``synchronize``, see above.

    Returns:
        The pool; leaving its ``with``, its ``close`` and `uninstall` all end it, and it goes on serving the
        contexts that began with it, without plans.

    Raises:
        UsageError: a pool is installed already, Numba has used CUDA, or the options make no sense.
    """
    return _place.install(lambda: NumbaPool(**options), NumbaPool.serve)


def uninstall() -> None:
    """Close the installed pool: contexts to come have Numba's own memory. Warns if there is none."""
    _place.uninstall()


def installed() -> NumbaPool | None:
    """The pool that serves Numba, or None."""
    return _place.pool


class NumbaPool(CallbackPool):
    """A pool that leaves Numba when it is closed."""

    framework = "numba"

    def __init__(self, index: int | None = None, *, synchronize: bool = True, **options: Any) -> None:
        super().__init__(index, **options)
        self.synchronize = synchronize
        self._before: Any = None

    def serve(self) -> None:
        """Become the manager of contexts to come."""
        if _has_context():
            raise UsageError("Numba has used CUDA already, and a context keeps its memory manager")
        self._before = numba_driver._memory_manager or numba_driver.NumbaCUDAMemoryManager
        cuda.set_memory_manager(Manager)

    def close(self) -> None:
        """Leave Numba and stop planning; contexts that have this pool keep it. Arrays stay valid."""
        _place.leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        if self._before is not None and numba_driver._memory_manager is Manager:
            cuda.set_memory_manager(self._before)


class Manager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Numba's memory manager of one context, with the pool that is installed when it first allocates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool: NumbaPool | None = None
        self._bound = False
        self._deferred = 0

    def initialize(self) -> None:
        """The pool that is installed now serves this context, even if it is closed before a buffer."""
        self._pool = self._pool or _place.pool

    def memalloc(self, size: int) -> Any:
        """A buffer of ``size`` bytes, first used on whatever stream.

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
        """Of this context; made by the environment's settings if nobody has installed one.

        Raises:
            UsageError: it is of another device.
        """
        if not self._bound:
            with _place.lock:
                pool = self._pool or _place.pool or _place.install(NumbaPool, lambda _: None)
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
        """(free, total) bytes of the device, where what the pool could serve without it is free too."""
        free, total = self.pool.device.memory()
        return cuda.MemoryInfo(free + self.pool.core.stats()["segment_free_bytes"], total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Not there: a handle would give away all that lies beside the buffer.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("memory of a mempool pool cannot be shared with another process")

    def reset(self) -> None:
        """Give back what is over. Living arrays keep their memory, which others may lie beside."""
        super().reset()
        if self._pool is not None:
            self._pool.settle()

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Inside, nothing is waited for; what is over is given back afterwards."""
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
        """Of the plug-in's interface."""
        return 1


def _has_context() -> bool:
    """Whether a device has a context of Numba's; starts nothing."""
    devices = vars(numba_driver.driver).get("devices", {}) or {}
    return any(device.primary_context is not None for device in devices.values())


_place: Place[NumbaPool] = place_of("Numba", "mempool.numba")
#: What ``NUMBA_CUDA_MEMORY_MANAGER=mempool.numba`` takes.
_numba_memory_manager = Manager
