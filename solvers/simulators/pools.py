"""Simulated pools: CuPy, TensorFlow's BFC, and plain first and best fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers import _core
from solvers.simulators.allocator import Native, check_bytes, check_flag, check_power_of_two


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


@dataclass(frozen=True)
class Bfc(Native):
    """TensorFlow's and XLA's "best fit with coalescing" (``xla/tsl/framework/bfc_allocator.cc``).

    Sizes are rounded up to 256 bytes. A request takes the smallest sufficient free block, the lowest of equal
    ones. The remainder is split off if the block has twice the size, or is larger by at least
    ``max_slack_bytes``; else the remainder belongs to the buffer. A freed block merges with the neighbours in
    the same region. Regions double: each is twice as large as the last, or large enough, or all that the
    device has left. Before a request fails, free regions return to the device.

    Not modelled: streams (the allocator knows one); requests that are tried again for ten seconds;
    timestamped frees; alignments beyond 256; adjacent regions that become one, as with virtual memory;
    shrinking region sizes if the device has less than TensorFlow believes, which never happens in this
    simulation.

    Attributes:
        allow_growth: TensorFlow's option of that name (`set_memory_growth`). False, TensorFlow's default:
            the first request reserves the whole device, which must then have a limit, and the memory held
            says nothing about the program.
        first_region_bytes: size of the first region if regions grow.
        max_slack_bytes: remainders of at least so many bytes are always split off; TensorFlow's option
            ``internal_fragmentation_fraction`` times the limit.
        garbage_collection: release free regions before a request fails; TensorFlow's
            ``TF_ENABLE_GPU_GARBAGE_COLLECTION``.
    """

    allow_growth: bool = True
    first_region_bytes: int = 2 << 20
    max_slack_bytes: int = 128 << 20
    garbage_collection: bool = True

    def __post_init__(self) -> None:
        check_flag(self.allow_growth, "allow_growth")
        check_flag(self.garbage_collection, "garbage_collection")
        check_bytes(self.first_region_bytes, "first_region_bytes", least=1)
        check_bytes(self.max_slack_bytes, "max_slack_bytes", least=1)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedBfc:
        """Create the allocator, see `Native.on`.

        Raises:
            ValueError: ``allow_growth`` is False and the device has no limit.
        """
        if not self.allow_growth and device.limit >= _core.LARGEST_DEVICE:
            raise ValueError("allow_growth=False takes the whole device: give it a limit")
        return _core.SimulatedBfc(
            device,
            region=self.first_region_bytes if self.allow_growth else max(device.limit, 1),
            slack=self.max_slack_bytes,
            collects=self.garbage_collection,
        )


@dataclass(frozen=True)
class FirstFit(Native):
    """Lowest sufficient free range, in one region that grows at the end (Knuth, TAOCP 1, 2.5).

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
    """Variant of `FirstFit` that takes the smallest sufficient free range, the lowest of equal ones."""

    _best: ClassVar[bool] = True
