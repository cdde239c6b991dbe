"""What can serve CuPy in a process: its own pools, RMM's, ours, and a counter of what is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class SkippedError(Exception):
    """This allocator is not to be had here; the message says why."""


def _nothing() -> None: ...


@dataclass(frozen=True)
class Allocator:
    """What serves CuPy, as far as a measurement asks.

    Attributes:
        reserved_bytes: says what it holds from the device.
        step: an iteration ends.
        wait: until whatever it does in the background is done.
        facts: says more for the table.
    """

    reserved_bytes: Callable[[], int]
    step: Callable[[], object] = _nothing
    wait: Callable[[], object] = _nothing
    facts: Callable[[], dict[str, Any]] = dict


def serve(way: str, most_bytes: int) -> Allocator:
    """Let CuPy be served in this way from now on.

    Args:
        way: a key of `WAYS`.
        most_bytes: that may be taken from the device, by those who want to know it.

    Raises:
        SkippedError: it is not to be had here.
    """
    return WAYS[way](most_bytes)


def _cupy(most_bytes: int) -> Allocator:
    import cupy

    return _with_statistics(cupy.cuda.MemoryPool())


def _async(most_bytes: int) -> Allocator:
    import cupy

    try:
        pool = cupy.cuda.MemoryAsyncPool()
    except RuntimeError as error:
        raise SkippedError(f"not to be had here: {error}") from None
    return _with_statistics(pool)


def _with_statistics(pool: Any) -> Allocator:
    import cupy

    cupy.cuda.set_allocator(pool.malloc)
    return Allocator(pool.total_bytes)


def _load(most_bytes: int) -> Allocator:
    import cupy

    load = Load(cupy.cuda.MemoryPool().malloc)
    cupy.cuda.set_allocator(load.malloc)
    return Allocator(lambda: load.peak_bytes)


def _rmm(most_bytes: int | None) -> Allocator:
    """RMM's pool, which grows from nothing; or its arena, which takes as much as is given at once.

    By default either takes half of the free memory at the start, which says nothing about what it needs.
    """
    import cupy

    try:
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ImportError:
        raise SkippedError("RMM is not installed") from None
    # The statistics are of what is asked of the device.
    below = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
    if most_bytes is None:
        pool = rmm.mr.PoolMemoryResource(below, initial_pool_size=0)
    else:
        pool = rmm.mr.ArenaMemoryResource(below, arena_size=most_bytes)
    rmm.mr.set_current_device_resource(pool)
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    return Allocator(lambda: below.allocation_counts.current_bytes)


def _mempool(memory: str, most_bytes: int) -> Allocator:
    """The pool, marked; it may take no more than is free, managed memory included.

    A managed arena may be larger than the card; the driver then moves pages. That is left out here: it would
    measure the bus, and starve others that use the card. An arena that fits stays, and needs no prefetching.
    """
    import mempool.cupy

    pool = mempool.cupy.install(memory=memory, max_reserved=most_bytes)

    def facts() -> dict[str, Any]:
        report = pool.report().to_dict()
        keys = ("hit_rate", "coverage", "plans", "peak_load_bytes", "planned_arena_bytes", "out_of_memory")
        return {key: report[key] for key in keys if key in report}

    return Allocator(pool.total_bytes, pool.step, lambda: pool.wait(1), facts)


class Load:
    """An allocator that counts what is asked for and alive; another one serves it.

    Attributes:
        live_bytes: asked for and not freed.
        peak_bytes: the most that it was.
    """

    def __init__(self, malloc: Callable[[int], Any]) -> None:
        self._malloc = malloc
        self.live_bytes = self.peak_bytes = 0

    def malloc(self, size: int) -> Any:
        """As CuPy's allocators."""
        from cupy.cuda import MemoryPointer, UnownedMemory

        owner = _Owner(self, self._malloc(size), size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        memory = UnownedMemory(owner.pointer.ptr, size, owner, owner.pointer.device_id)
        return MemoryPointer(memory, 0)


class _Owner:
    """Lives as long as the memory."""

    def __init__(self, load: Load, pointer: Any, size: int) -> None:
        self._load, self.pointer, self._size = load, pointer, size

    def __del__(self) -> None:
        self._load.live_bytes -= self._size


#: By the name in the tables: what serves it. "load" is not compared: it says how much is alive at once.
WAYS: dict[str, Callable[[int], Allocator]] = {
    "load": _load,
    "cupy": _cupy,
    "async": _async,
    "rmm pool": lambda _: _rmm(None),
    "rmm arena": _rmm,
    "mempool": lambda most: _mempool("plain", most),
    "mempool growing": lambda most: _mempool("growing", most),
    "mempool managed": lambda most: _mempool("managed", most),
}
