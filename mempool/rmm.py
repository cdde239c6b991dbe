"""RMM's buffers in a pool: cuDF, cuML and all else that allocates through RAPIDS' memory manager.

    import mempool.rmm

    pool = mempool.rmm.install()  # the device's current resource, until the pool is closed

or `resource` for one that nobody is told of, such as the upstream of an adaptor. RMM says on which stream a
buffer is used first and last, so what is freed is reused in stream order. Each buffer costs a call of Python:
put an arena or pool resource of RMM's above it where that is too slow, and what it holds is then one buffer.
"""

from __future__ import annotations

from typing import Any

import rmm.mr

from mempool.callbacks import CallbackPool
from mempool.errors import UsageError
from mempool.place import Place, place_of

#: Resources are used as long as anything lives that they gave, which may be longer than the interpreter.
_kept: list[Any] = []


def install(index: int = 0, **options: Any) -> RmmPool:
    """Make a new pool the resource of a device, until it is closed. Each device may have one.

    Args:
        index: the device.
        options: as for `mempool.Pool`; ``share``, a pool whose memory to use.

    Returns:
        The pool; leaving its ``with``, its ``close`` and `uninstall` all end it. Buffers stay valid.

    Raises:
        UsageError: a pool is installed there already, or the options make no sense.
    """
    return _place(index).install(lambda: RmmPool(index, **options), RmmPool.serve)


def uninstall(index: int = 0) -> None:
    """Close a device's installed pool: it has the resource from before. Warns if there is none."""
    _place(index).uninstall()


def installed(index: int = 0) -> RmmPool | None:
    """The pool that serves a device, or None."""
    return _place(index).pool


def resource(pool: CallbackPool) -> Any:
    """A resource of a pool's memory, an ``rmm.mr.CallbackMemoryResource``: as an upstream, or for one buffer.

    Raises:
        UsageError: it is no pool for RMM.
    """
    if not isinstance(pool, CallbackPool):
        raise UsageError(f"{pool!r} is no pool for RMM: share it, by RmmPool(share=...)")

    def allocate(size: int, stream: Any) -> int:
        return pool.take(size, _handle(stream))  # its error is a MemoryError

    def deallocate(address: int, _size: int, stream: Any) -> None:
        pool.give(address, _handle(stream))

    made = rmm.mr.CallbackMemoryResource(allocate, deallocate)
    _kept.append(made)
    return made


class RmmPool(CallbackPool):
    """A pool that leaves RMM when it is closed."""

    framework = "rmm"

    def __init__(self, index: int = 0, **options: Any) -> None:
        super().__init__(index, **options)
        self._served = index
        self._resource: Any = None
        self._before: Any = None

    def serve(self) -> None:
        """Become the device's resource."""
        self._resource = resource(self)
        self._before = rmm.mr.get_per_device_resource(self._served)
        rmm.mr.set_per_device_resource(self._served, self._resource)

    def close(self) -> None:
        """Leave RMM and stop planning. Buffers stay valid."""
        _place(self._served).leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        """Whoever has set another resource meanwhile keeps that."""
        if self._resource is not None:
            now = rmm.mr.get_per_device_resource(self._served)
            if now is self._resource:
                rmm.mr.set_per_device_resource(self._served, self._before)


def _handle(stream: Any) -> int:
    return int(stream.__cuda_stream__()[1])


def _place(index: int) -> Place[RmmPool]:
    return place_of("RMM", "mempool.rmm", index)
