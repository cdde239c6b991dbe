"""RAPIDS Memory Manager: the pool resource."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.allocator import Native, check_bytes

_UNIT = 256  # bytes


@dataclass(frozen=True)
class RmmPool(Native):
    """RMM's `pool_memory_resource` over `cudaMalloc`, as in 26.x.

    Sources: ``pool_memory_resource_impl.cpp``, ``stream_ordered_memory_resource.hpp``,
    ``coalescing_free_list.hpp``. Sizes are rounded up to 256 bytes. A request takes the smallest sufficient
    free block of the stream's free list, else a block of another stream's list, in order of the lists' first
    appearance. If no block suffices, the other lists are merged into the stream's list one by one. Then the
    pool grows: to twice its size, or with a maximum by half of the remaining bytes, halved while the device
    refuses. A freed block goes to the free list of the stream that frees the block, and merges there.
    No memory returns to the device, except free segments of a pool that has reached the maximum.

    Not modelled: events and waits between streams; streams of threads; the order of lists if the addresses of
    their events have another order.

    Attributes:
        initial_pool_bytes: bytes reserved at the start. None: half of the device, the default of RMM's Python
            package; 0 on a device without a limit, so that the pool reserves only bytes that the trace needs.
        maximum_pool_bytes: most bytes of the pool; None: all of the device.
    """

    initial_pool_bytes: int | None = None
    maximum_pool_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.initial_pool_bytes is not None:
            check_bytes(self.initial_pool_bytes, "initial_pool_bytes")
        if self.maximum_pool_bytes is not None:
            check_bytes(self.maximum_pool_bytes, "maximum_pool_bytes", least=1)
            if (self.initial_pool_bytes or 0) > self.maximum_pool_bytes:
                raise ValueError("initial_pool_bytes is more than maximum_pool_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """Create the allocator, see `Native.on`."""
        initial, maximum = self._pool(device)
        return _core.SimulatedRmmPool(device, initial=initial, maximum=maximum)

    def _pool(self, device: _core.SimulatedDevice) -> tuple[int, int]:
        """Return the initial bytes and the maximum, -1 for none; multiples of 256, as RMM requires."""
        maximum = -1 if self.maximum_pool_bytes is None else -(-self.maximum_pool_bytes // _UNIT) * _UNIT
        initial = self.initial_pool_bytes
        if initial is None:
            initial = 0 if device.limit >= _core.LARGEST_DEVICE else device.limit // 2
            initial = initial // _UNIT * _UNIT
            return (min(initial, maximum) if maximum >= 0 else initial), maximum
        return -(-initial // _UNIT) * _UNIT, maximum
