"""RMM's buffers in a pool: cuDF, cuML and other libraries that use RAPIDS' memory manager.

    import mempool.rmm

    pool = mempool.rmm.install()  # the device's current resource, until the pool is closed

`resource` returns a resource without installing the pool, such as the upstream of an adaptor. RMM passes the
first and last stream of each buffer, so freed memory is reused in stream order. Each buffer costs a call of
Python. If that is too slow, put an arena or pool resource of RMM above this resource, which then serves a few
large buffers.
"""

from __future__ import annotations

from typing import Any

import rmm.mr

from mempool.cuda_callbacks import CallbackPool
from mempool.errors import UsageError
from mempool.installation import InstallationSlot, slot_of

#: Resources, kept alive for allocations that may outlive the interpreter.
_kept: list[Any] = []


def install(index: int = 0, **options: Any) -> RmmPool:
    """Make a new pool the resource of a device until the pool is closed; one pool for each device.

    Args:
        index: index of the device.
        options: options of `mempool.Pool`; ``share``, a pool whose memory to use.

    Returns:
        The pool; leaving the ``with``, ``close`` and `uninstall` end the service. Buffers stay valid.

    Raises:
        UsageError: the device has a pool already, or the options are invalid.
    """
    return _slot(index).install(lambda: RmmPool(index, **options), RmmPool.serve)


def uninstall(index: int = 0) -> None:
    """Close a device's installed pool and restore the earlier resource. Warns if no pool is installed."""
    _slot(index).uninstall()


def installed(index: int = 0) -> RmmPool | None:
    """Return the pool that serves a device, or None."""
    return _slot(index).pool


def resource(pool: CallbackPool) -> Any:
    """Return an ``rmm.mr.CallbackMemoryResource`` of a pool, as an upstream or for one buffer.

    Raises:
        UsageError: the argument is no pool for RMM.
    """
    if not isinstance(pool, CallbackPool):
        raise UsageError(f"{pool!r} is no pool for RMM: share it, by RmmPool(share=...)")

    def allocate(size: int, stream: Any) -> int:
        return pool.take(size, _handle(stream))  # may raise a MemoryError

    def deallocate(address: int, _size: int, stream: Any) -> None:
        pool.give(address, _handle(stream))

    made = rmm.mr.CallbackMemoryResource(allocate, deallocate)
    _kept.append(made)
    return made


class RmmPool(CallbackPool):
    """A pool that serves RMM until closed."""

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
        """Stop serving RMM, and stop planning. Buffers stay valid."""
        _slot(self._served).leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        """Restore the earlier resource, unless another resource replaced the pool's."""
        if self._resource is not None:
            now = rmm.mr.get_per_device_resource(self._served)
            if now is self._resource:
                rmm.mr.set_per_device_resource(self._served, self._before)


def _handle(stream: Any) -> int:
    return int(stream.__cuda_stream__()[1])


def _slot(index: int) -> InstallationSlot[RmmPool]:
    return slot_of("RMM", "mempool.rmm", index)
