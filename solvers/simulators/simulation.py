"""Result of simulating an allocator on a trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Segments:
    """Memory held from the device; int64 columns of one length, in the order of reservation.

    Attributes:
        address: address of the first byte.
        size: bytes.
        stream: the stream whose request caused the reservation.
        region: number of the range of addresses; blocks may span several segments of one region.
        start: the event of the reservation.
        end: the event of the release, the length of the trace if never released.
    """

    address: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    region: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, eq=False)
class Course:
    """Addresses and memory of an allocator at each event, as in `Simulation`."""

    address: NDArray[np.int64]
    live: NDArray[np.int64]
    reserved: NDArray[np.int64]
    segments: Segments
    driver_calls: int
    failed_at: int | None


@dataclass(frozen=True, eq=False)
class Simulation(Course):
    """Simulated course of a trace under an allocator, with the allocator's settings.

    An alloc that does not fit, after all remedies of the allocator, is omitted with its free, and the
    simulation continues: `failed_at` is the first such alloc.

    Attributes:
        address: int64[events], the address of each alloc; -1 elsewhere, for failed allocs, and for zero
            bytes.
        live: int64[events], bytes of the blocks in use after each event, with the allocator's rounding.
        reserved: int64[events], bytes held from the device after each event.
        segments: the reserved memory, with events; empty if a recording has only bytes.
        driver_calls: number of driver calls to reserve or release memory.
        failed_at: the first alloc that did not fit; None if all fit.
        allocator: name in `ALLOCATORS`.
        parameters: all settings by name, defaults included.
        trace: the simulated trace.
    """

    allocator: str
    parameters: Mapping[str, Any]
    trace: Trace

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes in use, rounded."""
        return int(self.live.max(initial=0))

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes held from the device."""
        return int(self.reserved.max(initial=0))

    @property
    def fragmentation(self) -> float:
        """1 - peak requested / peak reserved bytes, without failed buffers; 0 without reserved bytes."""
        held = self.peak_reserved_bytes
        return 1 - int(self.requested.max(initial=0)) / held if held else 0.0

    @cached_property
    def requested(self) -> NDArray[np.int64]:
        """Requested bytes of the buffers alive after each event, without failed buffers, int64[events]."""
        size = np.where(self.address >= 0, self.trace.size, 0)
        change = np.where(self.trace.kind == EventType.ALLOC, size, 0)
        freed = self.trace.kind == EventType.FREE
        change[freed] = -size[self.trace.births[freed]]
        return np.cumsum(change)

    @cached_property
    def fullest_event(self) -> int:
        """Event with the most live bytes, among the events with the most reserved bytes; 0 without events."""
        if not len(self.live):
            return 0
        return int(np.where(self.reserved == self.peak_reserved_bytes, self.live, -1).argmax())

    @cached_property
    def largest_free_bytes(self) -> int | None:
        """Largest free range of one region after `fullest_event`; None if no segments are known."""
        if not len(self.segments) and self.peak_reserved_bytes:
            return None
        return _largest_gap(self, self.fullest_event) if len(self.live) else 0


def _largest_gap(simulation: Simulation, event: int) -> int:
    """Return the largest range without a block within the memory held after an event, in bytes."""
    trace, segments = simulation.trace, simulation.segments
    rows = np.flatnonzero(simulation.address[: event + 1] >= 0)
    freed = trace.births[: event + 1][trace.kind[: event + 1] == EventType.FREE]
    rows = np.setdiff1d(rows, freed, assume_unique=True)
    block = simulation.address[rows]
    block_end = block + np.diff(simulation.live, prepend=0)[rows]
    held = np.flatnonzero((segments.start <= event) & (event < segments.end))
    held = held[np.argsort(segments.address[held])]
    low, high, region = (
        segments.address[held],
        (segments.address + segments.size)[held],
        segments.region[held],
    )
    separate = (low[1:] != high[:-1]) | (region[1:] != region[:-1])
    begin, end = low[np.append(True, separate)[: len(low)]], high[np.append(separate, True)[: len(high)]]
    start = np.concatenate([end, begin, block])
    stop = np.concatenate([end, begin, block_end])
    order_key = np.repeat([0, 1, 2], [len(end), len(begin), len(block)])
    order = np.lexsort((order_key, start))
    gaps = (start[order][1:] - stop[order][:-1])[order_key[order][1:] != 1]
    return int(gaps.max(initial=0))
