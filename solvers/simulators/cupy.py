"""CuPy's memory pool."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_bytes


@dataclass(frozen=True)
class Cupy(Native):
    """`cupy.cuda.MemoryPool`, as in ``cupy/cuda/memory.pyx`` (`SingleDeviceMemoryPool`, CuPy 12 to 14).

    Sizes are rounded up to 512 bytes. A request takes the smallest free block of its stream that is large
    enough, whatever is left of it is split off, and what is freed merges with its neighbours at once. Else
    the driver is asked for just so much; if it refuses, all free segments that are whole go back to it
    first.

    Not modelled: which of several free blocks of one size is taken, which hangs on the hashes of Python
    objects (here it is the lowest); Python's garbage collection before the last retry; other devices.

    Attributes:
        pool_limit_bytes: as `MemoryPool.set_limit`: the pool holds no more, and gives nothing back for
            more. None: no limit but the device's.
    """

    pool_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.pool_limit_bytes is not None:
            check_bytes(self.pool_limit_bytes, "pool_limit_bytes", least=1)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCupy:
        """As of the base."""
        limit = _core.LARGEST_DEVICE if self.pool_limit_bytes is None else self.pool_limit_bytes
        return _core.SimulatedCupy(device, pool_limit=limit)
