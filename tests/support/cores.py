"""The native client with plans made by hand and an observer that checks all addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mempool import _core
from mempool.reporting.outcomes import missed

STEP = _core.Mark.STEP


def pattern(
    sizes: Sequence[int],
    offsets: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    cyclic: bool = True,
    others: Sequence[tuple[int, int, Sequence[int], Sequence[int]]] = (),
    stream: int = 0,
    sequence: int = 0,
    marks: Sequence[int] = (),
    phase: int = 0,
    least: Sequence[int] | None = None,
    low_water: int = 0,
) -> _core.Pattern:
    """Return a pattern of one sequence, or of several: ``others`` are (sequence, stream, sizes, offsets).

    Without offsets every position has a place of its own. A row of offsets: one for each unrolled iteration.
    ``least``: the least sizes of an envelope. ``low_water``: before which position least is alive.
    """
    if offsets is None:
        offsets = np.concatenate([[0], np.cumsum([-(-size // 512) * 512 for size in sizes])[:-1]]).tolist()
    tables = [(sequence, stream, sizes, offsets), *others]
    unroll = np.array(offsets).reshape(len(sizes), -1).shape[1]
    rows = [np.array(o, np.int64).reshape(len(s), unroll) for *_, s, o in tables]
    arena = max(int((o.max(axis=1) + s).max()) for o, (_, _, s, _) in zip(rows, tables, strict=True))
    made = _core.Pattern(cyclic=cyclic, unroll=unroll, arena_bytes=arena, low_water=low_water)
    how = {} if least is None else {"least": np.array(least, np.int64)}
    for o, (number, on, s, _) in zip(rows, tables, strict=True):
        made.add_table(
            sequence=number,
            stream=on,
            sizes=np.array(s, np.int64),
            offsets=o,
            marks=list(marks),
            phase=phase,
            **how,
        )
    return made


class Core:
    """A simulated device, a pool and a client; no two live buffers may overlap."""

    def __init__(
        self,
        *,
        page: int = 4096,
        capacity: int = 1 << 40,
        large: int = 256 << 10,
        shared: int = 1 << 20,
        share_streams: bool = True,
        limit: int = (1 << 64) - 1,
    ) -> None:
        self.device = _core.SimulatedDevice(
            capacity=capacity, page=page, alignment=512, shared_segment=shared, large=large
        )
        self.pool = _core.Pool(device=self.device, share_streams=share_streams, max_reserved=limit)
        self.client = _core.Client(self.pool, "test")
        self.live: dict[int, int] = {}

    def allocate(self, size: int, stream: int = 0) -> int:
        address = self.client.allocate(size, stream)
        assert address != 0, "out of memory"
        for other, length in self.live.items():
            assert address + size <= other or other + length <= address, "two live buffers overlap"
        self.live[address] = size
        return address

    def free(self, address: int, stream: int = 0) -> None:
        del self.live[address]
        assert self.client.free(address, stream)

    def run(self, sizes: Sequence[int], stream: int = 0) -> int:
        """Allocate all sizes, then free the buffers; return the hits."""
        before = self.hits
        addresses = [self.allocate(size, stream) for size in sizes]
        hit = self.hits - before
        for address in reversed(addresses):
            self.free(address, stream)
        return hit

    def step(self) -> None:
        self.client.mark(STEP)

    @property
    def hits(self) -> int:
        return self.outcomes["hit"]

    @property
    def misses(self) -> int:
        return missed(self.outcomes)

    @property
    def outcomes(self) -> dict[str, int]:
        outcomes: dict[str, int] = self.client.stats()["outcomes"]
        return outcomes

    @property
    def arena_live_ranges(self) -> int:
        alive: int = self.pool.stats()["arena_live_ranges"]
        return alive

    @property
    def committed(self) -> int:
        committed: int = self.device.counts().committed
        return committed

    def give_everything_back(self) -> None:
        for address in list(self.live):
            self.free(address)
        self.client.drop_patterns()
        for stream in range(4):  # what was freed on another one than its own waits for that
            self.device.finish(stream)
        self.pool.trim()
        assert self.pool.release_arena()
        assert self.committed == 0
        assert self.device.counts().errors == 0
