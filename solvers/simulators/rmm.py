"""RAPIDS Memory Manager: its pool, arena and binning resources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.simulators.native import Native, check_bytes

if TYPE_CHECKING:
    from solvers.simulators.simulation import Course
    from traces.trace import Trace

_UNIT, _SUPERBLOCK = 256, 1 << 20  # bytes


@dataclass(frozen=True)
class RmmPool(Native):
    """RMM's `pool_memory_resource` over `cudaMalloc`, as in 26.x.

    Sources: ``pool_memory_resource_impl.cpp``, ``stream_ordered_memory_resource.hpp``,
    ``coalescing_free_list.hpp``. Sizes are rounded up to 256 bytes. A request takes the smallest free block
    of its stream's list, else that of another stream's, in order of their first appearance; then those
    lists are merged into its own one by one; then the pool grows to twice its size, or by half of what it
    may still take, or by as much of that as can be had. What is freed goes to the list of the stream that
    frees it, and merges there. Nothing goes back, but for free segments of a pool that has reached its
    maximum.

    Not modelled: events and waits between streams; streams of threads; the order of lists where the
    addresses of their events have another.

    Attributes:
        initial_pool_bytes: taken at once. None: half of the device, as RMM's Python has it; without a limit
            nothing, so that what is held is what the trace needs.
        maximum_pool_bytes: the most that the pool takes; None: what the device has.
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
        """As of the base."""
        initial, maximum = self._pool(device)
        return _core.SimulatedRmmPool(device, initial=initial, maximum=maximum)

    def _pool(self, device: _core.SimulatedDevice) -> tuple[int, int]:
        """Bytes at first and at most, -1 for no maximum; multiples of 256, as RMM wants them."""
        maximum = -1 if self.maximum_pool_bytes is None else -(-self.maximum_pool_bytes // _UNIT) * _UNIT
        initial = self.initial_pool_bytes
        if initial is None:
            initial = 0 if device.limit >= _core.LARGEST_DEVICE else device.limit // 2
            initial = initial // _UNIT * _UNIT
            return (min(initial, maximum) if maximum >= 0 else initial), maximum
        return -(-initial // _UNIT) * _UNIT, maximum


@dataclass(frozen=True)
class RmmBinning(RmmPool):
    """RMM's `binning_memory_resource` over its pool, as RMM's own benchmarks have it.

    Sources: ``binning_memory_resource_impl.cpp``, ``fixed_size_memory_resource_impl.cpp``. A request of up
    to the largest bin's size has a whole block of the smallest bin that is large enough, the block that has
    been free for longest, of its stream or else of another one; a bin that has none takes
    ``blocks_at_once`` more from the pool, and each has taken so many when it is made. What is larger is the
    pool's. Nothing goes back.

    Not modelled: as of the pool, and bins over anything but a pool.

    Attributes:
        min_size_exponent: the smallest bin is of 2 to this power bytes; the default is that of RMM's
            benchmarks, and gives requests of a few bytes 256 KiB.
        max_size_exponent: likewise of the largest; the others are all powers between.
        blocks_at_once: RMM's ``blocks_to_preallocate``.
    """

    min_size_exponent: int = 18
    max_size_exponent: int = 22
    blocks_at_once: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bytes(self.min_size_exponent, "min_size_exponent", least=8, most=40)
        check_bytes(self.max_size_exponent, "max_size_exponent", least=self.min_size_exponent, most=40)
        check_bytes(self.blocks_at_once, "blocks_at_once", least=1, most=1 << 12)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """As of the base."""
        initial, maximum = self._pool(device)
        return _core.SimulatedRmmBinning(
            device,
            least=self.min_size_exponent,
            most=self.max_size_exponent,
            blocks=self.blocks_at_once,
            initial=initial,
            maximum=maximum,
        )


@dataclass(frozen=True)
class RmmArena(Native):
    """RMM's `arena_memory_resource`, as in 26.x (``arena.hpp``, ``arena_memory_resource_impl.cpp``).

    One arena is taken at once and is all that there ever is. It is divided into superblocks. A request of
    more than 1 MiB, rounded up to 256 bytes, is served by the first superblock with room, by address, from
    which the rest is cut off if it is empty and at least 1 MiB too large. A smaller one is served by the
    superblocks that its stream has, else such a one, of at least 1 MiB, becomes the stream's. A superblock
    stays with its stream until a request finds no room; then all go back, empty ones merge, and the request
    is tried again.

    Not modelled: waits between streams; arenas of threads, which per-thread default streams have; size
    classes, which RMM must be built for (``RMM_ARENA_USE_SIZE_CLASSES``).

    Attributes:
        arena_bytes: of the arena. None: half of the device, as RMM has it; without a limit the least for
            which all is served as in an endless one.
    """

    arena_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.arena_bytes is not None:
            check_bytes(self.arena_bytes, "arena_bytes", least=_SUPERBLOCK)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """As of the base."""
        if self.arena_bytes is not None:
            size = self.arena_bytes
        else:
            size = device.limit if device.limit >= _core.LARGEST_DEVICE else device.limit // 2
        return _core.SimulatedRmmArena(device, bytes=size // _UNIT * _UNIT)

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """As of the base."""
        course = super().run(trace, limit_bytes)
        if self.arena_bytes is not None or limit_bytes < _core.LARGEST_DEVICE or not len(course.segments):
            return course
        ends = np.where(course.address >= 0, course.address + -(-trace.size // _UNIT) * _UNIT, 0)
        used = int(ends.max(initial=0) - course.segments.address[0])
        # With a superblock to spare each is cut where it was cut from the endless arena, so all is the same.
        needed = np.int64(max(used, 0) + _SUPERBLOCK)
        segments = replace(course.segments, size=np.full(1, needed))
        return replace(course, segments=segments, reserved=np.full(len(trace), needed))
