"""CuPy's memory pool."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native


@dataclass(frozen=True)
class Cupy(Native):
    """`cupy.cuda.MemoryPool`, as in ``cupy/cuda/memory.pyx`` of CuPy 14 (`SingleDeviceMemoryPool`).

    Sizes are rounded up to 512 bytes. A request takes the smallest sufficient free block of the stream, any
    remainder is split off, and a freed block merges with free neighbours at once. If no block suffices, the
    driver is asked for exactly the requested size; if the driver refuses, all entirely free segments are
    released first. `MemoryPool.set_limit` acts like a device of so many bytes; before CuPy 12.2 the limit
    released nothing.

    Not modelled: the choice among several free blocks of one size, which depends on the hashes of Python
    objects (here the lowest is taken); Python's garbage collection before the last retry; other devices.
    """

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCupy:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedCupy(device)
