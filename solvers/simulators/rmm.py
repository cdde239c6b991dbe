"""RAPIDS Memory Manager: pool, arena and binning resources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.simulators.allocator import Native, check_bytes

if TYPE_CHECKING:
    from solvers.simulators.simulation import Course
    from traces.trace import Trace

_UNIT, _SUPERBLOCK = 256, 1 << 20  # bytes


@dataclass(frozen=True)
class RmmPool(Native):
    """RMM's `pool_memory_resource` over `cudaMalloc`, as in 26.x.

    Sources: ``pool_memory_resource_impl.cpp``, ``stream_ordered_memory_resource.hpp``,
    ``coalescing_free_list.hpp``. Sizes are rounded up to 256 bytes. A request takes the smallest sufficient
    free block of the stream's free list, else a block of another stream's list, in order of the lists' first
    appearance. If no block suffices, the other lists are merged into the stream's own one by one. At last the
    pool grows: to twice its size, or with a maximum by half of the remaining bytes, halved as long as the
    device refuses. A freed block goes to the free list of the stream that frees the block, and merges there.
    No memory returns to the device, except free segments of a pool that has reached the maximum.

    Not modelled: events and waits between streams; streams of threads; the order of lists if the addresses of
    their events have another order.

    Attributes:
        initial_pool_bytes: bytes reserved at once. None: half of the device, the default of RMM's Python; on
            a device without a limit 0, so that the bytes held are those that the trace needs.
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


@dataclass(frozen=True)
class RmmBinning(RmmPool):
    """RMM's `binning_memory_resource` over the pool, configured like RMM's own benchmarks.

    Sources: ``binning_memory_resource_impl.cpp``, ``fixed_size_memory_resource_impl.cpp``. A request of up
    to the largest bin's size takes a whole block of the smallest sufficient bin: the
    block that has been free for the longest time, of the stream or else of another stream. A bin without a
    free block takes ``blocks_at_once`` more from the pool; each bin also takes so many at the start. Larger
    requests go to the pool. Bins return no memory.

    Not modelled: the exceptions of the pool, and bins over any other resource than a pool.

    Attributes:
        min_size_exponent: log2 of the smallest bin's bytes; the default is that of RMM's benchmarks, and
            gives requests of a few bytes 256 KiB.
        max_size_exponent: log2 of the largest bin's bytes; there is a bin for every power of two between.
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
        """Create the allocator, see `Native.on`."""
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

    One arena is reserved at once and never grows. The arena is divided into superblocks. A request of more
    than 1 MiB, rounded up to 256 bytes, takes memory from the first sufficient superblock, by address; if
    this superblock is empty and at least 1 MiB too large, the remainder is split off. A smaller request is
    served by the superblocks of the stream; if these have no room, the first sufficient superblock, of at
    least 1 MiB, becomes the stream's. A superblock stays with the stream until a request finds no room; then
    all superblocks return to the arena, empty ones merge, and the request is tried again.

    Not modelled: waits between streams; arenas of threads, which per-thread default streams have; size
    classes, which are a compile-time option of RMM (``RMM_ARENA_USE_SIZE_CLASSES``).

    Attributes:
        arena_bytes: size of the arena. None: half of the device, the default of RMM; on a device without a
            limit the smallest arena that serves every request as an unlimited arena does.
    """

    arena_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.arena_bytes is not None:
            check_bytes(self.arena_bytes, "arena_bytes", least=_SUPERBLOCK)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """Create the allocator, see `Native.on`."""
        if self.arena_bytes is not None:
            size = self.arena_bytes
        else:
            size = device.limit if device.limit >= _core.LARGEST_DEVICE else device.limit // 2
        return _core.SimulatedRmmArena(device, bytes=size // _UNIT * _UNIT)

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """Simulate all events of a trace, see `Allocator.run`."""
        course = super().run(trace, limit_bytes)
        if self.arena_bytes is not None or limit_bytes < _core.LARGEST_DEVICE or not len(course.segments):
            return course
        ends = np.where(course.address >= 0, course.address + -(-trace.size // _UNIT) * _UNIT, 0)
        used = int(ends.max(initial=0) - course.segments.address[0])
        # With a superblock to spare, every split is the same as in the unlimited arena, so the outcome is the
        # same.
        needed = np.int64(max(used, 0) + _SUPERBLOCK)
        segments = replace(course.segments, size=np.full(1, needed))
        return replace(course, segments=segments, reserved=np.full(len(trace), needed))
