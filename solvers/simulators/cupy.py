"""CuPy's memory pool."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native


@dataclass(frozen=True)
class Cupy(Native):
    """`cupy.cuda.MemoryPool`, as in ``cupy/cuda/memory.pyx`` of CuPy 14 (`SingleDeviceMemoryPool`).

    Sizes are rounded up to 512 bytes. A request takes the smallest free block of its stream that is large
    enough, whatever is left of it is split off, and what is freed merges with its neighbours at once. Else
    the driver is asked for just so much; if it refuses, all free segments that are whole go back to it
    first. `MemoryPool.set_limit` does the same as a device of so many bytes; before CuPy 12.2 it gave nothing
    back.

    Not modelled: which of several free blocks of one size is taken, which hangs on the hashes of Python
    objects (here it is the lowest); Python's garbage collection before the last retry; other devices.
    """

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCupy:
        """As of the base."""
        return _core.SimulatedCupy(device)
