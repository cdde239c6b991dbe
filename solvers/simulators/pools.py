"""Simulated pools: CuPy, and plain first and best fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers import _core
from solvers.simulators.allocator import Native, check_power_of_two


@dataclass(frozen=True)
class Cupy(Native):
    """`cupy.cuda.MemoryPool`, as in ``cupy/cuda/memory.pyx`` of CuPy 14 (`SingleDeviceMemoryPool`).

    Sizes are rounded up to 512 bytes. A request takes the smallest sufficient free block of the stream, any
    remainder is split off, and a freed block merges with free neighbours at once. If no block suffices, the
    pool reserves exactly the requested size; if the driver refuses, the pool releases all entirely free
    segments and retries. `MemoryPool.set_limit` acts like a device of that size; before CuPy 12.2 the limit
    released nothing.

    Not modelled: the choice among several free blocks of one size, which depends on the hashes of Python
    objects (here the lowest is taken); Python's garbage collection before the last retry; other devices.
    """

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCupy:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedCupy(device)


@dataclass(frozen=True)
class FirstFit(Native):
    """First fit: the lowest sufficient free range, in one growing region (Knuth, TAOCP 1, 2.5).

    Streams are ignored; a freed range merges with free neighbours at once, and no memory returns to the
    device.

    Attributes:
        alignment_bytes: sizes, and therefore addresses, are multiples of this power of two.
        growth_bytes: the region grows by multiples of this power of two, one driver call each time.
    """

    alignment_bytes: int = 512
    growth_bytes: int = 2 << 20
    _best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_power_of_two(self.alignment_bytes, "alignment_bytes")
        check_power_of_two(self.growth_bytes, "growth_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedFit:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedFit(
            device, best=self._best, alignment=self.alignment_bytes, growth=self.growth_bytes
        )


@dataclass(frozen=True)
class BestFit(FirstFit):
    """Best fit: as `FirstFit`, with the smallest sufficient free range, the lowest of equal ranges."""

    _best: ClassVar[bool] = True
