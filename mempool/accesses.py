"""What arrays are read and written, joined with what the pool that serves them allocates and frees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from mempool import _core
from mempool.errors import UsageError
from mempool.joined import join
from mempool.pool import Pool
from mempool.recording import Recording
from traces.recorders.arrays import ArrayRecorder

if TYPE_CHECKING:
    from types import TracebackType

    from mempool.cupy import CupyPool
    from traces import Trace


def record_arrays(pool: Pool | CupyPool | None = None, *, frames: bool = False) -> ArrayRecorder:
    """A recorder of what NumPy and CuPy do with arrays; a context manager.

        with record_arrays(pool) as recorder:
            x = recorder.watch(x)
            ...
        trace = recorder.trace()

    Args:
        pool: whose allocations and frees the trace has, temporaries inside of operations too, on the devices
            that it has met by now; None: it has what the recorder sees.
        frames: keep source lines.

    Raises:
        UsageError: the pool writes a trace file, is closed, or was made with ``check=True``.
    """
    taped = [] if pool is None else _pools(pool)
    return PoolRecorder(taped, frames=frames) if taped else ArrayRecorder(frames=frames)


def _pools(pool: Pool | CupyPool) -> list[tuple[int, Pool]]:
    """The pools of each device, without those that serve nobody."""
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
    """As `ArrayRecorder`, with all that the pools allocate and free while the block runs."""

    def __init__(self, pools: list[tuple[int, Pool]], *, frames: bool) -> None:
        super().__init__(frames=frames)
        self._rows.addresses = True
        self._pools = pools
        self._taken: dict[int, list[bytes]] = {device: [] for device, _ in pools}

    def __enter__(self) -> Self:
        super().__enter__()
        for _, pool in self._pools:
            pool.client.set_tape(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, pool in self._pools:
            pool.client.set_tape(False)
        super().__exit__(kind, error, trace)

    def trace(self) -> Trace:
        """What was recorded so far.

        Raises:
            MemoryError: the machine had no memory left to keep all events.
        """
        with _core.Bypass():  # what this makes is not the program's
            made = []
            for device, pool in self._pools:
                while packed := pool.client.take_tape():
                    self._taken[device].append(packed)
                if lost := pool.client.state()["tape_lost"]:
                    raise MemoryError(f"no room for {lost:,} events of the pool")
                recording = Recording(pool.device.alignment, addresses=True)
                made.append((device, recording.trace(b"".join(self._taken[device]))))
            names = [self._rows.name(name) for _, trace in made for name in trace.names]
            joined = join(made, self._table(), names)
            alignment = str(max(pool.device.alignment for _, pool in self._pools))
            return self._trace(joined.table, alignment=alignment, **joined.metadata)
