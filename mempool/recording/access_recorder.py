"""Access recorder: reads and writes of arrays, merged with the allocations and frees of their pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from mempool import _core
from mempool.errors import UsageError
from mempool.pool import Pool
from mempool.recording.arrays import ArrayRecorder
from mempool.recording.events import EventConverter
from mempool.recording.trace_merge import join

if TYPE_CHECKING:
    from types import TracebackType

    from mempool.cupy import CupyPool
    from traces import Trace


def record_arrays(pool: Pool | CupyPool | None = None, *, frames: bool = False) -> ArrayRecorder:
    """Return a recorder of NumPy's and CuPy's array operations; a context manager.

        with record_arrays(pool) as recorder:
            x = recorder.watch(x)
            ...
        trace = recorder.trace()

    Args:
        pool: pool whose allocations and frees are recorded too, with temporaries inside of operations, on the
            devices that the pool has used so far; None: only the recorder's own events.
        frames: keep source lines.

    Raises:
        UsageError: the pool writes a trace file, is closed, or was made with ``check=True``.
    """
    taped = [] if pool is None else _pools(pool)
    return PoolRecorder(taped, frames=frames) if taped else ArrayRecorder(frames=frames)


def _pools(pool: Pool | CupyPool) -> list[tuple[int, Pool]]:
    """Return the pool of each device; none if the pool is off."""
    if pool.settings.mode == "off":
        return []
    if pool.state == "closed":
        raise UsageError("the pool is closed: what is to be recorded comes while it serves")
    if pool.settings.record is not None:
        raise UsageError("the pool writes a trace file: record accesses without record=")
    if pool.settings.check:
        raise UsageError("check=True puts arrays between redzones: record accesses without it")
    if isinstance(pool, Pool):
        return [(0, pool)]
    return sorted((pool.pools or {0: pool.pool(0)}).items())


class PoolRecorder(ArrayRecorder):
    """An `ArrayRecorder` that also records all allocations and frees of the pools inside the context."""

    def __init__(self, pools: list[tuple[int, Pool]], *, frames: bool) -> None:
        super().__init__(frames=frames)
        self._rows.addresses = True
        self._pools = pools
        self._taken: dict[int, list[bytes]] = {device: [] for device, _ in pools}

    def __enter__(self) -> Self:
        super().__enter__()
        for _, pool in self._pools:
            pool.client.set_tracing(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, pool in self._pools:
            pool.client.set_tracing(False)
        super().__exit__(kind, error, trace)

    def trace(self) -> Trace:
        """Return the trace of all events so far.

        Raises:
            MemoryError: the machine had no memory left to keep all events.
        """
        with _core.Bypass():  # keeps its own allocations out of the trace
            made = []
            for device, pool in self._pools:
                while packed := pool.client.take_trace():
                    self._taken[device].append(packed)
                if lost := pool.client.state()["trace_lost"]:
                    raise MemoryError(f"no room for {lost:,} events of the pool")
                recording = EventConverter(pool.device.alignment, addresses=True)
                made.append((device, recording.trace(b"".join(self._taken[device]))))
            names = [self._rows.name(name) for _, trace in made for name in trace.names]
            joined = join(made, self._table(), names)
            alignment = str(max(pool.device.alignment for _, pool in self._pools))
            return self._trace(joined.table, alignment=alignment, **joined.metadata)
